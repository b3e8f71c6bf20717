"""Loss of clients at the model that they have received, or the least one at several models, on their own samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan

import numpy as np
from torch import Tensor

from lightning_fl.engine.engine import Engine
from lightning_fl.evaluation.client_evaluation import leaving_no_trace
from lightning_fl.evaluation.evaluation import summed_training_loss
from lightning_fl.processes import gather_by_client
from lightning_fl.slots import Message, several_models
from lightning_fl.state.run_state import SELECTION


def received_models(received: Message) -> list[Tensor]:
    """Return the models (d,) in a message that clients have received: one, or several of which each client chooses the best."""
    return [received[name] for name in several_models(len(received)) if name in received]


def client_losses(
    engine: Engine, asked: Mapping[int, int], models: Sequence[Tensor], buffers: Tensor
) -> dict[int, float]:
    """Return min_j F_k(w_j) of each client over the models, in the given order; all processes must call this.

    F_k is the mean over a client's samples, or over some that are drawn in each round, of the loss of `training_step`, in
    evaluation mode and without augmentation; NaN without a loss. Clients use their own parts of the model. Nothing else changes,
    and no callback is called.

    Args:
        engine: engine of the run.
        asked: number of samples of each client, which the processes share.
        models: models (d,) that they have received.
        buffers: buffers (d_b,) that they have received.
    """
    flat_module, data, run = engine.flat_module, engine.data, engine.run
    size, mine, clients = data.eval_batch_size, {}, list(asked)
    owned = flat_module.personal.read()
    with leaving_no_trace(flat_module):
        for client in engine.population.mine(clients):
            state, samples = run.clients.get(client, {}), data.client(client)
            if asked[client] < len(samples):
                samples = data.client(client, run.random(SELECTION, client).permutation(len(samples))[: asked[client]])
            own = {name: state.get(name, entry) for name, entry in run.personal.items()}
            sizes = [min(size, len(samples) - start) for start in range(0, len(samples), size)]
            losses = []
            for model in models:
                flat_module.load(model, buffers, run.counters)
                flat_module.personal.load(own)
                total, count = summed_training_loss(flat_module, samples.batches(size), sizes, data.train.resident)
                losses.append(total / count if count else nan)
            mine[client] = float(np.min(losses))  # NaN if one is
    flat_module.personal.load(owned)
    return gather_by_client(flat_module.fabric, clients, mine)

"""Loss of clients at the model that they have received, on all of their own samples."""

from __future__ import annotations

from collections.abc import Mapping
from math import nan

from lightning_fl.engine.engine import Engine
from lightning_fl.evaluation.client_evaluation import leaving_no_trace
from lightning_fl.evaluation.evaluation import summed_training_loss
from lightning_fl.processes import gather_by_client
from lightning_fl.slots import Message
from lightning_fl.state.run_state import SELECTION


def client_losses(engine: Engine, asked: Mapping[int, int], received: Message) -> dict[int, float]:
    """Return F_k(x) of each client, in the given order; all processes must call this.

    It is the mean over a client's samples, or over some that are drawn in each round, of the loss of `training_step`, in
    evaluation mode and without augmentation; NaN without a loss. Clients use their own parts of the model. Nothing else changes,
    and no callback is called.

    Args:
        engine: engine of the run.
        asked: number of samples of each client, which the processes share.
        received: message that they have received, `model` (d,) and `buffers` (d_b,).
    """
    flat_module, data, run = engine.flat_module, engine.data, engine.run
    size, mine, clients = data.eval_batch_size, {}, list(asked)
    owned = flat_module.personal.read()
    with leaving_no_trace(flat_module):
        for client in engine.population.mine(clients):
            state, samples = run.clients.get(client, {}), data.client(client)
            if asked[client] < len(samples):
                samples = data.client(client, run.random(SELECTION, client).permutation(len(samples))[: asked[client]])
            flat_module.load(received["model"], received["buffers"], run.counters)
            flat_module.personal.load({name: state.get(name, entry) for name, entry in run.personal.items()})
            sizes = [min(size, len(samples) - start) for start in range(0, len(samples), size)]
            total, count = summed_training_loss(flat_module, samples.batches(size), sizes, data.train.resident)
            mine[client] = total / count if count else nan
    flat_module.personal.load(owned)
    return gather_by_client(flat_module.fabric, clients, mine)

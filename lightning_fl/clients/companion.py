"""Companions: second models of clients, which each client trains beside the server's model, keeps, and predicts with.

A companion has a rule and a training of its own: `train_locally` once more, on the same minibatches, from where the client left
its companion, or from the received model the first time. It changes nothing of what the client uploads. Its parameters, float
buffers and counters are entries of the client's state, which masks and prunings treat as those of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric

from lightning_fl.clients.client_job import ClientJob, Selection
from lightning_fl.clients.flat_module import FlatModule
from lightning_fl.clients.local_training import train_locally
from lightning_fl.slots import State, is_finite

COMPANION, COMPANION_BUFFERS, COMPANION_COUNTERS = "companion/model", "companion/buffers", "companion/scalars/"


def take_companion(state: State) -> State:
    """Remove the entries of a client's companion from its state, and return them; {} if it has none yet."""
    return {name: state.pop(name) for name in list(state) if name.startswith("companion/")}


def read_companion(flat_module: FlatModule) -> State:
    """Return copies of the model in the module as entries of a client's state."""
    counters = {COMPANION_COUNTERS + name: counter for name, counter in flat_module.read_counters().items()}
    return {
        COMPANION: flat_module.params.clone(),
        COMPANION_BUFFERS: flat_module.read_buffers().clone(),
        **counters,
    }


def train_companion(
    flat_module: FlatModule,
    job: ClientJob,
    selection: Selection,
    companion: State,
    seeds: tuple[int, int],
    resident: bool,
    num_steps: int,
) -> State:
    """Train a client's companion after its upload is made, and return its new entries of the client's state.

    Values that the module logs are dropped. A companion that is not finite is replaced by the earlier one.

    Args:
        flat_module: holds the module.
        job: job of the client, with the companion's rule.
        selection: the client's samples.
        companion: entries of the client's state; {} for a client that takes part for the first time.
        seeds: those of the client's training, so that both models see the same minibatches.
        resident: True if the samples are on the accelerator already.
        num_steps: optimiser steps to make, as many as in the client's training.
    """
    rule = job.companion
    assert rule is not None
    if companion:
        start = {"model": companion[COMPANION], "buffers": companion[COMPANION_BUFFERS]}
        job = replace(job, start=start, initial_counters=_counters(companion))
    job, state = replace(job, rule=rule, companion=None), rule.init(job.received["model"])
    with _without_logs(flat_module):
        train_locally(flat_module, job, selection, state, seeds, resident, num_steps)
    trained = read_companion(flat_module)
    if is_finite(trained):
        return trained
    rank_zero_warn(
        "A client's own model is not finite after its training, so the client keeps the earlier one: the learning rate may be "
        "too high for it."
    )
    return companion


@contextmanager
def client_model(flat_module: FlatModule, state: Mapping[str, Tensor]) -> Iterator[None]:
    """Load what a client predicts with, while the module holds the server's model, and load that again at the end.

    Args:
        flat_module: holds the server's model, with what clients own at first.
        state: the client's state; {} for a client that has not taken part, which predicts with the module as it is.
    """
    common = flat_module.read_personal()
    flat_module.load_personal(common | {name: entry for name, entry in state.items() if name in common})
    try:
        if COMPANION in state:
            with flat_module.other_model(state[COMPANION], state[COMPANION_BUFFERS], _counters(state)):
                yield
        else:
            yield
    finally:
        flat_module.load_personal(common)


@contextmanager
def _without_logs(flat_module: FlatModule) -> Iterator[None]:
    """Drop the values that the module logs, and restore its torchmetrics objects, which have seen the client's batches once."""
    metrics = [metric for metric in flat_module.module.modules() if isinstance(metric, Metric)]
    kept = [({name: deepcopy(getattr(m, name)) for name in m._defaults}, m._update_count) for m in metrics]
    yield
    flat_module.logs.take()
    for metric, (states, count) in zip(metrics, kept, strict=True):
        vars(metric).update(states)
        metric._update_count, metric._computed = count, None


def _counters(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the integer buffers of a companion by their names in the module."""
    prefix = COMPANION_COUNTERS
    return {name.removeprefix(prefix): counter for name, counter in state.items() if name.startswith(prefix)}

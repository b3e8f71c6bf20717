"""Companions: models that clients keep and predict with, each beside the server's model, which the client also trains.

A second model has a rule and a training of its own, on the same minibatches, from where the client left it, or from the received
model the first time: `train_locally` once more, or a step beside each step of the client's model (`Rule.alongside`). It changes
nothing of what the client uploads. If the upload is another than the trained model, that model itself can be the companion
(`Algorithm.keeps_trained`). Parameters, float buffers and counters of a companion are entries of the client's state, which masks
and prunings treat as those of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lightning_fl.clients.client_job import Batch, ClientJob, Selection
from lightning_fl.clients.flat_module import FlatModule
from lightning_fl.clients.gradients import gradient_here, gradient_treatment, keeping_gradient
from lightning_fl.clients.local_training import train_locally
from lightning_fl.rules.personal.mixed import SHARE
from lightning_fl.slots import LocalTraining, State, is_finite
from lightning_fl.switches.evaluation_mode import keeping_attributes

COMPANION, COMPANION_BUFFERS, COMPANION_COUNTERS = "companion/model", "companion/buffers", "companion/scalars/"


def take_companion(state: State) -> State:
    """Remove the entries of a client's companion from its state, and return them; {} if it has none yet."""
    return {name: state.pop(name) for name in list(state) if name.startswith("companion/")}


def read_companion(flat_module: FlatModule) -> State:
    """Return copies of the model in the module as entries of a client's state."""
    return _entries(flat_module.params.clone(), flat_module.read_buffers().clone(), flat_module.read_counters())


def keep_trained(flat_module: FlatModule, companion: State) -> State:
    """Return the model that the client has trained as the new entries of its state."""
    return _finite(read_companion(flat_module), companion)


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
    return _finite(read_companion(flat_module), companion)


class CompanionAlongside:
    """Companion that steps with each step of the client's model."""

    def __init__(self, flat_module: FlatModule, job: ClientJob, companion: State) -> None:
        """Begin a round.

        Args:
            flat_module: holds the module, which trains the client's model.
            job: job of the client, with the companion's rule.
            companion: entries of the client's state; {} for a client that takes part for the first time.
        """
        assert job.companion is not None
        self._flat_module, self._rule, self._earlier = flat_module, job.companion, companion
        self._treat = gradient_treatment(flat_module, job)
        received, state = job.received, dict(companion)
        if not companion:
            state = _entries(received["model"], received["buffers"], job.counters) | self._rule.init(received["model"])
        self._counters, self._buffers = _counters(state), state.pop(COMPANION_BUFFERS)
        self._local = LocalTraining(job.setting, received, state.pop(COMPANION).clone(), flat_module.gradient, _no_step)
        self._local.state = {name: x for name, x in state.items() if not name.startswith(COMPANION_COUNTERS)}
        self._local.memory = {"beside": flat_module.params}

    def step(self, beside: LocalTraining, of_step: Sequence[Batch]) -> None:
        """Step the companion on the batches of a step that the client's model is about to make."""
        flat_module, local = self._flat_module, self._local
        local.learning_rate = beside.learning_rate
        other = flat_module.other_model(self._rule.point(local), self._buffers, self._counters)
        with isolate_rng(), keeping_attributes(flat_module.metrics), keeping_gradient(flat_module), other:
            local.gradient = gradient_here(flat_module, of_step, self._treat)
            self._buffers, self._counters = flat_module.read_buffers().clone(), flat_module.read_counters()
        self._rule.step(local)
        local.num_steps += 1

    def finish(self) -> State:
        """Return the new entries of the client's state."""
        local = self._local
        return _finite(_entries(local.params, self._buffers, self._counters) | local.state, self._earlier)


def companion_alongside(flat_module: FlatModule, job: ClientJob, companion: State) -> CompanionAlongside | None:
    """Return the companion that steps with the client's model, as `CompanionAlongside` does; None if there is none."""
    if job.companion is None or not job.companion.alongside:
        return None
    return CompanionAlongside(flat_module, job, companion)


def _no_step() -> None:
    """Refuse the module's optimiser, which steps the client's model."""
    raise RuntimeError("the rule of a companion alongside makes its own step")


def _finite(trained: State, earlier: State) -> State:
    """Return the trained entries, or, with a warning, the earlier ones if these are not finite."""
    if is_finite(trained):
        return trained
    rank_zero_warn(
        "A client's own model is not finite after its training, so the client keeps the earlier one: the learning rate may be "
        "too high for it."
    )
    return earlier


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
            params = state[COMPANION]
            if SHARE in state:
                params = flat_module.params.lerp(params.to(flat_module.params), state[SHARE].to(flat_module.params))
            with flat_module.other_model(params, state[COMPANION_BUFFERS], _counters(state)):
                yield
        else:
            yield
    finally:
        flat_module.load_personal(common)


@contextmanager
def _without_logs(flat_module: FlatModule) -> Iterator[None]:
    """Drop the values that the module logs, and restore its torchmetrics objects, which have seen the client's batches once."""
    with keeping_attributes(flat_module.metrics):
        yield
        flat_module.logs.take()


def _entries(params: Tensor, buffers: Tensor, counters: Mapping[str, Tensor]) -> State:
    """Return a model as entries of a client's state."""
    of_counters = {COMPANION_COUNTERS + name: counter for name, counter in counters.items()}
    return {COMPANION: params, COMPANION_BUFFERS: buffers, **of_counters}


def _counters(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the integer buffers of a companion by their names in the module."""
    prefix = COMPANION_COUNTERS
    return {name.removeprefix(prefix): counter for name, counter in state.items() if name.startswith(prefix)}

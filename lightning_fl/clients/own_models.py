"""Models that clients keep beside the server's, and predict with; see `lightning_fl.slots.Personal`.

A client's own model does not affect its upload. The model's parameters, float buffers and counters, and other values
that the part keeps with it, are entries of the client's state. Masks and prunings treat them like those of the server's
model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lightning_fl.checks.evaluation_mode import keeping_attributes
from lightning_fl.clients.adapted_models import adapted_model
from lightning_fl.clients.client_job import Batch, ClientJob
from lightning_fl.clients.gradients import gradient_here, gradient_treatment
from lightning_fl.clients.local_schedule import ClientWork
from lightning_fl.clients.local_training import train_locally
from lightning_fl.data import FederatedDataModule
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.slots import LocalTraining, Message, OwnModel, Personal, Rule, State, adapter, is_finite, model_keeper
from lightning_fl.state.run_state import Run
from lightning_fl.vectors.personal import OWN

PARAMS, BUFFERS, COUNTERS = f"{OWN}model", f"{OWN}buffers", f"{OWN}scalars/"


def take_own_model(state: State) -> State:
    """Remove the entries of a client's own model from its state, and return them; {} if it has none yet."""
    return {name: state.pop(name) for name in list(state) if name.startswith(OWN)}


def has_own_model(state: Mapping[str, Tensor]) -> bool:
    """True if a client's state has a model of its own."""
    return PARAMS in state


class OwnModelTraining:
    """Implementation of `lightning_fl.slots.OwnTraining`.

    Attributes:
        local: local training of the model that the client uploads.
        own: the client's own model, a copy that the part may change in place.
        steps_beside: True if the part steps it before each step of the client's model.
    """

    local: LocalTraining

    def __init__(
        self,
        flat_module: FlatModule,
        job: ClientJob,
        part: Personal,
        entries: State,
        work: ClientWork,
    ) -> None:
        """Begin a round.

        Args:
            flat_module: holds the module, which trains the client's model.
            job: job of the client.
            part: part by which the client keeps a model.
            entries: entries of the client's state; {} for a client that takes part for the first time.
            work: the client's training, so that both models see the same minibatches.
        """
        self._flat_module, self._part, self._entries = flat_module, part, entries
        self.steps_beside = part.steps_beside
        self._job, self._work = replace(job, personal=()), work
        self._batches: Sequence[Batch] = ()
        received = job.received
        self._own: OwnModel | None = None
        if entries:
            self._first = _own_model(entries)
        else:
            self._first = OwnModel(
                received["model"], received["buffers"], dict(job.counters), part.init(received["model"])
            )
        if part.steps_beside:
            self._treat = gradient_treatment(flat_module, job)

    def starting(self, job: ClientJob) -> ClientJob:
        """Return the job of the model that the client uploads, which begins at the own model if the part continues it."""
        if not self._part.continues:
            return job
        first = self._first
        return replace(job, start={"model": first.params, "buffers": first.buffers}, initial_counters=first.counters)

    @property
    def own(self) -> OwnModel:
        """The client's own model; copied when a part asks for it, because the received and the earlier one must not change."""
        if self._own is None:
            self._own = _copied(self._first)
        return self._own

    @own.setter
    def own(self, model: OwnModel) -> None:
        self._own = model

    def beside(self, local: LocalTraining, step_batches: Sequence[Batch]) -> None:
        """Let the part step the own model on the batches of a step that the client's model is about to make."""
        self.local, self._batches = local, step_batches
        self._part.beside(self)

    def finish(self, local: LocalTraining) -> State:
        """Let the part make the own model after the client's training; returns its entries of the client's state.

        A model that is not finite is replaced by the earlier one, with a warning.
        """
        self.local = local
        self._part.finish(self)
        made = _entries(self.own)
        if is_finite(made):
            return made
        rank_zero_warn(
            "A client's own model is not finite after its training, so the client keeps the earlier one: the learning rate may "
            "be too high for it."
        )
        return self._entries

    def trained(self) -> OwnModel:
        """Return a copy of the model that the client's rule has trained."""
        return _read(self._flat_module)

    def train(self, rule: Rule) -> OwnModel:
        """Train the own model by another rule on the same minibatches; values that the module logs are dropped."""
        flat_module, own = self._flat_module, self._own or self._first
        start = {"model": own.params, "buffers": own.buffers}
        job = replace(self._job, rule=rule, start=start, initial_counters=own.counters)
        with keeping_attributes(flat_module.own_parts):
            state = rule.init(job.received["model"])
            train_locally(flat_module, job, self._work, state)
            flat_module.logs.take()
        return replace(_read(flat_module), state=own.state)

    def gradient(self, params: Tensor) -> Tensor:
        """Return the gradient (d,) of the coming step's batches at a model (d,) with the own model's buffers, which change."""
        flat_module, own = self._flat_module, self.own
        other = flat_module.other_model(params, own.buffers, own.counters)
        with isolate_rng(), keeping_attributes(flat_module.own_parts), flat_module.gradient.kept(), other:
            gradient = gradient_here(flat_module, self._batches, self._treat, self._job.group)
            own.buffers, own.counters = flat_module.read_buffers().clone(), flat_module.read_counters()
        return gradient


@contextmanager
def client_model(
    flat_module: FlatModule,
    personal: Sequence[Personal],
    state: Mapping[str, Tensor],
    data: FederatedDataModule,
    client: int,
    shared: Message,
) -> Iterator[None]:
    """Load the model that a client predicts with in place of the server's, and restore the server's at the end.

    Args:
        flat_module: holds the server's model, with what clients own at first.
        personal: parts that say what clients keep.
        state: the client's state; {} for a client that has not taken part, which keeps nothing yet.
        data: the clients' training samples.
        client: index of the client.
        shared: entries that the server's steps send down with the model; {} outside a run.
    """
    common, part = flat_module.personal.read(), model_keeper(personal)
    flat_module.personal.load(common | {name: entry for name, entry in state.items() if name in common})
    try:
        loaded: AbstractContextManager[None] = nullcontext()
        if part is not None and has_own_model(state):
            own = _own_model(state)
            loaded = flat_module.other_model(part.prediction(own, flat_module.params), own.buffers, own.counters)
        elif (adapting := adapter(personal)) is not None:
            loaded = adapted_model(flat_module, adapting, data, client, shared)
        with loaded:
            yield
    finally:
        flat_module.personal.load(common)


@contextmanager
def predicting_model(
    flat_module: FlatModule,
    personal: Sequence[Personal],
    run: Run,
    data: FederatedDataModule,
    client: int,
    shared: Message,
) -> Iterator[None]:
    """Load the model that a client predicts with, whatever the module holds, and restore the module at the end.

    Args:
        flat_module: holds the module.
        personal: parts that say what clients keep.
        run: has the server's model and the clients' states.
        data: the clients' training samples.
        client: index of the client.
        shared: entries that the server's steps send down with the model.
    """
    present = flat_module.personal.read()
    with flat_module.other_model(run.params, run.buffers, run.counters):
        flat_module.personal.load(run.personal)
        try:
            with client_model(flat_module, personal, run.clients.get(client, {}), data, client, shared):
                yield
        finally:
            flat_module.personal.load(present)


def personal_values_of_clients(
    flat_module: FlatModule, personal: Sequence[Personal], states: Mapping[int, State]
) -> dict[int, State]:
    """Return each client's personal values that match this module."""
    expected = {name: x.shape for name, x in flat_module.personal.read().items()}
    part, names = model_keeper(personal), set(expected)
    if part is not None:
        own = _read(flat_module)
        expected |= {name: x.shape for name, x in _entries(own).items()}
        with torch.no_grad():
            names = expected.keys() | _entries(replace(own, state=part.init(own.params))).keys()
    owned = {k: {name: x for name, x in state.items() if name in names} for k, state in states.items()}
    return {
        k: own for k, own in owned.items() if own and {n: x.shape for n, x in own.items() if n in expected} == expected
    }


def _read(flat_module: FlatModule) -> OwnModel:
    """Return copies of the model in the module."""
    return OwnModel(flat_module.params.clone(), flat_module.read_buffers().clone(), flat_module.read_counters())


def _copied(own: OwnModel) -> OwnModel:
    """Return a copy of a model and of all values that are kept with it."""
    counters, state = ({name: x.clone() for name, x in kept.items()} for kept in (own.counters, own.state))
    return OwnModel(own.params.clone(), own.buffers.clone(), counters, state)


def _entries(own: OwnModel) -> State:
    """Return a client's own model as entries of its state."""
    counters = {COUNTERS + name: counter for name, counter in own.counters.items()}
    return {PARAMS: own.params, BUFFERS: own.buffers, **counters, **{OWN + name: x for name, x in own.state.items()}}


def _own_model(state: Mapping[str, Tensor]) -> OwnModel:
    """Return the client's own model from the entries of its state."""
    counters = {name.removeprefix(COUNTERS): x for name, x in state.items() if name.startswith(COUNTERS)}
    others = {
        name.removeprefix(OWN): x
        for name, x in state.items()
        if name.startswith(OWN) and not name.startswith((PARAMS, BUFFERS, COUNTERS))
    }
    return OwnModel(state[PARAMS], state[BUFFERS], counters, others)

"""The personal slot: what each client keeps for itself, trains besides, and predicts with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_fl.slots.message import Message, State
from lightning_fl.slots.part import Part
from lightning_fl.slots.round_context import RoundContext
from lightning_fl.slots.rule import Gradients, LocalTraining, Rule
from lightning_fl.slots.validation import Validation


@dataclass(frozen=True)
class Owned:
    """Names of what clients own of the module: it trains with the rest of the module, is kept between rounds and never sent.

    Attributes:
        parameters: names of trainable parameters.
        buffers: names of buffers.
    """

    parameters: frozenset[str] = frozenset()
    buffers: frozenset[str] = frozenset()


class Phase(Enum):
    """Parameters that an optimiser step of a client trains."""

    ALL = auto()
    PERSONAL = auto()
    """The parameters that clients own; the rule waits."""
    SHARED = auto()
    """The other parameters."""


@dataclass
class OwnModel:
    """A whole model of a client's own, with the shapes of the server's.

    Attributes:
        params: parameters (d,).
        buffers: float buffers (d_b,).
        counters: integer buffers by name.
        state: what the part keeps with the model, by any name. A pruning mask leaves an entry unchanged if a part of its name
            between slashes is `scalars`, and treats others as parameters.
    """

    params: Tensor
    buffers: Tensor
    counters: dict[str, Tensor]
    state: State = field(default_factory=dict)


class OwnTraining(Protocol):
    """Training of a client's own model in a round, as a part sees it.

    Attributes:
        local: local training of the model that the client uploads.
        own: the client's own model, a copy of what the client left, or of the received model when it first takes part. A part may
            change it in place or replace it.
    """

    local: LocalTraining
    own: OwnModel

    def trained(self) -> OwnModel:
        """Return a copy of the model that the client's rule has trained."""

    def train(self, rule: Rule) -> OwnModel:
        """Train `own` by another rule on the minibatches of the client's training, and return the result."""

    def gradient(self, params: Tensor) -> Tensor:
        """Return the gradient (d,) of the coming step's minibatches at a model (d,), whose buffers are those of `own`.

        It is masked and clipped as the client's, with any weight decay added. The buffers of `own` change as in training.
        """


class OwnSamples(Protocol):
    """A client's training samples, by which a part adapts the server's model.

    Attributes:
        shared: entries that the server's steps send down with the model; {} outside a run.
    """

    shared: Message

    def gradient(self, params: Tensor) -> Tensor:
        """Return the gradient (d,) of one minibatch at parameters (d,), in training mode, whose buffers the client then has."""

    def loss(self, params: Tensor) -> Tensor:
        """Return the mean loss () on all samples at parameters (d,), in evaluation mode."""


class Personal(Part):
    """Says what each client keeps for itself. The base class keeps nothing.

    Clients own layers of the model that they train (`owned`), and a part may let them train in passes of their own (`phase`). Or
    a client keeps a whole model besides (`keeps_model`), of which the server knows nothing, and predicts with it.
    """

    keeps_model = False
    """True if each client keeps a whole model of its own; then `finish` makes it."""
    adapts = False
    """True if each client predicts with what `adapt` makes of the server's model on the client's own samples."""
    continues = False
    """True if the training of the model that the client uploads begins at the client's own, not at the received one."""
    num_models = 1
    """Models that a client trains in a round, for the clock, the energy and the number of samples."""
    reads = Gradients.NONE
    """Gradients that the part reads, as those of a rule."""
    own_step = False
    """True if the part makes plain SGD steps itself, so that the module's optimiser must be that."""
    plain_sgd_reason = "so that momentum or adaptive step sizes of the optimiser would be lost"
    """Reason for plain SGD; see `Rule.plain_sgd_reason`."""
    steps_beside = False
    """True if `beside` is called before every step of the client's model."""
    has_phases = False
    """True if some steps train the parameters that clients own alone, or the others alone; `phase` says which."""

    def rules(self) -> Sequence[Rule]:
        """Return the rules by which `finish` trains further models."""
        return ()

    def check(self, context: RoundContext) -> None:
        """Raise `UserError` if the part does not fit the run; called before the first round."""
        for rule in self.rules():
            rule.check(context)

    def owned(self, module: nn.Module) -> Owned:
        """Return the names of what each client owns of the module."""
        return Owned()

    def configure_callbacks(self) -> list[Callback]:
        """Return the callbacks that are part of it."""
        return []

    def start(self, local: LocalTraining) -> None:
        """Prepare a local training in phases, after the rule has; clients of a stack have equally many steps in a pass."""

    def phase(self, local: LocalTraining) -> Phase:
        """Return what the next step trains; called in every step if the part has phases."""
        return Phase.ALL

    def init(self, received: Tensor) -> State:
        """Return what a client keeps with its own model, when it first takes part and has received a model (d,)."""
        return {}

    def beside(self, training: OwnTraining) -> None:
        """Step the client's own model; called before each step of the client's model, with which it shares the minibatches."""

    def finish(self, training: OwnTraining) -> None:
        """Make the client's own model, `training.own`, after the upload is made."""

    def prediction(self, own: OwnModel, params: Tensor) -> Tensor:
        """Return the parameters (d,) with which a client predicts, given its own model and the server's parameters (d,)."""
        return own.params

    def adapt(self, params: Tensor, own: OwnSamples) -> Tensor:
        """Return the parameters (d,) with which a client predicts that keeps no model of its own.

        Args:
            params: the server's parameters (d,), not to be changed.
            own: the client's training samples.
        """
        return params

    def validate(self, validation: Validation, means: dict[str, float]) -> dict[str, float]:
        """Return further values to log with a validation, by name.

        Args:
            validation: the validation.
            means: means over the clients of what the module logs.
        """
        return {}


def owned_by(parts: Sequence[Personal], module: nn.Module) -> Owned:
    """Return the names of what each client owns of the module by these parts."""
    owned = [part.owned(module) for part in parts]
    return Owned(frozenset().union(*(o.parameters for o in owned)), frozenset().union(*(o.buffers for o in owned)))


def model_keeper(parts: Sequence[Personal]) -> Personal | None:
    """Return the part by which each client keeps a whole model of its own; None if there is none."""
    return next((part for part in parts if part.keeps_model), None)


def adapter(parts: Sequence[Personal]) -> Personal | None:
    """Return the part by which each client adapts the server's model before it predicts; None if there is none."""
    return next((part for part in parts if part.adapts), None)


def has_client_models(parts: Sequence[Personal]) -> bool:
    """True if each client predicts with a whole model of its own, which it keeps or makes of the server's."""
    return model_keeper(parts) is not None or adapter(parts) is not None


def phased(parts: Sequence[Personal]) -> Personal | None:
    """Return the part that divides the local training into phases; None if there is none."""
    return next((part for part in parts if part.has_phases), None)

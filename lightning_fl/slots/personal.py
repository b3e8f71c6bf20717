"""The personal slot: layers and models that each client keeps for itself, and its predictions with them."""

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
    """Names of the personal tensors of the module: clients train them with the rest, keep them between rounds, never send them.

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
    """A client's own whole model, with the shapes of the server's model.

    Attributes:
        params: parameters (d,).
        buffers: float buffers (d_b,).
        counters: integer buffers by name.
        state: tensors that the part keeps with the model, by any name. A pruning mask treats an entry as parameters, unless one
            of the words between slashes in its name is `scalars`: then it leaves the entry unchanged.
    """

    params: Tensor
    buffers: Tensor
    counters: dict[str, Tensor]
    state: State = field(default_factory=dict)


class OwnTraining(Protocol):
    """Training of a client's own model in a round, as a part sees it.

    Attributes:
        local: local training of the model that the client uploads.
        own: copy of the client's own model of its last round, or of the received model when the client first takes part. A part
            may change it in place or replace it.
    """

    local: LocalTraining
    own: OwnModel

    def trained(self) -> OwnModel:
        """Return a copy of the model that the client's rule has trained."""

    def train(self, rule: Rule) -> OwnModel:
        """Train `own` by another rule on the minibatches of the client's training, and return the result."""

    def gradient(self, params: Tensor) -> Tensor:
        """Return the gradient (d,) of the next step's minibatches at parameters (d,) with the buffers of `own`.

        It is masked and clipped like the client's gradient, and includes any weight decay. The buffers of `own` change as in
        training.
        """


class OwnSamples(Protocol):
    """A client's training samples, on which a part adapts the server's model.

    Attributes:
        shared: entries that the server's steps send down with the model; {} outside a run.
    """

    shared: Message

    def gradient(self, params: Tensor) -> Tensor:
        """Return the gradient (d,) of one minibatch at parameters (d,), in training mode; the client keeps the new buffers."""

    def loss(self, params: Tensor) -> Tensor:
        """Return the mean loss () on all samples at parameters (d,), in evaluation mode."""


class Personal(Part):
    """Defines the personal layers or models of clients. The base class defines none.

    Clients may own layers of the model that they train (`owned`); a part may train these layers in separate passes (`phase`). Or
    each client keeps a second, whole model, which the server never sees, and predicts with it (`keeps_model`).
    """

    keeps_model = False
    """True if each client keeps a whole model of its own, which `finish` makes."""
    adapts = False
    """True if each client adapts the server's model to its own samples by `adapt`, and predicts with the result."""
    continues = False
    """True if a client trains the model that it uploads from its own model on, not from the received one."""
    num_models = 1
    """Number of models that a client trains in a round; the clock, the energy and the number of samples depend on it."""
    reads = Gradients.NONE
    """Gradients that the part reads, as for a rule."""
    own_step = False
    """True if the part makes plain SGD steps itself, so that the module's optimiser must be plain SGD."""
    plain_sgd_reason = "so that momentum or adaptive step sizes of the optimiser would be lost"
    """Reason for plain SGD; see `Rule.plain_sgd_reason`."""
    steps_beside = False
    """True if `beside` is called before every step of the client's model."""
    has_phases = False
    """True if some steps train only the personal parameters, or only the others; `phase` decides."""

    def rules(self) -> Sequence[Rule]:
        """Return the rules by which `finish` trains further models."""
        return ()

    def check(self, context: RoundContext) -> None:
        """Raise `UserError` if the part does not fit the run; called before the first round."""
        for rule in self.rules():
            rule.check(context)

    def owned(self, module: nn.Module) -> Owned:
        """Return the names of the module's tensors that each client owns."""
        return Owned()

    def configure_callbacks(self) -> list[Callback]:
        """Return the callbacks that belong to the part."""
        return []

    def start(self, local: LocalTraining) -> None:
        """Prepare a local training in phases; called after `Rule.start`. Clients of a stack have equally many steps in a pass."""

    def phase(self, local: LocalTraining) -> Phase:
        """Return the parameters that the next step trains; called in every step if the part has phases."""
        return Phase.ALL

    def init(self, received: Tensor) -> State:
        """Return the first state that a client keeps with its own model, given the model that it received (d,)."""
        return {}

    def beside(self, training: OwnTraining) -> None:
        """Step the client's own model; called before each step of the client's model, with which it shares the minibatches."""

    def finish(self, training: OwnTraining) -> None:
        """Make the client's own model, `training.own`, after the upload is made."""

    def prediction(self, own: OwnModel, params: Tensor) -> Tensor:
        """Return the parameters (d,) with which a client predicts, given its own model and the server's parameters (d,)."""
        return own.params

    def adapt(self, params: Tensor, own: OwnSamples) -> Tensor:
        """Return the parameters (d,) with which a client predicts if it keeps no model of its own.

        Args:
            params: the server's parameters (d,), not to be changed.
            own: the client's training samples.
        """
        return params

    def choice(self, params: Tensor, own: OwnSamples) -> int | None:
        """Return the number of the model that `adapt` returns, if it chooses among models that all clients have in common.

        Clients that choose the same number are validated together.
        """
        return None

    def validate(self, validation: Validation, means: dict[str, float]) -> dict[str, float]:
        """Return further values to log with a validation, by name.

        Args:
            validation: the validation.
            means: means over the clients of the values that the module logs, by name.
        """
        return {}


def owned_by(parts: Sequence[Personal], module: nn.Module) -> Owned:
    """Return the names of the module's tensors that each client owns by one of these parts."""
    owned = [part.owned(module) for part in parts]
    return Owned(frozenset().union(*(o.parameters for o in owned)), frozenset().union(*(o.buffers for o in owned)))


def model_keeper(parts: Sequence[Personal]) -> Personal | None:
    """Return the part by which each client keeps a whole model of its own; None if there is none."""
    return next((part for part in parts if part.keeps_model), None)


def adapter(parts: Sequence[Personal]) -> Personal | None:
    """Return the part by which each client adapts the server's model before it predicts; None if there is none."""
    return next((part for part in parts if part.adapts), None)


def has_client_models(parts: Sequence[Personal]) -> bool:
    """True if each client predicts with a whole model of its own, which it keeps or adapts from the server's model."""
    return model_keeper(parts) is not None or adapter(parts) is not None


def phased(parts: Sequence[Personal]) -> Personal | None:
    """Return the part that divides the local training into phases; None if there is none."""
    return next((part for part in parts if part.has_phases), None)

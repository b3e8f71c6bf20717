"""The step slot: the server's work after aggregation."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from lightning_fl.slots.codec import Codec
from lightning_fl.slots.message import PROPOSAL, Message, State
from lightning_fl.slots.part import Part
from lightning_fl.slots.rule import Rule
from lightning_fl.slots.server import Server
from lightning_fl.slots.turns import ServerTurn, SetupTurn


class Step(Part, ABC):
    """Changes the server's proposal for the next model. An algorithm has a chain of steps; each starts from the last proposal.

    The merged message must contain the entries that it `needs`. It `provides` the entries that `share` sends down with the model.
    A step that needs `PROPOSAL` must come after one that proposes a model. Unless it says otherwise, it `uses` `model`, the mean
    of the uploads, and `PROPOSAL`; one that uses `model` alone starts the chain.
    """

    _promises, _kept_by = frozenset({"sums_suffice"}), frozenset({"__call__"})

    sums_suffice = False
    """True if it reads only merged entries, and no data or message of single clients."""

    adds_increments = False
    """True if it adds up the means of uploads that are increments (`Traits.INCREMENTS`), in place of applying them."""

    weighs_samples = False
    """True if it weighs the server's samples against the samples of the round's clients."""

    @property
    def asks_clients(self) -> bool:
        """True if clients send something for it before the first round; by default True for every step with a `prepare`."""
        return type(self).prepare is not Step.prepare

    @property
    def uses(self) -> frozenset[str]:
        """Names of the entries that it reads; `model` for the mean of the uploads, `PROPOSAL` for the earlier steps' proposal."""
        return self.needs | {"model", PROPOSAL}

    @property
    def changes(self) -> frozenset[str]:
        """Names of the merged entries that it changes for later steps; a later step must use each."""
        return frozenset()

    @property
    def needs_equal_weights(self) -> frozenset[str]:
        """Names of the entries that the aggregator must average with equal weights."""
        return frozenset()

    @property
    def changes_model(self) -> bool:
        """True if it changes the model by itself; False if it only transforms the change of earlier steps or keeps statistics."""
        return True

    @property
    def follows_pruning(self) -> bool:
        """True if removed filters can be cut out of its state; False if entries of the state belong to rows or columns."""
        return True

    @property
    def moves_coordinates(self) -> bool:
        """True if coordinates of the next model may have a new meaning, so that their moments must not be kept."""
        return False

    @property
    def sets_mask(self) -> bool:
        """True if it may prune parameters by a mask."""
        return False

    def change_entry(self) -> tuple[str, Codec] | None:
        """Return the name and the codec of a shared entry from which clients can compute the next model; None if none."""
        return None

    def rules(self) -> tuple[Rule, ...]:
        """Return the rules of its trainings on the server; () if it trains with the module's own optimiser or not at all."""
        return ()

    def steps(self) -> tuple[Step, ...]:
        """Return the steps inside in their order; itself alone if there are none."""
        return (self,)

    def check(self, server: Server) -> None:
        """Raise `UserError` if the run does not meet the step's needs; called before any training."""

    def prepare(self, turn: SetupTurn) -> None:
        """Do the work before the first round, for example send data; called once, not again in a resumed run."""

    def init(self, params: Tensor) -> State:
        """Return the step's state before the first round, given the initial model (d,)."""
        return {}

    def share(self, state: State) -> Message:
        """Return the entries that the broadcast contains besides the model; called at the start of each round."""
        return {}

    def encoded(self, state: State) -> dict[str, Tensor]:
        """Return the bits of the entries of `share` that the step has encoded itself, by name, as `through` returned them."""
        return {}

    def evaluated(self, params: Tensor, state: State) -> Tensor:
        """Return the model (d,) to validate and test, given the server's parameters (d,) and the step's state."""
        return params

    @abstractmethod
    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Take the step: replace `turn.proposal` and return the step's new state.

        Called once in each round in which an upload was accepted. If the loss guard undoes the step, its state stays as before.

        Args:
            turn: the round, with the proposal of the steps before.
            state: state that the step returned last, at first from `init`; not to be changed.
        """

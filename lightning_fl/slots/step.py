"""The slot of the server's own work after aggregation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_fl.slots.codec import Codec
from lightning_fl.slots.message import Message, State
from lightning_fl.slots.rule import Rule
from lightning_fl.slots.server import Server
from lightning_fl.slots.turns import ServerTurn, SetupTurn

if TYPE_CHECKING:
    pass


class Step(ABC):
    """What the server does next; an algorithm has a chain of steps, each working on the proposal of the one before."""

    shares = frozenset[str]()
    """Names that `share` sends down with the model."""
    consumes = frozenset[str]()
    """Names it needs in the merged message besides `model` and `buffers`."""

    needs_uploads = False
    """Whether it reads the uploads one by one, so that the aggregator must keep them."""

    def changes_model(self) -> bool:
        """Whether it changes the model by itself; False for a step that follows a change of others, or keeps something beside."""
        return True

    def change_entry(self) -> tuple[str, Codec] | None:
        """The name of an entry that it shares, and the codec through which clients that hold the rest work its result out."""
        return None

    def rules(self) -> tuple[Rule, ...]:
        """The rules by which it trains on the server, if not by the module's own optimiser."""
        return ()

    def check(self, server: Server) -> None:  # noqa: B027 -- optional
        """Raise `UserError` if the run lacks what the step needs; called before anything is trained."""

    def prepare(self, turn: SetupTurn) -> None:  # noqa: B027
        """What has to cross, or be done, before the first round."""

    def init(self, params: Tensor) -> State:
        """State before the first round."""
        return {}

    def share(self, state: State) -> Message:
        """What goes down with the model."""
        return {}

    @abstractmethod
    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Replace `turn.proposal` and return the step's new state."""

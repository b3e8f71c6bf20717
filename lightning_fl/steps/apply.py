"""Apply the mean of the uploads to the model (FedAvg)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt
from torch import Tensor

from lightning_fl.checks import Called
from lightning_fl.slots import ServerTurn, State, Step
from lightning_fl.vectors.pieces import by_pieces


@dataclass(frozen=True)
class Apply(Step):
    """w ← w + η_g Δ, Δ the merged delta; float buffers take their whole delta.

    Attributes:
        learning_rate: η_g > 0, the server's learning rate; 1 is FedAvg.
    """

    sums_suffice = True
    changeable = frozenset({"learning_rate"})
    uses = frozenset({"model"})
    learning_rate: Annotated[float, Gt(0), Called("the server learning rate")] = 1.0

    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Start the chain: propose FedAvg's model, or a longer or shorter step towards it."""
        turn.proposal = by_pieces(self._moved, turn.params, turn.merged["model"])
        if "buffers" in turn.merged:
            turn.proposed_buffers = turn.buffers + turn.merged["buffers"]
        return state

    def _moved(self, params: Tensor, delta: Tensor) -> Tensor:
        return params.add(delta, alpha=self.learning_rate)

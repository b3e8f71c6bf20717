"""The server takes the mean of the uploads (FedAvg)."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_fl.slots import ServerTurn, State, Step


@dataclass(frozen=True)
class Apply(Step):
    """w ← w + Δ, Δ the merged delta; float buffers likewise."""

    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Start the chain: the proposal is FedAvg's model."""
        turn.proposal = turn.params + turn.merged["model"]
        if "buffers" in turn.merged:
            turn.proposed_buffers = turn.buffers + turn.merged["buffers"]
        return state

"""Add up the clients' compressed differences (DASHA: Tyurin, Richtárik, ICLR 2023)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fl.slots import ServerTurn, State, Step
from lightning_fl.vectors.pieces import by_pieces, sum_of


@dataclass(frozen=True)
class Accumulate(Step):
    """g ← g + (1/N) Σ_k m_k over the accepted clients;  w ← w + g.  g is 0 at first; float buffers take their whole delta.

    N is the number of all clients that have samples, not of the cohort, so that g remains the mean of all g_k that the clients
    keep (`Differences`). The aggregator must average with equal weights.
    """

    sums_suffice = True
    adds_increments = True
    uses = needs_equal_weights = frozenset({"model"})

    def init(self, params: Tensor) -> State:
        """Return g = 0."""
        return {"total": torch.zeros_like(params)}

    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Start the chain: add the clients' differences, and propose a step by the sum."""
        share = len(turn.clients) / turn.context.num_clients

        def moved(total: Tensor, increment: Tensor) -> Tensor:
            return total + share * increment

        total = by_pieces(moved, state["total"], turn.merged["model"])
        turn.proposal = sum_of(turn.params, total)
        if "buffers" in turn.merged:
            turn.proposed_buffers = turn.buffers + turn.merged["buffers"]
        return {"total": total}

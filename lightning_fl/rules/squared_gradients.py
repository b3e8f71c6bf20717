"""PruneFL's local rule (Jiang et al., Model Pruning Enables Efficient Federated Learning on Edge Devices, IEEE TNNLS 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor

from lightning_fl.checks import Called
from lightning_fl.slots import LocalTraining, Message, Rule, State

IMPORTANCE = "scalars/importance"


@dataclass(frozen=True)
class SquaredGradients(Rule):
    """Train with the module's own optimiser;  G = Σ_steps g;  Z_k ← Z_k + G² · (samples read).

    Z_k stays with the client. In every `interval`-th round the client sends it whole, q·d bits, and it restarts at 0 once the
    server has accepted it. The gradients are dense: parameters outside the pruning mask, whose value is 0, count like the others.

    Attributes:
        interval: rounds from one upload of Z_k to the next, at least 1; None: no Z_k at all.
        each_step: Z_k ← Z_k + Σ_steps g² instead, as PruneFL's server does on samples of its own.
    """

    provides = frozenset({IMPORTANCE})
    reads_length = True
    unmasked_state = frozenset({"importance"})
    interval: Annotated[int, Ge(1), Called("the interval of rounds")] | None = 50
    each_step: bool = False

    @property
    def omits(self) -> frozenset[str]:
        """Z_k, unless it is sent in every round."""
        return frozenset() if self.interval == 1 else self.provides

    def init(self, params: Tensor) -> State:
        """Return Z_k = 0."""
        return {"importance": torch.zeros_like(params)} if self.interval else {}

    def start(self, local: LocalTraining) -> None:
        """Set G = 0."""
        if self.interval:
            local.memory["sum"] = torch.zeros_like(local.params)

    def observe(self, local: LocalTraining) -> None:
        """Add the gradient: G ← G + g."""
        if self.interval:
            local.memory["sum"].add_(local.gradient.square() if self.each_step else local.gradient)

    def finish(self, local: LocalTraining) -> Message:
        """Return y − w, and Z_k when it is due."""
        message = super().finish(local)
        if self.interval:
            squares = local.memory["sum"]
            squares = squares if self.each_step else squares.square() * local.num_samples
            importance = local.state["importance"] + squares
            is_due = (local.context.round + 1) % self.interval == 0
            local.state = {"importance": torch.zeros_like(importance) if is_due else importance}
            message |= {IMPORTANCE: importance} if is_due else {}
        return message

"""One gradient step per round, for methods that compress gradients (DASHA: Tyurin, Richtárik, ICLR 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_fl.slots import LocalTraining, RoundContext, Rule
from lightning_fl.vectors.pieces import subtract_scaled


@dataclass(frozen=True)
class GradientStep(Rule):
    """y ← w − η g, once a round, whatever local_epochs and local_steps;  sends y − w = −η g.  g includes weight decay.

    Attributes:
        batch: g is the gradient on all of the client's samples (`full`), or on one `minibatch`.
    """

    own_step = True
    batch: Literal["full", "minibatch"] = "full"

    def steps_in_round(self, context: RoundContext) -> int:
        """Return 1."""
        return 1

    def takes_full_batches(self, context: RoundContext) -> bool:
        """True if g is the gradient on all samples."""
        return self.batch == "full"

    def step(self, local: LocalTraining) -> None:
        """Take the step."""
        subtract_scaled(local.params, local.gradient, local.learning_rate)

"""Local training with the federation's momentum (FedDA: Jin et al., Accelerated Federated Learning with Decoupled Adaptive
Optimization, ICML 2022, its instance with SGD and momentum).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Interval

from lightning_fl.checks import Called
from lightning_fl.slots import LocalTraining, Message, RoundContext, Rule


@dataclass(frozen=True)
class DecoupledMomentum(Rule):
    """`evolving`: v = m at the start;  v ← βv + (1 − β)g;  y ← y − ηv;  sends y − w and v − m.

    `frozen`: u = βm + (1 − β)g;  y ← y − ηu;  sends y − w and the mean of the u's minus m.

    The sum P of the directions that the paper sends is (w − y)/η. In the last r rounds g is the gradient on all of the client's
    samples in every local step, and the number of steps is unchanged: full batches at the end, as in the paper's abstract.

    Attributes:
        beta: β in [0, 1); 0 is plain SGD. Default of the papers: 0.9.
        variant: `evolving` updates the momentum in every local step, as in centralised SGD with momentum; `frozen` keeps the
            federation's.
        full_batch_last: r, number of last rounds with full batches, at least 0.
    """

    changeable = frozenset({"beta", "full_batch_last"})
    own_step = True
    needs = provides = frozenset({"moments/momentum"})
    beta: Annotated[float, Interval(ge=0, lt=1), Called("the momentum beta")] = 0.9
    variant: Literal["evolving", "frozen"] = "evolving"
    full_batch_last: Annotated[int, Ge(0), Called("full_batch_last, a number of rounds,")] = 0

    def takes_full_batches(self, context: RoundContext) -> bool:
        """True in the last r rounds."""
        return context.round >= context.num_rounds - self.full_batch_last

    def note_on_resume(self, context: RoundContext, planned: int) -> str:
        """Name the rounds so far that used full batches as the last of a shorter run, because they are no longer the last."""
        first, end = planned - self.full_batch_last, context.num_rounds - self.full_batch_last
        moved = range(max(0, first) + 1, min(context.round, end) + 1)  # rounds count from 1 in messages
        if not moved:
            return ""
        which = f"Rounds {moved[0]} to {moved[-1]}" if len(moved) > 1 else f"Round {moved[0]}"
        again = f"the end of {context.num_rounds} rounds uses them again"
        return f"{which} used full batches at the end of {planned} rounds; {again}."

    def start(self, local: LocalTraining) -> None:
        """Set v = m, stored as v − m = 0; `frozen` stores the sum of u − m."""
        local.memory["drift"] = torch.zeros_like(local.params)

    def step(self, local: LocalTraining) -> None:
        """Take one step along v or u."""
        momentum, drift = local.received["moments/momentum"], local.memory["drift"]
        if self.variant == "evolving":
            # v − m ← β(v − m) + (1 − β)(g − m)
            drift.mul_(self.beta).add_(local.gradient - momentum, alpha=1 - self.beta)
            local.params.sub_((momentum + drift) * local.learning_rate)
        else:
            change = (local.gradient - momentum) * (1 - self.beta)
            drift.add_(change)
            local.params.sub_((momentum + change) * local.learning_rate)

    def finish(self, local: LocalTraining) -> Message:
        """Return y − w, and v − m or the mean of u − m."""
        steps = 1 if self.variant == "evolving" else max(local.num_steps, 1)
        return {**super().finish(local), "moments/momentum": local.memory["drift"] / steps}

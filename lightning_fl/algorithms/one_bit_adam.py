"""1-bit Adam: Tang et al., 1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed, ICML 2021
(arXiv:2102.02888).

first T_w rounds: FedAdam, 3 · 32 · d bits each way; then V is fixed, and

client k:  m ← β₁m + (1 − β₁)g;  y ← y − η m / √(V + ε), L steps   rule: WarmedUpAdam
           z = u + e;  upload C(z) = s · sgn(z);  e ← z − C(z)     codec: ErrorFeedback of OneBit
server:    y = Σ p C(z) + ē;  M ← C(y);  ē ← y − M                 aggregator: WeightedMean, step: WarmedUpMoments
           w ← w − η L M / √(V + ε)
           broadcast M; clients that hold w and V compute w        codec: Followed

The paper's method has one step per round, L = 1, where u = m. For more, u is the mean momentum of the L steps and the server's
step is L times as long. The authors put ε outside the root; here it is inside in both phases. The broadcast of round T_w still
contains all of (w, M, V), so that clients start the second phase from the end of the first.
"""

from __future__ import annotations

from typing import Any, Literal

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fl.aggregators import WeightedMean
from lightning_fl.algorithms._adam import AdamOnClients
from lightning_fl.codecs import ErrorFeedback, Followed, OneBit
from lightning_fl.rules import WarmedUpAdam
from lightning_fl.slots import RoundContext, Server
from lightning_fl.steps import WarmedUpMoments

MOMENTUM = "moments/momentum"


class OneBitAdam(AdamOnClients):
    """FedAdam for a warm-up, then momentum at one bit per number in both directions, with error feedback."""

    def __init__(
        self,
        warmup: int | float = 0.2,
        scale: Literal["l2", "l1"] = "l2",
        groups: Literal["tensor", "global"] = "tensor",
        momentum_mask: bool = True,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        weighting: Literal["samples", "uniform"] = "samples",
        **slots: Any,
    ) -> None:
        """Fill all slots except the exchange.

        Args:
            warmup: T_w, the rounds of FedAdam: a count of at least 1, or a fraction of the run's rounds. Give a count if the run
                may get more rounds later.
            scale: s = ‖z‖₂ / √n (`l2`), the authors' choice, or ‖z‖₁ / n (`l1`), which is never further from z than zero is.
            groups: Numbers z that share a scale: each `tensor` of the model, or `global`.
            momentum_mask: Leave coordinates unchanged that had no gradient in the warm-up.
        """
        self.warmup = warmup
        codec = OneBit(scale, groups, names=(MOMENTUM,), known=("scalars/learning_rate",))
        super().__init__(
            (WarmedUpMoments(codec, epsilon, warmup, momentum_mask),),
            rule=WarmedUpAdam(beta1, beta2, epsilon, warmup, momentum_mask),
            uplink=ErrorFeedback(codec),
            downlink=Followed(codec, MOMENTUM),
            aggregator=WeightedMean(weighting),
            **slots,
        )

    def check(self, context: RoundContext, server: Server, cohort_size: int) -> None:
        """Check the run, and warn if it ends before the second phase."""
        super().check(context, server, cohort_size)
        if isinstance(self.warmup, int) and self.warmup > context.num_rounds:
            rank_zero_warn(
                f"the warm-up of OneBitAdam takes {self.warmup} rounds and the run has {context.num_rounds}: "
                "nothing will be compressed."
            )

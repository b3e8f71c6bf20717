"""FedBuff: Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, AISTATS 2022 (arXiv:2106.06639).

M = clients_per_round clients train at any time; one whose upload has come gives its place to another      pace: Pace
client k:  Δ_i = y − w_u, with w_u the model after u updates, which it has received                        rule: LocalOptimizer
server:    after K uploads  w ← w + η_g (1/K) Σ_i ρ(s_i) Δ_i,  ρ(s) = 1/√(1 + s)                           StaleMean, Apply
           s_i: updates since the client received w_u

As in the paper, the divisor is K less the rejected uploads, not Σ ρ. The authors' FLSim also divides by ρ of the mean
staleness.
"""

from __future__ import annotations

from typing import Any, Literal

from lightning_fl.aggregators import StaleMean
from lightning_fl.aggregators.stale_mean import Decay
from lightning_fl.algorithms._asynchronous import Asynchronous
from lightning_fl.slots import Pace
from lightning_fl.steps import Apply


class FedBuff(Asynchronous):
    """Asynchronous FedAvg: the server updates the model after every few uploads, and stale uploads count less."""

    def __init__(
        self,
        buffer_size: int = 10,
        decay: Decay = 0.5,
        learning_rate: float = 1.0,
        weighting: Literal["uniform", "samples"] = "uniform",
        max_staleness: int | None = None,
        **slots: Any,
    ) -> None:
        """Fill the aggregator slot and the first step.

        Args:
            buffer_size: Uploads of an update, K. As many clients as clients_per_round train at any time.
            decay: Exponent of 1/(1 + s) by which an upload that is s updates stale counts less, or constant, polynomial (0.5) or
                hinge (1 for up to four updates, then 1/(10 (s − 4) + 1)).
            learning_rate: Server learning rate η_g.
            weighting: Uploads count the same (uniform), or by their clients' numbers of samples.
            max_staleness: Reject uploads that are staler: each is one of the K, but not in the mean. None for none.
        """
        super().__init__(
            Pace(buffer_size, max_staleness),
            (Apply(learning_rate),),
            aggregator=StaleMean(decay, weighting),
            **slots,
        )

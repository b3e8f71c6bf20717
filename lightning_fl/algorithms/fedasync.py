"""FedAsync: Xie et al., Asynchronous Federated Optimization, OPT 2020 (arXiv:1903.03934).

M = clients_per_round clients train at any time                                                            pace: Pace
client k:  y ← y − η (∇F_k(y) + μ(y − w_u)), with w_u the model after u updates, which it has received     rule: Proximal
server:    after every upload  w ← (1 − α_s) w + α_s y,  α_s = α ρ(s)                                      StaleMean, Apply
           s: updates since the client received w_u

The server mixes models, so it adds α_s (w_u + Δ_k − w) to w. FedBuff with K = 1 adds α_s Δ_k.
"""

from __future__ import annotations

from typing import Any

from lightning_fl.aggregators import StaleMean
from lightning_fl.aggregators.stale_mean import Decay
from lightning_fl.algorithms._asynchronous import Asynchronous
from lightning_fl.rules import Proximal
from lightning_fl.slots import Pace
from lightning_fl.steps import Apply


class FedAsync(Asynchronous):
    """Asynchronous: the server mixes each client's model into its own on arrival, with less weight the staler it is."""

    def __init__(
        self,
        alpha: float = 0.6,
        decay: Decay = "constant",
        mu: float = 0.005,
        max_staleness: int | None = None,
        **slots: Any,
    ) -> None:
        """Fill the rule and aggregator slots and the first step.

        Args:
            alpha: Share α in (0, 1] of a client's model in the server's next one, if it is not stale; the authors' are 0.6 and
                0.9.
            decay: The factor ρ(s) of this share for a model that is s updates stale: constant (1), polynomial (1/√(1 + s)), hinge
                (1 for up to four updates, then 1/(10 (s − 4) + 1)), or the exponent of 1/(1 + s).
            mu: Weight μ ≥ 0 of the proximal term (μ/2)‖y − w_u‖².
            max_staleness: Reject models that are staler; each still counts as an update. None for none.
        """
        super().__init__(
            Pace(1, max_staleness, counts_from="present"),
            (Apply(),),
            rule=Proximal(mu=mu),
            aggregator=StaleMean(decay, alpha=alpha),
            **slots,
        )

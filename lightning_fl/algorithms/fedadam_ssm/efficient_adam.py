"""Efficient-Adam: Chen et al., Efficient-Adam: Communication-Efficient Distributed Adam, 2022.

client k:  L steps of Adam with moments of its own                 rule: LocalAdam
           z = y − w + e;  upload Q(z);  e ← z − Q(z)              codec: ErrorFeedback of Quantiser or OneBit
server:    y = Σ p Q(z) + ē;  w ← w + Q(y);  ē ← y − Q(y)          aggregator: WeightedMean, steps: Apply, Compress
           broadcast Q(y)                                          codec: Followed

b bits a number and 32 for each scale, both ways; the model itself goes down whole in the first round. The paper's method has one
step to a round, L = 1. Moments are never sent or averaged. Quantities are deltas, the paper's with the sign turned.
"""

from __future__ import annotations

from typing import Literal

from lightning_fl.aggregators import WeightedMean
from lightning_fl.algorithms.algorithm import Algorithm
from lightning_fl.codecs import Dense, ErrorFeedback, Followed, OneBit, Quantiser
from lightning_fl.errors import UserError, nearest
from lightning_fl.rules import LocalAdam
from lightning_fl.slots import Codec
from lightning_fl.steps import Apply, Compress


class EfficientAdam(Algorithm):
    """Adam with moments that stay on the clients, quantised both ways with error feedback on both sides."""

    def __init__(
        self,
        quantiser: Literal["log", "uniform", "sign"] = "log",
        bits: int = 3,
        groups: Literal["tensor", "global"] = "tensor",
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        weighting: Literal["samples", "uniform"] = "samples",
    ) -> None:
        """Fill all slots but the exchange.

        Args:
            quantiser: Levels s · 2^−j (`log`), equally spaced levels (`uniform`), or s · sgn(z) with s = ‖z‖₁ / n (`sign`), which
                takes one bit whatever `bits` says.
            bits: Of a number, from 2 to 32; 32 is not quantised at all.
            groups: Numbers that share a scale s: each `tensor` of the model, or `global`.
            beta1: β₁ in [0, 1), of the first moment.
            beta2: β₂ in [0, 1), of the second moment.
            epsilon: ε > 0, inside the root.
            weighting: Average by `samples`, or with `uniform` weights.
        """
        quantisers = ("log", "uniform", "sign")
        if quantiser not in quantisers:
            raise UserError(f"quantiser {quantiser!r} is unknown; {nearest(str(quantiser), quantisers)}.")
        codec: Codec
        if quantiser == "sign":
            codec = OneBit("l1", groups)
        elif bits == 32:
            codec = Dense()
        else:
            codec = Quantiser(quantiser, bits, groups)
        super().__init__(
            rule=LocalAdam(beta1, beta2, epsilon),
            uplink=ErrorFeedback(codec),
            downlink=Followed(codec, "model/change"),
            aggregator=WeightedMean(weighting),
            steps=(Apply(), Compress(codec)),
        )

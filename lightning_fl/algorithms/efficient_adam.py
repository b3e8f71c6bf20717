"""Efficient-Adam: Chen et al., Efficient-Adam: Communication-Efficient Distributed Adam, 2022 (arXiv:2205.14473).

client k:  L steps of Adam with its own moments                    rule: LocalAdam
           z = y − w + e;  upload Q(z);  e ← z − Q(z)              codec: ErrorFeedback of Quantiser or OneBit
server:    y = Σ p Q(z) + ē;  w ← w + Q(y);  ē ← y − Q(y)          aggregator: WeightedMean, steps: Apply, Compress
           broadcast Q(y)                                          codec: Followed

b bits per number and 32 per scale in both directions; the first round broadcasts the whole model. The paper's method has one
step per round, L = 1. Moments are never sent or averaged. Quantities are deltas, with the opposite sign of the paper's;
with `quantiser: sign`, a delta of 0 is sent as +s.
"""

from __future__ import annotations

from typing import Any, Literal

from lightning_fl.aggregators import WeightedMean
from lightning_fl.algorithms._adam import AdamOnClients
from lightning_fl.codecs import Dense, ErrorFeedback, Followed, OneBit, Quantiser
from lightning_fl.rules import LocalAdam
from lightning_fl.slots import Codec
from lightning_fl.steps import Apply, Compress


class EfficientAdam(AdamOnClients):
    """Adam with moments that stay on the clients; uploads and broadcasts are quantised with error feedback."""

    def __init__(
        self,
        quantiser: Literal["log", "uniform", "sign"] = "log",
        bits: int = 3,
        groups: Literal["tensor", "global"] = "tensor",
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        weighting: Literal["samples", "uniform"] = "samples",
        **slots: Any,
    ) -> None:
        """Fill all slots except the exchange.

        Args:
            quantiser: Levels s · 2^−j (`log`), equally spaced levels (`uniform`), or s · sgn(z) with s = ‖z‖₁ / n (`sign`), which
                takes one bit and ignores `bits`.
            bits: Bits per number, from 2 to 32; 32 is without quantisation.
            groups: Numbers that share a scale s: each `tensor` of the model, or `global`.
        """
        codec: Codec
        if quantiser == "sign":
            codec = OneBit("l1", groups)
        elif bits == 32:
            codec = Dense()
        else:
            codec = Quantiser(quantiser, bits, groups)
        super().__init__(
            (Apply(), Compress(codec)),
            rule=LocalAdam(beta1, beta2, epsilon),
            uplink=ErrorFeedback(codec),
            downlink=Followed(codec, "model/change"),
            aggregator=WeightedMean(weighting),
            **slots,
        )

"""FedAdam and its sparse uploads: FedAdam-SSM (2024), whose baselines FedAdam-Top and Fairness-Top are.

client k:  (y, m, v) ← (w, M, V);  L steps of Adam                 rule: SharedAdam
           upload Δy, Δm, Δv                                       codec: Dense
             FedAdamTop   each its own k largest                   codec: TopK
             FedAdamSSM   where Δy (or Δm, or Δv) is largest       codec: SharedTopK
             FairnessTop  where all three have a say               codec: FairTopK
server:    w ← w + Σ p Δy;  M ← M + Σ p Δm;  V ← V + Σ p Δv        aggregator: WeightedMean, steps: Apply, Moments
           what a client left out counts as zero
           broadcast w, M, V, or where they have changed           codec: Dense or Changes

Adam has no bias correction and ε inside the root. Not the FedAdam of Reddi et al. (ICLR 2021), where only the server has moments.
Nothing is fed back: what a mask leaves out is dropped, and the next round starts from the server's (w, M, V).
"""

from __future__ import annotations

from typing import Literal

from lightning_fl.aggregators import WeightedMean
from lightning_fl.algorithms.algorithm import Algorithm
from lightning_fl.codecs import Changes, Dense, FairTopK, SharedTopK, TopK
from lightning_fl.errors import UserError, nearest
from lightning_fl.rules import SharedAdam
from lightning_fl.slots import Codec
from lightning_fl.steps import Apply, Moments
from lightning_fl.vectors.top_k import IndexBits

Weighting = Literal["samples", "uniform"]
Downlink = Literal["dense", "union"]
LEADERS = {"parameters": "model", "first_moment": "moments/first", "second_moment": "moments/second"}


class FedAdam(Algorithm):
    """Adam on the clients, with moments that are averaged like the model."""

    def __init__(
        self, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-6, weighting: Weighting = "samples"
    ) -> None:
        """Fill the rule and the steps.

        Args:
            beta1: β₁ in [0, 1), of the first moment.
            beta2: β₂ in [0, 1), of the second moment.
            epsilon: ε > 0, inside the root.
            weighting: Average by `samples`, or with `uniform` weights.
        """
        super().__init__(
            rule=SharedAdam(beta1, beta2, epsilon),
            aggregator=WeightedMean(weighting),
            steps=(Apply(), Moments()),
        )


class FedAdamTop(Algorithm):
    """FedAdam whose clients send the k largest numbers of each of the three vectors."""

    def __init__(
        self,
        alpha: float = 0.05,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        weighting: Weighting = "samples",
        downlink: Downlink = "dense",
        index_bits: IndexBits = "ceil",
    ) -> None:
        """Fill the rule, the codecs and the steps.

        Args:
            alpha: Share of the coordinates that are sent, in (0, 1]; 1 is FedAdam.
            beta1: β₁ in [0, 1), of the first moment.
            beta2: β₂ in [0, 1), of the second moment.
            epsilon: ε > 0, inside the root.
            weighting: Average by `samples`, or with `uniform` weights.
            downlink: Broadcast all (`dense`), or only where something has changed (`union` of the masks).
            index_bits: Count ⌈log2 d⌉ bits for an index, as it is sent (`ceil`), or log2 d, as the paper does (`exact`).
        """
        super().__init__(
            rule=SharedAdam(beta1, beta2, epsilon),
            uplink=TopK(alpha, index_bits=index_bits),
            downlink=_downlink(downlink),
            aggregator=WeightedMean(weighting),
            steps=(Apply(), Moments()),
        )


class FedAdamSSM(Algorithm):
    """FedAdam whose clients send three vectors under one shared sparse mask."""

    def __init__(
        self,
        alpha: float = 0.05,
        mask: Literal["parameters", "first_moment", "second_moment"] = "parameters",
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        weighting: Weighting = "samples",
        downlink: Downlink = "dense",
        index_bits: IndexBits = "ceil",
    ) -> None:
        """Fill the rule, the codecs and the steps.

        Args:
            alpha: Share of the coordinates that are sent, in (0, 1]; 1 is FedAdam.
            mask: Whose change chooses the coordinates: SSM, SSM_M or SSM_V of the paper.
            beta1: β₁ in [0, 1), of the first moment.
            beta2: β₂ in [0, 1), of the second moment.
            epsilon: ε > 0, inside the root.
            weighting: Average by `samples`, or with `uniform` weights.
            downlink: Broadcast all (`dense`), or only where something has changed (`union` of the masks).
            index_bits: Count ⌈log2 d⌉ bits for an index, as it is sent (`ceil`), or log2 d, as the paper does (`exact`).
        """
        if mask not in LEADERS:
            raise UserError(f"mask {mask!r} is unknown; {nearest(str(mask), LEADERS)}.")
        super().__init__(
            rule=SharedAdam(beta1, beta2, epsilon),
            uplink=SharedTopK(alpha, LEADERS[mask], index_bits=index_bits),
            downlink=_downlink(downlink),
            aggregator=WeightedMean(weighting),
            steps=(Apply(), Moments()),
        )


class FairnessTop(Algorithm):
    """FedAdam whose clients send three vectors under one mask that all three have a say in."""

    def __init__(
        self,
        alpha: float = 0.05,
        union: Literal["interleaved", "max"] = "interleaved",
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        weighting: Weighting = "samples",
        downlink: Downlink = "dense",
        index_bits: IndexBits = "ceil",
    ) -> None:
        """Fill the rule, the codecs and the steps.

        Args:
            alpha: Share of the coordinates that are sent, in (0, 1]; 1 is FedAdam.
            union: Take the vectors' largest numbers in turns (`interleaved`), or the largest in any of them (`max`).
            beta1: β₁ in [0, 1), of the first moment.
            beta2: β₂ in [0, 1), of the second moment.
            epsilon: ε > 0, inside the root.
            weighting: Average by `samples`, or with `uniform` weights.
            downlink: Broadcast all (`dense`), or only where something has changed (`union` of the masks).
            index_bits: Count ⌈log2 d⌉ bits for an index, as it is sent (`ceil`), or log2 d, as the paper does (`exact`).
        """
        super().__init__(
            rule=SharedAdam(beta1, beta2, epsilon),
            uplink=FairTopK(alpha, union, index_bits=index_bits),
            downlink=_downlink(downlink),
            aggregator=WeightedMean(weighting),
            steps=(Apply(), Moments()),
        )


def _downlink(downlink: Downlink) -> Codec:
    if downlink not in ("dense", "union"):
        raise UserError(f"downlink {downlink!r} is unknown; {nearest(str(downlink), ('dense', 'union'))}.")
    return Changes() if downlink == "union" else Dense()

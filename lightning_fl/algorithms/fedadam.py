"""FedAdam and its sparse uploads: Deng et al., Towards Communication-Efficient Federated Learning via Sparse and Aligned
Adaptive Optimization (FedAdam-SSM), 2024 (arXiv:2405.17932), with its baselines FedAdam-Top and Fairness-Top, after FAB-top-k:
Han et al., Adaptive Gradient Sparsification for Efficient Federated Learning, ICDCS 2020 (arXiv:2001.04756).

client k:  (y, m, v) ← (w, M, V);  L steps of Adam                 rule: SharedAdam
           upload Δy, Δm, Δv                                       codec: Dense
             FedAdamTop   the k largest of each vector             codec: TopK
             FedAdamSSM   where Δy (or Δm, or Δv) is largest       codec: SharedTopK
             FairnessTop  where any of the three is largest        codec: FairTopK
server:    w ← w + Σ p Δy;  M ← M + Σ p Δm;  V ← V + Σ p Δv        aggregator: WeightedMean, steps: Apply, Moments
           numbers that a client left out count as zero
           broadcast w, M, V, or their changes                     codec: Dense or Changes

Adam has no bias correction and ε inside the root. The FedAdam of Reddi et al. (ICLR 2021), where only the server has moments, is
ServerAdam. There is no error feedback: numbers outside a mask are dropped, and the next round starts from the server's (w, M, V).
"""

from __future__ import annotations

from typing import Any, Literal

from lightning_fl.algorithms._adam import AveragedMoments, Downlink, Weighting
from lightning_fl.codecs import Dense, FairTopK, SharedTopK, TopK
from lightning_fl.coding.top_k import IndexBits
from lightning_fl.rules import SharedAdam

LEADERS = {"parameters": "model", "first_moment": "moments/first", "second_moment": "moments/second"}


class FedAdam(AveragedMoments):
    """Adam on the clients, with moments averaged like the model; ServerAdam is the FedAdam of Reddi et al."""

    def __init__(
        self,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        weighting: Weighting = "samples",
        **slots: Any,
    ) -> None:
        """Fill the rule and step slots."""
        super().__init__(
            rule=SharedAdam(beta1, beta2, epsilon), uplink=Dense(), downlink="dense", weighting=weighting, **slots
        )


class FedAdamTop(AveragedMoments):
    """FedAdam with uploads of the k largest numbers in each of the three vectors."""

    def __init__(
        self,
        alpha: float = 0.05,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        weighting: Weighting = "samples",
        downlink: Downlink = "dense",
        index_bits: IndexBits = "ceil",
        **slots: Any,
    ) -> None:
        """Fill the rule, codec and step slots."""
        uplink = TopK(alpha, index_bits=index_bits)
        super().__init__(
            rule=SharedAdam(beta1, beta2, epsilon), uplink=uplink, downlink=downlink, weighting=weighting, **slots
        )


class FedAdamSSM(AveragedMoments):
    """FedAdam with sparse uploads: one mask for all three vectors, chosen from one of them."""

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
        **slots: Any,
    ) -> None:
        """Fill the rule, codec and step slots.

        Args:
            mask: Vector whose largest changes give the coordinates: SSM, SSM_M or SSM_V of the paper.
        """
        uplink = SharedTopK(alpha, LEADERS[mask], index_bits=index_bits)
        super().__init__(
            rule=SharedAdam(beta1, beta2, epsilon), uplink=uplink, downlink=downlink, weighting=weighting, **slots
        )


class FairnessTop(AveragedMoments):
    """FedAdam with sparse uploads: one mask for all three vectors, chosen from all of them."""

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
        **slots: Any,
    ) -> None:
        """Fill the rule, codec and step slots.

        Args:
            union: Take the vectors' largest numbers in turns (`interleaved`), or the largest in any of them (`max`).
        """
        uplink = FairTopK(alpha, union, index_bits=index_bits)
        super().__init__(
            rule=SharedAdam(beta1, beta2, epsilon), uplink=uplink, downlink=downlink, weighting=weighting, **slots
        )

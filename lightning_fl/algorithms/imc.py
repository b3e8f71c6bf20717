"""FedAvg + IMC: Zhang et al., Validating the Lottery Ticket Hypothesis with Inertial Manifold Theory, NeurIPS 2021, as FedDUMAP
(Liu et al., ACM TIST 2024) has it.

before round T:  p from the curvature of the loss on the server's samples, as FedAP finds it   callbacks: AdaptiveRate
                 𝒱 = the ⌈p · R⌉-th smallest of the R magnitudes of all weights and biases, counted from 0
                 w ← w ⊙ μ,  μ = [|w| > 𝒱]                                        callback: MagnitudePruning
from then on:    clients train under μ, and only the m kept parameters cross; each client is sent μ once, d bits
the rest is FedAvg; multiply-accumulates stay as they are

Batch normalisation and the convolutions beside residual blocks are left alone, and each layer keeps its largest weight.
"""

from __future__ import annotations

from typing import Literal

from lightning.pytorch import Callback

from lightning_fl.algorithms.base import Algorithm
from lightning_fl.callbacks import MagnitudePruning
from lightning_fl.callbacks.adaptive_rate import AdaptiveRate


class IMC(Algorithm):
    """FedAvg, and from one round on the smallest weights are left out."""

    def __init__(
        self,
        rate: float | None = None,
        prune_round: int = 30,
        rate_mode: Literal["slq_plateau", "gap"] = "slq_plateau",
        curvature: Literal["hessian", "ggn"] = "hessian",
    ) -> None:
        """Keep FedAvg's parts.

        Args:
            rate: Share of the weights that is left out, in [0, 1); 0 is FedAvg. If not given, the server's samples say.
            prune_round: The round before which they are, T, from 0.
            rate_mode: How the server finds the rate: slq_plateau (FedAP's authors' code) or gap (their paper's rule).
            curvature: hessian, or ggn for the generalised Gauss-Newton matrix.
        """
        super().__init__()
        found = AdaptiveRate(rate_mode, curvature=curvature, server_only=True) if rate is None else rate
        self.pruning = MagnitudePruning(found, prune_epoch=prune_round)

    def configure_callbacks(self) -> list[Callback]:
        """The pruning."""
        return [self.pruning]

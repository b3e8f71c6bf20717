"""FedAvg + IMC: Zhang et al., Validating the Lottery Ticket Hypothesis with Inertial Manifold Theory, NeurIPS 2021
(openreview:h6EWbx5xTj7), as in FedDUMAP (Liu et al., ACM TIST 2024, doi:10.1145/3690648).

before round T:  p* from the curvature of the loss on the server's samples, as in FedAP  callback: AdaptiveRate
                 𝒱 = the ⌈p* · R⌉-th smallest of the R magnitudes of all weights and biases, counted from 0
                 w ← w ⊙ μ,  μ = [|w| > 𝒱]                                        callback: MagnitudePruning
from then on:    clients train under μ, and only the m kept parameters are sent; each client receives μ once, d bits
the rest is FedAvg; multiply-accumulates stay as they are

Batch normalisation and the shortcut convolutions of residual blocks are not pruned, and each layer keeps its largest weight.

FedDUMAP's text asks only the server (`rate_source: server`), which costs no bits. Its authors' code takes FedAP's weighted mean
over the server and all clients (`all`), which costs the same as in FedAP: q·d down to each client that is asked (for clients that
train in this round only the numbers that the pruned model lacks) and q up, booked in round T.
"""

from __future__ import annotations

from typing import Any, Literal

from lightning.pytorch import Callback

from lightning_fl.algorithms.method import Method
from lightning_fl.callbacks import MagnitudePruning
from lightning_fl.callbacks.pruning.adaptive_rate import AdaptiveRate
from lightning_fl.errors import require


class IMC(Method):
    """FedAvg with one pruning of the smallest weights."""

    def __init__(
        self,
        rate: float | None = None,
        prune_round: int = 30,
        rate_mode: Literal["slq_plateau", "gap", "gap_of_all"] = "slq_plateau",
        curvature: Literal["hessian", "ggn"] = "hessian",
        rate_source: Literal["server", "all"] = "server",
        max_sources: int | None = None,
        **slots: Any,
    ) -> None:
        """Keep FedAvg's parts.

        Args:
            rate: Share of the weights to prune, in [0, 1); 0 is FedAvg. If not given, it is found from samples.
            prune_round: Round T, from 0; the weights are pruned before its training.
            rate_mode: Method of finding a source's rate: slq_plateau (FedAP's authors' code), gap (their paper's rule)
                or gap_of_all (the same among all eigenvalues).
            curvature: Matrix of the loss's curvature: hessian, or ggn, the generalised Gauss-Newton matrix.
            rate_source: Samples that give the rate: the server's (server), or those of server and clients, as in FedAP (all).
            max_sources: Largest number of sources to ask with rate_source all, drawn at random; every one if not given.
        """
        super().__init__(**slots)
        from_all = rate_source == "all"
        require(not from_all or rate is None, f"rate_source='all' finds the rate itself: leave rate={rate} out.")
        require(
            from_all or max_sources is None,
            f"max_sources={max_sources} is for rate_source='all', got rate_source='server'.",
        )
        self.rate_mode, self.curvature = rate_mode, curvature
        self.rate_source, self.max_sources = rate_source, max_sources
        adaptive = AdaptiveRate(rate_mode, max_sources, curvature, server_only=not from_all)
        self.pruning = MagnitudePruning(adaptive if rate is None else rate, prune_epoch=prune_round)

    def configure_callbacks(self) -> list[Callback]:
        """Return the pruning callback, and the callbacks of personal parts."""
        return [self.pruning, *super().configure_callbacks()]

"""FedAvg + IMC: Zhang et al., Validating the Lottery Ticket Hypothesis with Inertial Manifold Theory, NeurIPS 2021, as FedDUMAP
(Liu et al., ACM TIST 2024) has it.

before round T:  p* from the curvature of the loss on the server's samples, as FedAP finds it  callback: AdaptiveRate
                 𝒱 = the ⌈p* · R⌉-th smallest of the R magnitudes of all weights and biases, counted from 0
                 w ← w ⊙ μ,  μ = [|w| > 𝒱]                                        callback: MagnitudePruning
from then on:    clients train under μ, and only the m kept parameters cross; each client is sent μ once, d bits
the rest is FedAvg; multiply-accumulates stay as they are

Batch normalisation and the convolutions beside residual blocks are left alone, and each layer keeps its largest weight.

FedDUMAP's text asks the server alone (`rate_source: server`), which costs no bits; its authors' code takes FedAP's weighted mean
over the server and all clients (`all`), which costs what asking costs in FedAP: q·d down to each client that is asked (to those
that train in this round only what the pruned model lacks) and q up, booked in round T.
"""

from __future__ import annotations

from typing import Literal

from lightning.pytorch import Callback

from lightning_fl.algorithms.algorithm import Algorithm
from lightning_fl.callbacks import MagnitudePruning
from lightning_fl.callbacks.adaptive_rate import AdaptiveRate
from lightning_fl.errors import nearest, require

RATE_SOURCES = ("server", "all")


class IMC(Algorithm):
    """FedAvg, and from one round on the smallest weights are left out."""

    def __init__(
        self,
        rate: float | None = None,
        prune_round: int = 30,
        rate_mode: Literal["slq_plateau", "gap"] = "slq_plateau",
        curvature: Literal["hessian", "ggn"] = "hessian",
        rate_source: Literal["server", "all"] = "server",
        max_sources: int | None = None,
    ) -> None:
        """Keep FedAvg's parts.

        Args:
            rate: Share of the weights that is left out, in [0, 1); 0 is FedAvg. If not given, samples say.
            prune_round: The round before which they are, T, from 0.
            rate_mode: How a source finds its rate: slq_plateau (FedAP's authors' code) or gap (their paper's rule).
            curvature: hessian, or ggn for the generalised Gauss-Newton matrix.
            rate_source: Whose samples say: the server's, or those of the server and all clients as in FedAP (all).
            max_sources: For all: ask only so many of them, drawn at random; every one if not given.
        """
        super().__init__()
        require(
            rate_source in RATE_SOURCES,
            f"rate_source {rate_source!r} is unknown; {nearest(str(rate_source), RATE_SOURCES)}.",
        )
        from_all = rate_source == "all"
        require(not from_all or rate is None, f"rate_source='all' asks for the rate, which is given: rate={rate}.")
        require(
            from_all or max_sources is None,
            f"max_sources={max_sources} says how many are asked with rate_source='all'; got rate_source='server'.",
        )
        asking = AdaptiveRate(rate_mode, max_sources, curvature, server_only=not from_all)
        self.pruning = MagnitudePruning(asking if rate is None else rate, prune_epoch=prune_round)

    def configure_callbacks(self) -> list[Callback]:
        """The pruning."""
        return [self.pruning]

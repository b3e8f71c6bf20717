"""FedAvg + IMC: Zhang et al., Validating the Lottery Ticket Hypothesis with Inertial Manifold Theory, NeurIPS 2021, as FedDUMAP
(Liu et al., ACM TIST 2024) has it.

before round T:  𝒱 = the ⌈p · R⌉-th smallest of the R magnitudes of all weights and biases, counted from 0
                 w ← w ⊙ μ,  μ = [|w| > 𝒱]                                        callback: MagnitudePruning
from then on:    clients train under μ, and only the m kept parameters cross; each client is sent μ once, d bits
the rest is FedAvg; multiply-accumulates stay as they are

Batch normalisation and the convolutions beside residual blocks are left alone, and each layer keeps its largest weight.
"""

from __future__ import annotations

from lightning.pytorch import Callback

from lightning_fl.algorithms.base import Algorithm
from lightning_fl.callbacks import MagnitudePruning


class IMC(Algorithm):
    """FedAvg, and from one round on the smallest weights are left out."""

    def __init__(self, rate: float = 0.5, prune_round: int = 30) -> None:
        """Keep FedAvg's parts.

        Args:
            rate: Share of the weights that is left out, in [0, 1); 0 is FedAvg.
            prune_round: The round before which they are, T, from 0.
        """
        super().__init__()
        self.rate = rate
        self.prune_round = prune_round
        self._callback()  # a mistake ends before anything is read

    def configure_callbacks(self) -> list[Callback]:
        """The pruning."""
        return [self._callback()]

    def _callback(self) -> MagnitudePruning:
        return MagnitudePruning(rate=self.rate, prune_epoch=self.prune_round)

"""FedAvg + PruneFL: Jiang et al., Model Pruning Enables Efficient Federated Learning on Edge Devices, IEEE TNNLS 2023
(arXiv:1909.12326).

before the first round: the server trains on batches of its own under a mask μ that it reconfigures      step: Reconfiguration
client k:  trains under μ;  Z_k ← Z_k + (Σ_steps g)² · (samples read), g of masked weights too            rule: SquaredGradients
server:    w ← w + Σ_k n_k Δ_k / Σ_k n_k                                                                  step: Apply
every 50 rounds: the clients send Z_k, q·d bits;  μ ← the mask with the largest ΣZ / Σt                   step: Reconfiguration

Only the m kept parameters are sent. A client receives μ, d bits, when it takes part for the first time since μ changed. The
mean of the Z_k replaces their sum and gives the same mask.
"""

from __future__ import annotations

from typing import Any

from lightning_fl.aggregators import WeightedMean
from lightning_fl.algorithms.method import Method
from lightning_fl.rules import SquaredGradients
from lightning_fl.steps import Apply, Reconfiguration


class PruneFL(Method):
    """FedAvg under a pruning mask chosen for fast training, from server data and then from the clients' gradients."""

    def __init__(
        self,
        interval: int | None = 50,
        shrink: float = 0.3,
        half_life: float = 10_000,
        max_density: float | None = None,
        initial_passes: int = 1000,
        initial_batches: int = 10,
        initial_interval: int = 50,
        seconds_per_mac: float = 3e-11,
        bandwidth: float = 5e7,
        fixed_share: float = 0.1,
        **slots: Any,
    ) -> None:
        """Fill the rule, aggregator and step slots.

        Args:
            interval: Rounds from one reconfiguration to the next; null: none once the rounds have begun.
            shrink: Share of a layer's kept weights, its smallest, that a reconfiguration may remove, in [0, 1).
            half_life: Rounds in which this share halves.
            max_density: Largest share of the weights to keep, in (0, 1].
            initial_passes: Largest number of passes on the server's data before the first round; 0 starts with the whole network,
                and is FedAvg if interval is null.
            initial_batches: Batches of the server's data in each pass.
            initial_interval: Passes from one reconfiguration to the next before the first round.
            seconds_per_mac: Training time of a client in seconds per multiply-accumulate of the forward pass.
            bandwidth: Bandwidth of a client in bits per second.
            fixed_share: Time of everything that cannot be pruned, as a share of the time of all weights.
        """
        step = Reconfiguration(
            rule=SquaredGradients(interval=1, each_step=True),
            shrink=shrink,
            half_life=half_life,
            max_density=max_density,
            seconds_per_mac=seconds_per_mac,
            bandwidth=bandwidth,
            fixed_share=fixed_share,
            initial_passes=initial_passes,
            initial_batches=initial_batches,
            initial_interval=initial_interval,
        )
        super().__init__(
            (Apply(), step),
            rule=SquaredGradients(interval=interval),
            aggregator=WeightedMean(uniform=("moments/control", "scalars/importance")),
            **slots,
        )

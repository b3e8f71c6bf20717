"""FedSAM: Qu et al., Generalized Federated Learning via Sharpness Aware Minimization, ICML 2022 (arXiv:2206.02618); Caldarola et
al., Improving Generalization in Federated Learning by Seeking Flat Minima, ECCV 2022 (arXiv:2203.11834).

client k:  g = ∇F_k(y; minibatch);  ỹ = y + ρ g/‖g‖                rule: SharpnessAware
           y ← y − η ∇F_k(ỹ; minibatch)
the rest is FedAvg

FedAvg's bits; the clock and the energy count two gradients per step. The second gradient repeats the module's random draws,
such as dropout's. Running statistics, counts and logged values are those at y; a plain implementation would update the
statistics twice in each step. If the trainer clips, each gradient is clipped on its own. Weight decay is the optimiser's, at
y. Caldarola et al. also average the server's models over the last rounds: Lightning's `WeightAveraging` does.
"""

from __future__ import annotations

from typing import Any

from lightning_fl.algorithms.method import Method
from lightning_fl.rules import SharpnessAware


class FedSAM(Method):
    """FedAvg with clients that seek flat minima: they step with the gradient at the worst point of a neighbourhood."""

    def __init__(self, rho: float = 0.05, **slots: Any) -> None:
        """Fill the rule slot.

        Args:
            rho: Radius ρ ≥ 0 of the neighbourhood; 0 is FedAvg. 0.05 is that of SAM's authors.
        """
        super().__init__(rule=SharpnessAware(rho), **slots)

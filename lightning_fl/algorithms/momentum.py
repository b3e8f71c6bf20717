"""Momentum on one side: the baselines ServerM and DeviceM of FedDUMAP (Liu et al., ACM TIST 2024).

ServerM    Δ = Σ_k n_k Δ_k / Σ_k n_k;  m ← βm + (1 − β)Δ;  w ← w + η_g m      steps: Apply, Momentum
DeviceM    v ← βv + (1 − β)g;  y ← y − ηv;  v = 0 at the start of a round      rule: RestartedMomentum
the rest is FedAvg; neither sends anything more
"""

from __future__ import annotations

from typing import Literal

from lightning_fl.algorithms.base import Algorithm
from lightning_fl.rules import RestartedMomentum
from lightning_fl.steps import Apply, Momentum


class ServerM(Algorithm):
    """FedAvg with momentum on the server."""

    def __init__(
        self,
        beta: float = 0.9,
        server_learning_rate: float = 1.0,
        momentum_init: Literal["zero", "first"] = "zero",
        dampening: bool = True,
    ) -> None:
        """Fill the step slot.

        Args:
            beta: Momentum β in [0, 1); 0 with server_learning_rate 1 is FedAvg.
            server_learning_rate: η_g > 0.
            momentum_init: Start from m = 0 (`zero`) or from the first round's change (`first`).
            dampening: Weigh the new change by (1 − β); False is FedAvgM.
        """
        momentum = Momentum(beta=beta, learning_rate=server_learning_rate, init_with=momentum_init, dampening=dampening)
        super().__init__(steps=(Apply(), momentum))


class DeviceM(Algorithm):
    """FedAvg with momentum on the clients, restarted in every round."""

    def __init__(self, local_beta: float = 0.9) -> None:
        """Fill the rule slot.

        Args:
            local_beta: Momentum β' in [0, 1); 0 is FedAvg.
        """
        super().__init__(rule=RestartedMomentum(beta=local_beta))

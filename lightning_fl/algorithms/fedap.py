"""FedAP, FedDUAP and FedDUMAP: Liu et al., Efficient Federated Learning Using Dynamic Update and Adaptive Pruning with
Momentum on Shared Server Data, ACM TIST 2024 (doi:10.1145/3690648).

before round T, once:  the server and all clients report p*_k, the pruning rate that their loss allows
                       p* = Σ_k a_k p*_k / Σ_k a_k,  a_k = n_k / (D(P_k) + ε)
                       each layer loses filters of low rank, as many as the magnitudes of its weights allow
                                                                                callback: AdaptivePruning
then a usual round;    FedAP prunes FedAvg, FedDUAP FedDU, FedDUMAP FedDUM (the server's momentum is cut like the model)

Round T counts the bits of the pruning. Each client that is asked for its rate needs the unpruned model: q·d down, or for
clients that train in this round, only the part that the pruned model lacks. Each sends its rate, q up. All clients receive one
bit per filter. If the server has no samples, a client ranks the feature maps, q up per filter. Afterwards models have d'
numbers.
"""

from __future__ import annotations

from typing import Any, Literal

from lightning_fl.algorithms._feddumap import AdaptivelyPruned, DynamicallyUpdated
from lightning_fl.callbacks import AdaptivePruning
from lightning_fl.rules import RestartedMomentum
from lightning_fl.steps import Apply, DynamicServerUpdate, Momentum


class FedAP(AdaptivelyPruned):
    """FedAvg with one structured pruning, at a rate found from the data of the server and the clients."""

    def __init__(
        self,
        prune_round: int = 30,
        rate_mode: Literal["slq_plateau", "gap", "gap_of_all", "fixed"] = "slq_plateau",
        rate: float | None = None,
        epsilon: float = 1e-4,
        max_sources: int | None = None,
        curvature: Literal["hessian", "ggn"] = "hessian",
        **slots: Any,
    ) -> None:
        """Prepare the pruning.

        Args:
            rate: Rate p* in [0, 1) for fixed; 0 is FedAvg.
        """
        super().__init__(**slots)
        self.pruning = AdaptivePruning(prune_round, None, rate_mode, rate, max_sources, curvature, epsilon)


class FedDUAP(AdaptivelyPruned, DynamicallyUpdated):
    """FedDU with FedAP's pruning."""

    def __init__(
        self,
        C: float = 1.0,  # noqa: N803 -- the paper's name
        decay: float = 0.99,
        f: Literal["one_minus", "inverse"] = "one_minus",
        alpha_max: float | None = None,
        prune_round: int = 30,
        rate_mode: Literal["slq_plateau", "gap", "gap_of_all", "fixed"] = "slq_plateau",
        rate: float | None = None,
        epsilon: float = 1e-4,
        max_sources: int | None = None,
        curvature: Literal["hessian", "ggn"] = "hessian",
        **slots: Any,
    ) -> None:
        """Fill the step slot, and prepare the pruning.

        Args:
            C: Scale C ≥ 0 of the server's update; 0 is FedAP.
            rate: Rate p* in [0, 1) for fixed; 0 is FedDU.
        """
        super().__init__((Apply(), DynamicServerUpdate(C=C, decay=decay, f=f, alpha_max=alpha_max)), **slots)
        self.pruning = AdaptivePruning(prune_round, None, rate_mode, rate, max_sources, curvature, epsilon)


class FedDUMAP(AdaptivelyPruned, DynamicallyUpdated):
    """FedDUM with FedAP's pruning."""

    def __init__(
        self,
        beta: float = 0.9,
        local_beta: float = 0.9,
        server_learning_rate: float = 1.0,
        momentum_init: Literal["zero", "first"] = "zero",
        C: float = 1.0,  # noqa: N803
        decay: float = 0.99,
        f: Literal["one_minus", "inverse"] = "one_minus",
        alpha_max: float | None = None,
        prune_round: int = 30,
        rate_mode: Literal["slq_plateau", "gap", "gap_of_all", "fixed"] = "slq_plateau",
        rate: float | None = None,
        epsilon: float = 1e-4,
        max_sources: int | None = None,
        curvature: Literal["hessian", "ggn"] = "hessian",
        **slots: Any,
    ) -> None:
        """Fill the rule and step slots, and prepare the pruning.

        Args:
            beta: Momentum β of the server, in [0, 1).
            local_beta: Momentum β' of the clients, in [0, 1); with both 0 and server_learning_rate 1 it is FedDUAP.
            rate: Rate p* in [0, 1) for fixed; 0 is FedDUM.
        """
        update = DynamicServerUpdate(C=C, decay=decay, f=f, alpha_max=alpha_max)
        momentum = Momentum(beta=beta, learning_rate=server_learning_rate, init_with=momentum_init)
        super().__init__((Apply(), update, momentum), rule=RestartedMomentum(beta=local_beta), **slots)
        self.pruning = AdaptivePruning(prune_round, None, rate_mode, rate, max_sources, curvature, epsilon)

"""FedDU and its variants: Liu et al., Efficient Federated Learning Using Dynamic Update and Adaptive Pruning with Momentum on
Shared Server Data, ACM TIST 2024 (doi:10.1145/3690648).

server:    w_h ← w + Σ_k n_k Δ_k / Σ_k n_k                                       step: Apply
           α = f'(acc(w_h)) · r · C · decay^t;  w_h ← w_h + α (w_s − w_h)        step: DynamicServerUpdate
           where w_s is w_h after E local epochs on the server's samples
FedDUS     α = τ_eff / τ instead                                                 step: StaticServerUpdate
FedDUM     m ← βm + (1 − β)(w_h − w);  w ← w + η_g m                             step: Momentum
           client k:  v ← β'v + (1 − β')g;  y ← y − ηv                           rule: RestartedMomentum
FedDUSM    momentum on the server alone;  FedDUDM on the clients alone
the rest is FedAvg; before the first round each client sends its label histogram

The paper's equation (12) has G with the wrong sign and adds the server's term to the next model; FedDUM follows (4) and (8).
`two_stage` follows the authors' code: momentum once for the clients' change and once for the server's.

The paper prints no β; its code has 0.9, and so have FedDUM, FedDUMAP and their baselines here. FedDUM
learned faster with β = 0 on digits, and with 0.3 on CIFAR-10 (docs/results/feddumap.md).
"""

from __future__ import annotations

from typing import Any, Literal

from lightning_fl.algorithms._feddumap import DynamicallyUpdated
from lightning_fl.algorithms.method import Method
from lightning_fl.rules import RestartedMomentum
from lightning_fl.slots import Step
from lightning_fl.steps import Apply, DynamicServerUpdate, Momentum, MomentumInStages, StaticServerUpdate
from lightning_fl.steps.server_update import StepsOrFull


class FedDU(DynamicallyUpdated):
    """FedAvg with a dynamic update of the model on the server's samples."""

    def __init__(
        self,
        C: float = 1.0,  # noqa: N803 -- the paper's name
        decay: float = 0.99,
        f: Literal["one_minus", "inverse"] = "one_minus",
        alpha_max: float | None = None,
        **slots: Any,
    ) -> None:
        """Fill the step slot.

        Args:
            C: Scale C ≥ 0 of the server's update; 0 is FedAvg.
        """
        super().__init__((Apply(), DynamicServerUpdate(C=C, decay=decay, f=f, alpha_max=alpha_max)), **slots)


class FedDUS(Method):
    """FedDU with an update of constant size."""

    def __init__(self, tau_eff: StepsOrFull = 10, **slots: Any) -> None:
        """Fill the step slot.

        Args:
            tau_eff: Effective steps τ_eff ≥ 0 of the server, or full for all its steps; 0 is FedAvg.
        """
        super().__init__((Apply(), StaticServerUpdate(tau_eff=tau_eff)), **slots)


class FedDUM(DynamicallyUpdated):
    """FedDU with momentum on the clients, restarted in every round, and on the server."""

    def __init__(
        self,
        beta: float = 0.9,
        local_beta: float = 0.9,
        server_learning_rate: float = 1.0,
        momentum_init: Literal["zero", "first"] = "zero",
        two_stage: bool = False,
        C: float = 1.0,  # noqa: N803
        decay: float = 0.99,
        f: Literal["one_minus", "inverse"] = "one_minus",
        alpha_max: float | None = None,
        **slots: Any,
    ) -> None:
        """Fill the rule and step slots.

        Args:
            beta: Momentum β of the server, in [0, 1).
            local_beta: Momentum β' of the clients, in [0, 1); with both 0 and server_learning_rate 1 it is FedDU.
            two_stage: Apply momentum to the clients' change and then to the server's, as in the authors' code, instead of to both
                together.
        """
        update = DynamicServerUpdate(C=C, decay=decay, f=f, alpha_max=alpha_max)
        momentum = Momentum(beta=beta, learning_rate=server_learning_rate, init_with=momentum_init)
        steps: tuple[Step, ...] = (Apply(), update, momentum)
        if two_stage:
            steps = (MomentumInStages(stages=(Apply(), update), momentum=momentum),)
        super().__init__(steps, rule=RestartedMomentum(beta=local_beta), **slots)


class FedDUSM(DynamicallyUpdated):
    """FedDU with momentum on the server."""

    def __init__(
        self,
        beta: float = 0.9,
        server_learning_rate: float = 1.0,
        momentum_init: Literal["zero", "first"] = "zero",
        C: float = 1.0,  # noqa: N803
        decay: float = 0.99,
        f: Literal["one_minus", "inverse"] = "one_minus",
        alpha_max: float | None = None,
        **slots: Any,
    ) -> None:
        """Fill the step slot.

        Args:
            beta: Momentum β in [0, 1); 0 with server_learning_rate 1 is FedDU.
        """
        update = DynamicServerUpdate(C=C, decay=decay, f=f, alpha_max=alpha_max)
        momentum = Momentum(beta=beta, learning_rate=server_learning_rate, init_with=momentum_init)
        super().__init__((Apply(), update, momentum), **slots)


class FedDUDM(DynamicallyUpdated):
    """FedDU with momentum on the clients, restarted in every round."""

    def __init__(
        self,
        local_beta: float = 0.9,
        C: float = 1.0,  # noqa: N803
        decay: float = 0.99,
        f: Literal["one_minus", "inverse"] = "one_minus",
        alpha_max: float | None = None,
        **slots: Any,
    ) -> None:
        """Fill the rule and step slots.

        Args:
            local_beta: Momentum β' in [0, 1); 0 is FedDU.
        """
        update = DynamicServerUpdate(C=C, decay=decay, f=f, alpha_max=alpha_max)
        super().__init__((Apply(), update), rule=RestartedMomentum(beta=local_beta), **slots)

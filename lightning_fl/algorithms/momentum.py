"""Momentum on one side: the baselines ServerM and DeviceM of Liu et al., Efficient Federated Learning Using Dynamic Update and
Adaptive Pruning with Momentum on Shared Server Data (FedDUMAP), ACM TIST 2024 (doi:10.1145/3690648).

ServerM    Δ = Σ_k n_k Δ_k / Σ_k n_k;  m ← βm + (1 − β)Δ;  w ← w + η_g m      steps: Apply, Momentum (or Yogi)
DeviceM    v ← βv + (1 − β)g;  y ← y − ηv;  v = 0 at the start of a round      rule: RestartedMomentum
the rest is FedAvg; neither sends anything more

The rows of these names in the paper's tables 10 to 13 are FedDUSM and FedDUDM, combined with FedDU, as its section 4.2.2 says.

The paper describes these methods, but cites Yogi (Zaheer et al., Adaptive Methods for Nonconvex Optimization, NeurIPS 2018)
for the first and Mime (Karimireddy et al., Mime: Mimicking Centralized Stochastic Algorithms in Federated Learning, 2020,
arXiv:2008.03606) for the second. The cited methods are variants: DeviceM's `mime_lite` is

client k:  y ← y − η(βm + (1 − β)g);  sends y − w and ∇F_k(w)                  rule: FrozenMomentum
server:    m ← βm + (1 − β) Σ_k n_k ∇F_k(w) / Σ_k n_k, sent down with w        step: GradientMomentum

and costs twice FedAvg's bits in both directions. `mime`, the full method, replaces g by

client k:  g(y) − g(w; the same minibatch) + c,  c = Σ_k n_k ∇F_k(w) / Σ_k n_k     rule: CorrectedMomentum

with c of the same clients in the same round. So a round has two turns: w and m down, ∇F_k(w) up; c down, y − w up. It sends
three times FedAvg's bits down and twice its bits up. It computes more than twice as much, because each step takes two
gradients.
"""

from __future__ import annotations

from typing import Any, Literal

from lightning_fl.algorithms.method import Method
from lightning_fl.errors import require
from lightning_fl.rules import CorrectedMomentum, FrozenMomentum, RestartedMomentum
from lightning_fl.slots import Step
from lightning_fl.steps import Apply, GradientMomentum, Momentum, Yogi


class ServerM(Method):
    """FedAvg with momentum on the server."""

    def __init__(
        self,
        beta: float = 0.9,
        server_learning_rate: float = 1.0,
        momentum_init: Literal["zero", "first"] = "zero",
        dampening: bool = True,
        variant: Literal["momentum", "yogi"] = "momentum",
        **slots: Any,
    ) -> None:
        """Fill the step slot.

        Args:
            beta: Momentum β in [0, 1); 0 with server_learning_rate 1 is FedAvg.
            server_learning_rate: Learning rate η_g > 0 of the server.
            momentum_init: Start from m = 0 (`zero`) or from the first round's change (`first`).
            dampening: Weight the new change by (1 − β); False is FedAvgM.
            variant: Plain momentum, or yogi, which divides it by a running size of the changes. Its steps are about
                server_learning_rate in every coordinate, so give for instance 0.01, without momentum_init and dampening.
        """
        if variant == "yogi":
            require(
                momentum_init == "zero" and dampening,
                "yogi always starts from zero, with dampening: leave momentum_init and dampening out.",
            )
            step: Step = Yogi(beta=beta, learning_rate=server_learning_rate)
        else:
            step = Momentum(beta, server_learning_rate, init_with=momentum_init, dampening=dampening)
        super().__init__((Apply(), step), **slots)


class DeviceM(Method):
    """FedAvg with momentum on the clients, restarted in every round."""

    def __init__(
        self, local_beta: float = 0.9, variant: Literal["restarted", "mime_lite", "mime"] = "restarted", **slots: Any
    ) -> None:
        """Fill the rule slot.

        Args:
            local_beta: Momentum β' in [0, 1); 0 is FedAvg, except with mime, which still corrects the gradients.
            variant: Momentum restarted in every round; mime_lite, the server's momentum of full gradients, fixed during local
                training; or mime, which also corrects each client's gradients by their difference from the mean.
        """
        rules = {"restarted": RestartedMomentum, "mime_lite": FrozenMomentum, "mime": CorrectedMomentum}
        server_steps = () if variant == "restarted" else (GradientMomentum(beta=local_beta),)
        super().__init__((Apply(), *server_steps), rule=rules[variant](beta=local_beta), **slots)

"""FedDA: Jin et al., Accelerated Federated Learning with Decoupled Adaptive Optimization, ICML 2022 (arXiv:2207.07223), with
SGD and momentum; and FedDUDA of FedDUMAP (Liu et al., ACM TIST 2024, doi:10.1145/3690648).

client k:  v = m;  v ← βv + (1 − β)g;  y ← y − ηv;  sends y − w, v − m         rule: DecoupledMomentum
           g on a minibatch, in the last r rounds on all samples of the client
server:    w ← w + Σ_k n_k (y_k − w) / Σ_k n_k                                   step: Apply
           m ← Σ_k n_k v_k / Σ_k n_k, sent down with w                           step: SharedMomentum
FedDUDA    in between, with w_s, v_s of the same training on the server's samples:
           w ← w + α (w_s − w);  m ← m + α (v_s − m)                             step: DynamicServerUpdate
Twice FedAvg's bits in both directions. The local rule was written without the paper's full text: see `DecoupledMomentum`.
"""

from __future__ import annotations

from typing import Any, Literal

from lightning_fl.algorithms._feddumap import DynamicallyUpdated
from lightning_fl.algorithms.method import Method
from lightning_fl.rules import DecoupledMomentum
from lightning_fl.steps import Apply, DynamicServerUpdate, SharedMomentum


class FedDA(Method):
    """FedAvg with a global momentum, which clients continue locally and send back."""

    def __init__(
        self,
        beta: float = 0.9,
        variant: Literal["evolving", "frozen"] = "evolving",
        full_batch_last: int = 0,
        **slots: Any,
    ) -> None:
        """Fill the rule and step slots.

        Args:
            beta: Momentum β in [0, 1); 0 is FedAvg.
            variant: Update the momentum in every local step (evolving), or keep the federation's (frozen).
            full_batch_last: Number r of last rounds of max_rounds in which every local step takes the gradient on all samples of
                the client, at the same number of steps, each as long as a pass. A finished run that continues has them again.
        """
        super().__init__((Apply(), SharedMomentum()), rule=DecoupledMomentum(beta, variant, full_batch_last), **slots)


class FedDUDA(DynamicallyUpdated):
    """FedDU on top of FedDA: the server also trains with the global momentum."""

    def __init__(
        self,
        beta: float = 0.9,
        variant: Literal["evolving", "frozen"] = "evolving",
        C: float = 1.0,  # noqa: N803 -- the paper's name
        decay: float = 0.99,
        f: Literal["one_minus", "inverse"] = "one_minus",
        alpha_max: float | None = None,
        full_batch_last: int = 0,
        **slots: Any,
    ) -> None:
        """Fill the rule and step slots.

        Args:
            beta: Momentum β in [0, 1); 0 is FedDU.
            variant: Update the momentum in every local step (evolving), or keep the federation's (frozen).
            C: Scale C ≥ 0 of the server's update; 0 is FedDA.
            full_batch_last: Number of last rounds in which clients and server take every step's gradient on all their samples.
        """
        rule = DecoupledMomentum(beta, variant, full_batch_last)
        update = DynamicServerUpdate(C=C, decay=decay, f=f, alpha_max=alpha_max, rule=rule)
        super().__init__((Apply(), update, SharedMomentum()), rule=rule, **slots)

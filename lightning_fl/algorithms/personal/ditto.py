"""Ditto: Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021 (arXiv:2012.04221).

client k:  y ← w;  y as in the base method;  upload Δ_k = y − w    rule: the base method's
           v_k ← v_k − η (∇F_k(v_k) + λ(v_k − w)), on the same     companion: Pulled
           minibatches and as many; w as received
server:    as in the base method; FedAvg: w ← w + Σ_k n_k Δ_k / Σ_k n_k

A client predicts with v_k. The bits and the server's models are those of the base method, whatever λ. v_k begins at the model
that the client first receives (the authors' code: at the first model of the run), and a client that has not taken part
predicts with the server's model. The authors average with equal weights: base `Algorithm(aggregator=WeightedMean("uniform"))`.
A client computes twice as much as in the base method; its steps for v_k are not counted as steps of the run.
"""

from __future__ import annotations

from typing import Literal

from lightning_fl.algorithms.algorithm import Algorithm
from lightning_fl.errors import require
from lightning_fl.rules import Pulled
from lightning_fl.slots import Rule, Server, Setting, forwards


@forwards("base")
class Ditto(Algorithm):
    """Any method, with clients that also train a model of their own, pulled towards the server's, and predict with it."""

    name, num_models = Algorithm.name, Algorithm.num_models
    companion: Rule | None = Pulled()
    changeable = frozenset({"strength", "solver"})

    def __init__(
        self,
        base: Algorithm | None = None,
        strength: float = 1.0,
        solver: Literal["explicit", "implicit"] = "explicit",
    ) -> None:
        """Take over the slots of the base method.

        Args:
            base: Method that trains the server's model: FedAvg, FedProx, SCAFFOLD …; FedAvg if not given.
            strength: Weight λ ≥ 0 of the pull (λ/2)‖v − w‖²; 0 trains v alone. The authors try 0.1, 1 and 2.
            solver: Explicit steps, as in the paper, or implicit ones, which are stable for every λ.
        """
        self.companion = Pulled(strength, solver)
        given = "Ditto itself" if isinstance(base, Ditto) else repr(base)
        alone = isinstance(base, Algorithm) and base.companion is None and base.trains_in_rounds
        require(
            base is None or alone,
            f"base must be a method that trains one model of each client in rounds, such as FedAvg() or SCAFFOLD(), got {given}.",
        )
        self.base = Algorithm() if base is None else base
        base = self.base
        super().__init__(
            base.rule, base.uplink, base.downlink, base.exchange, base.aggregator, base.steps, base.personal
        )

    def rules(self) -> list[Rule]:
        """Return the rules of the base method, and that of the clients' own models."""
        return [*self.base.rules(), *([] if self.companion is None else [self.companion])]

    def check(self, setting: Setting, server: Server, cohort_size: int) -> None:
        """Raise `UserError` unless the run fits the base method and the rule of the clients' own models."""
        if self.companion is not None:
            self.companion.check(setting)
        self.base.check(setting, server, cohort_size)

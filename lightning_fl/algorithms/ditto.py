"""Ditto: Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021 (arXiv:2012.04221).

client k:  y ← w;  y as in the base method;  upload Δ_k = y − w    rule: the base method's
           v_k ← v_k − η (∇F_k(v_k) + λ(v_k − w)), on the same     personal: PersonalModel
           minibatches and as many; w as received
server:    as in the base method; FedAvg: w ← w + Σ_k n_k Δ_k / Σ_k n_k

A client predicts with v_k. The bits and the server's models are those of the base method for every λ. v_k begins at the model
that the client first receives (the authors' code: at the first model of the run), and a client that has not taken part
predicts with the server's model. The authors average with equal weights: base `Algorithm(aggregator=WeightedMean("uniform"))`.
A client computes twice as much as in the base method; its steps for v_k are not counted as steps of the run.
"""

from __future__ import annotations

from typing import Any, Literal

from lightning_fl.algorithms.algorithm import Algorithm
from lightning_fl.algorithms.method import Wrapper
from lightning_fl.personal import PersonalModel
from lightning_fl.rules import Pulled


class Ditto(Wrapper):
    """Any method; each client also trains a model of its own, pulled towards the server's, and predicts with it."""

    def __init__(
        self,
        base: Algorithm | None = None,
        strength: float = 1.0,
        solver: Literal["explicit", "implicit"] = "explicit",
        **slots: Any,
    ) -> None:
        """Take over the slots of the base method.

        Args:
            base: Method that trains the server's model: FedAvg, FedProx, SCAFFOLD …; FedAvg if not given.
            strength: Weight λ ≥ 0 of the pull (λ/2)‖v − w‖²; 0 trains v alone. The authors try 0.1, 1 and 2.
            solver: Explicit steps, as in the paper, or implicit ones, which are stable for every λ.
        """
        super().__init__(base, [PersonalModel(Pulled(strength, solver))], **slots)

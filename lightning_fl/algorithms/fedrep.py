"""FedRep: Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021 (arXiv:2102.07078).

client k:  (φ, h) ← (w, h_k)                                       h: the personal layers, the head
           h ← h − η ∇_h F_k(φ, h; minibatch), E_h passes          personal: HeadThenBody
           φ ← φ − η ∇_φ F_k(φ, h; minibatch), E_b passes
           h_k ← h;  upload Δ_k = φ − w
server:    w ← w + Σ_k n_k Δ_k / Σ_k n_k                           aggregator: WeightedMean, step: Apply

The g numbers of a head are never sent. FedPer (Arivazhagan et al., 2019, arXiv:1912.00818), `Algorithm(personal=[…])`, trains
both together. With E_h = 0 the heads stay at their initial values. The paper averages with equal weights
(`weighting="uniform"`), the authors' code by samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from lightning_fl.aggregators import WeightedMean
from lightning_fl.algorithms.method import Method
from lightning_fl.errors import require
from lightning_fl.personal import HeadThenBody, PersonalLayers
from lightning_fl.rules import LocalOptimizer


class FedRep(Method):
    """FedAvg of a shared body; every client trains a head of its own first, then the body."""

    def __init__(
        self,
        personal: Sequence[str] | None = None,
        head_epochs: int | None = None,
        body_epochs: int = 1,
        weighting: Literal["samples", "uniform"] | None = None,
        **slots: Any,
    ) -> None:
        """Fill the slots rule, aggregator and personal.

        Args:
            personal: Names of the head's parameters, or of its parts, that every client keeps; the last layer if not given.
            head_epochs: Passes E_h ≥ 0 of a round that train the head alone, 10 in the authors' code; all before the last
                E_b if not given.
            body_epochs: Passes E_b ≥ 1 at the end that train the body alone; local_epochs is E_h + E_b.
            weighting: Average the bodies by `samples` (if not given), or with `uniform` weights as in the paper.
        """
        require(
            personal is None or bool(personal) or head_epochs == 0,
            f"FedRep trains a head for head_epochs={head_epochs} epochs, but personal names no layer: name one, or give "
            "head_epochs=0.",
        )
        super().__init__(
            rule=LocalOptimizer(),
            aggregator=WeightedMean(weighting or "samples"),
            personal=[PersonalLayers(personal), HeadThenBody(head_epochs, body_epochs)],
            **slots,
        )

"""FedDyn's local rule (Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Gt
from torch import Tensor

from lightning_fl.checks import Called
from lightning_fl.slots import LocalTraining, Message, Rule, State
from lightning_fl.vectors.pieces import add_difference, by_pieces


@dataclass(frozen=True)
class DynamicRegularisation(Rule):
    """Minimise F_k(y) − ⟨g_k, y⟩ + (α/2)‖y − x‖² with the module's own optimiser;  sends Δ_k = y − x;  g_k ← g_k − αΔ_k.

    g_k stays with the client, begins at 0, and becomes ∇F_k(y) at the minimum: the gradient that pulls the client away from
    the others. Δ_k is the delta as the server decodes it, so compression errors enter neither g_k nor the server's h, which
    remains the mean of the g_k. A client whose upload is not accepted keeps its earlier g_k.

    Attributes:
        alpha: α > 0. The paper tries 0.001, 0.01 and 0.1.
    """

    needs_whole_upload = True
    partners = frozenset({"CorrectedMean"})
    alpha: Annotated[float, Gt(0), Called("alpha, the weight of FedDyn's regulariser,")] = 0.01

    @property
    def in_common(self) -> Mapping[str, float]:
        """α, by which the server divides the sum of the clients' changes."""
        return {"alpha": self.alpha}

    def init(self, params: Tensor) -> State:
        """Return g_k = 0."""
        return {"gradient": torch.zeros_like(params)}

    def correct(self, local: LocalTraining) -> None:
        """Add the regulariser's gradient: g ← g − g_k + α(y − x)."""
        add_difference(local.gradient, local.params, local.received["model"], self.alpha)
        local.gradient.sub_(local.state["gradient"])

    def arrived(self, state: State, message: Message) -> State:
        """Return g_k − αΔ_k."""

        def next_gradient(gradient: Tensor, delta: Tensor) -> Tensor:
            return gradient.sub(delta, alpha=self.alpha)

        return state | {"gradient": by_pieces(next_gradient, state["gradient"], message["model"])}

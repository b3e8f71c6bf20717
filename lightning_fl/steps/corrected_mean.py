"""FedDyn's server (Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Gt
from torch import Tensor

from lightning_fl.checks import Called
from lightning_fl.slots import ServerTurn, State, Step
from lightning_fl.vectors.pieces import by_pieces


@dataclass(frozen=True)
class CorrectedMean(Step):
    """h ← h − (α/N) Σ_k (y_k − x);  x ← Σ_k y_k / K − h/α.  Σ_k is over the K accepted clients; h = 0 before the first round.

    N is the number of all clients that have samples, so that h remains the mean of all g_k, those of clients that have never
    taken part being 0. Float buffers take their whole mean change.

    Attributes:
        alpha: α > 0, that of the clients' rule.
    """

    sums_suffice = True
    uses = needs_equal_weights = frozenset({"model"})
    partners = frozenset({"DynamicRegularisation"})
    alpha: Annotated[float, Gt(0), Called("alpha, the weight of FedDyn's regulariser,")] = 0.01

    @property
    def in_common(self) -> Mapping[str, float]:
        """α, which the clients' rule has, too."""
        return {"alpha": self.alpha}

    def init(self, params: Tensor) -> State:
        """Return h = 0."""
        return {"mean_gradient": torch.zeros_like(params)}

    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Start the chain: propose the mean of the clients' models, less h/α."""
        share = self.alpha * len(turn.clients) / turn.context.num_clients
        delta = turn.merged["model"]

        def next_mean(mean_gradient: Tensor, delta: Tensor) -> Tensor:
            return mean_gradient.sub(delta, alpha=share)

        def moved(params: Tensor, delta: Tensor, mean_gradient: Tensor) -> Tensor:
            return params + delta - mean_gradient / self.alpha

        mean_gradient = by_pieces(next_mean, state["mean_gradient"], delta)
        turn.proposal = by_pieces(moved, turn.params, delta, mean_gradient)
        if "buffers" in turn.merged:
            turn.proposed_buffers = turn.buffers + turn.merged["buffers"]
        return {"mean_gradient": mean_gradient}

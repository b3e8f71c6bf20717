"""Clipping around the last aggregate (Karimireddy et al., Learning from History for Byzantine Robust Optimization, ICML 2021,
arXiv:2012.10333).

    v ← v + (1/K) Σ_k (Δ_k − v) · min(1, τ/‖Δ_k − v‖);   w ← w + v
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Gt
from torch import Tensor

from lightning_fl.slots import UPLOADS, ServerTurn, State, Step

CENTRE, BUFFERS = "centre", "buffers"
PREFIX = UPLOADS.removesuffix("model")


@dataclass(frozen=True)
class CentredClipping(Step):
    """Move by the mean of the uploads, each clipped to a distance of τ from the last round's v. f attackers pull it by fτ/K.

    Use it instead of `Apply`, with the aggregator `KeepUploads(WeightedMean())`. v begins at 0. The authors give the clients
    momentum, as DeviceM does, which makes their uploads more similar. Distances are between models; the same factors hold for
    buffers and all other entries.

    Attributes:
        radius: τ > 0.
    """

    needs = frozenset({UPLOADS})
    uses = frozenset({UPLOADS, "model"})
    radius: Annotated[float, Gt(0)] = 10.0

    def init(self, params: Tensor) -> State:
        """Return v = 0."""
        return {CENTRE: torch.zeros_like(params)}

    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Propose w + v."""
        rows = turn.uploads("model").double()
        centre = state[CENTRE].double()
        lengths = torch.linalg.vector_norm(rows - centre, dim=1)
        factors = torch.where(lengths > self.radius, self.radius / lengths, 1.0) / len(rows)
        centre = centre + factors @ (rows - centre)
        turn.report_kept(factors)
        turn.proposal = turn.params + centre.to(turn.params.dtype)
        moved = {CENTRE: centre.to(turn.params.dtype)}
        for name in (name for name in turn.merged if f"{PREFIX}{name}" in turn.merged and name != "model"):
            others = turn.uploads(name).double()
            before = state[name].double() if name in state else 0.0
            moved[name] = (before + factors @ (others - before)).to(turn.merged[name].dtype)
            turn.merged[name] = moved[name]
        if BUFFERS in moved:
            turn.proposed_buffers = turn.buffers + moved[BUFFERS]
        return moved

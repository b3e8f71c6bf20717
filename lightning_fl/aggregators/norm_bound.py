"""Mean of uploads of bounded length (Sun et al., Can You Really Backdoor Federated Learning?, 2019, arXiv:1911.07963).

Δ = (1/K) Σ_k Δ_k · min(1, M/‖Δ_k‖)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from annotated_types import Gt

from lightning_fl.aggregators._robust import main_name
from lightning_fl.slots import Aggregator, Merging, Message, Upload

COUNT, KEPT = "count", "kept"
"""Names of the number of uploads, and of sums over them: factors, their squares, those of attackers, uploads of known kind."""


@dataclass(frozen=True)
class NormBound(Aggregator):
    """Mean of the uploads, each shortened to a length of M at most. f attackers among K move it by fM/K at most.

    Like the mean, it keeps no uploads.

    Attributes:
        bound: M > 0.
        by: length of the model, or of `all` that a client sends; the same factor holds for every vector.
    """

    keeps_uploads = False
    sums_suffice = False  # an attacker would not shorten its upload itself
    uses = frozenset[str]()
    bound: Annotated[float, Gt(0)] = 1.0
    by: Literal["model", "all"] = "model"

    def add(self, accumulator: dict[str, Any], upload: Upload) -> None:
        """Add the shortened upload to the sum."""
        names = [main_name(upload.message)] if self.by == "model" else sorted(upload.message)
        norms = [torch.linalg.vector_norm(upload.message[name].double()) for name in names]
        length = torch.linalg.vector_norm(torch.stack(norms))
        factor = torch.where(length > self.bound, self.bound / length, 1.0)
        if COUNT not in accumulator:
            accumulator[COUNT] = torch.zeros(1, dtype=torch.float64, device=length.device)
            accumulator[KEPT] = torch.zeros(4, dtype=torch.float64, device=length.device)
        accumulator[COUNT] += 1
        attacking, squared = upload.result.attacking, factor.square() / upload.result.num_uploads
        terms = torch.stack(
            [factor, squared, factor * (attacking or 0.0), torch.full_like(factor, attacking is not None)]
        )
        accumulator[KEPT] += terms
        for name, vector in upload.message.items():
            term = vector.double() * factor
            accumulator[name] = accumulator[name].add_(term) if name in accumulator else term

    def finish(self, accumulator: dict[str, Any]) -> Message:
        """Return the sum / K."""
        return {name: total / accumulator[COUNT] for name, total in accumulator.items() if name not in (COUNT, KEPT)}

    def combine(self, accumulator: dict[str, Any], merging: Merging) -> Message:
        """Return the sum / K, and report `robust/kept` and `robust/attackers_kept` as other robust parts do."""
        total, squares, attackers, known = accumulator[KEPT].tolist()
        merging.metrics["robust/kept"] = total**2 / squares
        if known:
            merging.metrics["robust/attackers_kept"] = attackers / total
        return self.finish(accumulator)

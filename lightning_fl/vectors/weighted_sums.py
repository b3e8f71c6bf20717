"""Weighted sums of vectors in float64, by name, with the total of their weights beside them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_fl.vectors.pieces import add_scaled, pieces, zeros_like


def add_weighted(sums: dict[str, Any], name: str, vector: Tensor, weight: float = 1.0) -> None:
    """Add weight · vector (d,) to the sum of a name, which begins at 0."""
    if name not in sums:
        sums[name] = zeros_like(vector, torch.float64)
    add_scaled(sums[name], vector, weight)


def add_weight(sums: dict[str, Any], name: str, weight: float, device: torch.device) -> None:
    """Add a number to the sum (1,) of a name, which begins at 0."""
    if name not in sums:
        sums[name] = torch.zeros(1, dtype=torch.float64, device=device)
    sums[name] += weight


def weight_of(name: str) -> str:
    """Return the name under which the weights of a name's vectors are added up."""
    return f"weight of {name}"


def means(sums: dict[str, Any]) -> dict[str, Tensor]:
    """Return sum / weight of each name, and 0 where the weight is 0, in the memory of the sums."""
    found = {name: total for name, total in sums.items() if weight_of(name) in sums}
    for name, total in found.items():
        for part, weight in pieces(total, sums[weight_of(name)]):
            part.div_(weight.masked_fill(weight == 0, 1))
    return found

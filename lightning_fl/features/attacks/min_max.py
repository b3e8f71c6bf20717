"""Min-max attack (Shejwalkar and Houmansadr, Manipulating the Byzantine, NDSS 2021).

    Δ_k ← μ − γσ,  the largest γ with  max_i ‖μ − γσ − Δ_i‖ ≤ max_{i,j} ‖Δ_i − Δ_j‖  over the honest uploads

Each i bounds γ by the larger root of a quadratic: ‖μ − Δ_i‖² − 2γ⟨σ, μ − Δ_i⟩ + γ²‖σ‖² = D².
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_fl.features.attacks.attack import Attack, AttackContext, Honest
from lightning_fl.slots import Message
from lightning_fl.vectors.order_statistics import squared_distances


@dataclass(frozen=True)
class MinMax(Attack):
    """Send the honest mean minus as many standard deviations as keep it within the honest uploads' largest distance.

    The models determine the number, which holds for every vector. All attackers send the same.
    """

    knows = "uploads"

    def forged(self, message: Message, context: AttackContext) -> Message:
        """Return μ − γσ."""
        if context.honest is None:
            return message
        length = largest_length(context.honest)
        return {name: context.honest.mean[name] - length * context.honest.std[name] for name in message}


def largest_length(honest: Honest) -> float:
    """Return γ, by the vectors of the model; 0 if the honest uploads are equal."""
    rows = honest.measured()
    if len(rows) < 2:
        return 0.0
    std, from_rows = rows.std(0), rows.mean(0) - rows
    square = std.square().sum()
    if not square:
        return 0.0
    product, farthest = from_rows @ std, squared_distances(rows).max()
    room = square * (farthest - from_rows.square().sum(1)).clamp(min=0)
    return float(((product + (product.square() + room).sqrt()) / square).min())

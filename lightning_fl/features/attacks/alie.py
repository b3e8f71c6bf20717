"""A little is enough (Baruch et al., NeurIPS 2019, arXiv:1902.06156).

    Δ_k ← μ − zσ,  z = Φ⁻¹((n − m − s)/(n − m)),  s = ⌊n/2⌋ + 1 − m

With s honest uploads the m attackers have a majority of the n. On average, so many honest uploads lie beyond the attackers'.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fl.features.attacks.attack import Attack, AttackContext
from lightning_fl.slots import Message


@dataclass(frozen=True)
class ALIE(Attack):
    """Send the honest mean minus z standard deviations, a shift small enough to look honest; all attackers send the same."""

    knows = "moments"

    def check(self, num_uploads: int, num_attackers: int) -> None:
        """Warn if z is not positive, so that there is no attack."""
        z = deviations(num_uploads, num_attackers)
        if num_attackers and z <= 0:
            rank_zero_warn(
                f"ALIE with {num_attackers} attackers among {num_uploads} uploads has z = {z:.3g}, so that it hardly harms: "
                "let more clients attack."
            )

    def forged(self, message: Message, context: AttackContext) -> Message:
        """Return μ − zσ."""
        if context.honest is None:
            return message
        z = deviations(context.num_uploads, context.num_attackers)
        return {name: context.honest.mean[name] - z * context.honest.std[name] for name in message}


def deviations(num_uploads: int, num_attackers: int) -> float:
    """Return z. With a majority of attackers, who need no honest upload, it is that for one; with one honest upload it is 0.

    >>> [round(deviations(n, m), 6) for n, m in ((20, 4), (50, 10), (25, 11), (10, 2))]
    [0.157311, 0.253347, 1.067571, 0.0]
    """
    num_honest = num_uploads - num_attackers
    supporters = max(1, num_uploads // 2 + 1 - num_attackers)
    return NormalDist().inv_cdf((num_honest - supporters) / num_honest) if num_honest > supporters else 0.0

"""Inner-product manipulation (Xie, Koyejo, Gupta, Fall of Empires, UAI 2019, arXiv:1903.03936).

Δ_k ← −εμ
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt

from lightning_fl.features.attacks.attack import Attack, AttackContext
from lightning_fl.slots import Message


@dataclass(frozen=True)
class IPM(Attack):
    """Send −ε times the honest mean. With m attackers among n uploads the mean changes its sign if ε > (n − m)/m.

    Attributes:
        scale: ε > 0; the paper uses 0.1, which stays within the honest uploads, and 100, which does not.
    """

    knows = "moments"
    scale: Annotated[float, Gt(0)] = 0.1

    def forged(self, message: Message, context: AttackContext) -> Message:
        """Return −εμ."""
        if context.honest is None:
            return message
        return {name: -self.scale * context.honest.mean[name] for name in message}

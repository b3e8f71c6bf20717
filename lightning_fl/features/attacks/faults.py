"""Attacks and faults without knowledge of other clients.

`SignFlip`: −λΔ_k (Li et al., RSA, AAAI 2019). `GaussianUpload`: N(mean, std²) in place of Δ_k (Blanchard et al., NeurIPS 2017;
mean and deviation as in blades). `FreeRider`: 0, or w_t − w_{t−1} (Lin et al., Free-riders in Federated Learning, 2019,
arXiv:1911.12560). `NotFinite`: NaN, as a client's diverged training or faulty memory sends it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from lightning_fl.checks import is_real
from lightning_fl.errors import require
from lightning_fl.features.attacks.attack import Attack, AttackContext
from lightning_fl.slots import Message


@dataclass(frozen=True)
class SignFlip(Attack):
    """Send −λ times the upload.

    Attributes:
        scale: λ > 0.
    """

    scale: Annotated[float, Gt(0)] = 1.0

    def forged(self, message: Message, context: AttackContext) -> Message:
        """Return −λx."""
        return {name: -self.scale * vector for name, vector in message.items()}


@dataclass(frozen=True)
class GaussianUpload(Attack):
    """Send normal random numbers in place of the upload.

    Attributes:
        mean: their mean.
        std: their standard deviation, at least 0.
    """

    mean: float = 0.1
    std: Annotated[float, Ge(0)] = 0.1

    def __post_init__(self) -> None:
        require(is_real(self.mean), f"mean must be a finite number, got {self.mean!r}.")

    def forged(self, message: Message, context: AttackContext) -> Message:
        """Return N(mean, std²)."""
        return {name: self.mean + self.std * normal(name, vector, context) for name, vector in message.items()}


@dataclass(frozen=True)
class FreeRider(Attack):
    """Pretend to have trained, to receive the model without the work.

    Attributes:
        sends: `zeros`, or the `last_change` of the model since the previous round, which is 0 in the first round, and for
            vectors other than model and buffers.
        noise: standard deviation of the normal noise on it, at least 0.
    """

    sends: Literal["zeros", "last_change"] = "zeros"
    noise: Annotated[float, Ge(0)] = 0.0

    @property
    def remembers(self) -> bool:
        """True for the change from round to round."""
        return self.sends == "last_change"

    def forged(self, message: Message, context: AttackContext) -> Message:
        """Return 0 or w_t − w_{t−1}, plus noise."""
        sent = {name: torch.zeros_like(vector) for name, vector in message.items()}
        if self.sends == "last_change":
            sent |= {name: context.received[name] - context.earlier[name] for name in sent if name in context.earlier}
        if self.noise:
            sent = {name: vector + self.noise * normal(name, vector, context) for name, vector in sent.items()}
        return sent


@dataclass(frozen=True)
class NotFinite(Attack):
    """Send NaN, which the server rejects and counts in `clients/rejected`."""

    def forged(self, message: Message, context: AttackContext) -> Message:
        """Return NaN."""
        return {name: torch.full_like(vector, torch.nan) for name, vector in message.items()}


def normal(name: str, like: Tensor, context: AttackContext) -> Tensor:
    """Return standard normal numbers of the form of a vector, the attacker's own for each name."""
    return torch.randn(like.shape, generator=context.draw.generator(name), dtype=torch.float64).to(like)

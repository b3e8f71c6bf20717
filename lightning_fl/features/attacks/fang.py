"""Attacks on one aggregator each, with full knowledge of the honest uploads (Fang et al., Local Model Poisoning Attacks to
Byzantine-Robust Federated Learning, USENIX Security 2020, arXiv:1911.11815).

    FangTrim    where μ_j > 0, uniform between the least honest Δ_j and, beyond it, b times or 1/b of that; else above the largest
    FangKrum    Δ_k ← −λ sgn μ,  λ halved from the honest range until Krum chooses it, or λ < 10⁻⁵
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Gt
from torch import Tensor

from lightning_fl.features.attacks.attack import Attack, AttackContext, Honest
from lightning_fl.slots import Message
from lightning_fl.vectors.order_statistics import krum_scores, squared_distances

LEAST = 1e-5
"""λ below which the search ends."""


@dataclass(frozen=True)
class FangTrim(Attack):
    """Send numbers just outside the honest range, against the mean: made for the trimmed mean and the median.

    Attributes:
        b: distance outside the range as a factor, b > 1.
    """

    knows = "uploads"
    b: Annotated[float, Gt(1)] = 2.0

    def forged(self, message: Message, context: AttackContext) -> Message:
        """Return uniform draws between the honest extreme and its multiple; each attacker draws its own."""
        if context.honest is None:
            return message
        honest, sent = context.honest, {}
        for name, vector in message.items():
            rows = honest.rows[name]
            extreme = torch.where(honest.mean[name] > 0, rows.amin(0), rows.amax(0))
            outwards = (extreme > 0) == (honest.mean[name] <= 0)  # then a multiple lies outside, else a fraction
            end = torch.where(outwards, extreme * self.b, extreme / self.b)
            share = torch.rand(vector.shape, generator=context.draw.generator(name), dtype=torch.float64).to(extreme)
            sent[name] = extreme + share * (end - extreme)
        return sent


@dataclass(frozen=True)
class FangKrum(Attack):
    """Send the vector farthest against the mean that Krum still chooses; all attackers send the same."""

    knows = "uploads"

    def forged(self, message: Message, context: AttackContext) -> Message:
        """Return −λ sgn μ, with one λ for all vectors."""
        if context.honest is None:
            return message
        length = krum_length(context.honest, context.num_attackers)
        return {name: -length * context.honest.mean[name].sign() for name in message}


def krum_length(honest: Honest, num_attackers: int) -> float:
    """Return λ, by the vectors of the model: the first of the halved values at which Krum chooses an attacker, or the least."""
    rows = honest.measured()
    against = -rows.mean(0).sign()
    length, distances = float((rows.amax(0) - rows.amin(0)).max()), squared_distances(rows)
    while length >= LEAST and not _chooses(distances, rows, length * against, num_attackers):
        length /= 2
    return length


def _chooses(distances: Tensor, rows: Tensor, sent: Tensor, num_attackers: int) -> bool:
    """True if Krum chooses the vector that the attackers send, of equals the honest one.

    Args:
        distances: squared distances between the honest uploads (h, h).
        rows: honest uploads (h, d).
        sent: upload of each attacker (d,).
        num_attackers: m, the f of Krum.
    """
    num_honest = len(rows)
    whole = distances.new_zeros(num_honest + num_attackers, num_honest + num_attackers)
    to_sent = (rows - sent).square().sum(1)
    whole[:num_honest, :num_honest] = distances
    whole[:num_honest, num_honest:], whole[num_honest:, :num_honest] = to_sent[:, None], to_sent
    return int(krum_scores(whole, num_attackers).argmin()) >= num_honest

"""Sum of clipped uploads with noise, over a denominator that does not depend on who took part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

from lightning_fl.features.privacy.adaptive_clip import WITHIN
from lightning_fl.features.privacy.mechanism import clip_factor, joint_norm
from lightning_fl.slots import Aggregator, Merging, Message, Upload
from lightning_fl.vectors.submodel import Submodel
from lightning_fl.vectors.weighted_sums import add_weight, add_weighted, weight_of

BITS = "bits"
"""Key of Σ_k (b_k − ½) in the accumulator."""


@dataclass(frozen=True)
class Bits:
    """Noisy count of the uploads within the clip.

    Attributes:
        noise: σ_b.
        seed: seed of the noise.
        expected: qN.
    """

    noise: float
    seed: int
    expected: float

    def share(self, total: float) -> float:
        """Return b̃, given Σ_k (b_k − ½)."""
        noise = float(torch.randn(1, dtype=torch.float64, generator=torch.Generator().manual_seed(self.seed)))
        return 0.5 + (total + self.noise * noise) / self.expected


@dataclass(frozen=True)
class NoisySum(Aggregator):
    """A = (Σ_k u_k c_k x_k + ξ) / W̄ for every vector of the uploads, in float64.

    Attributes:
        clip: C.
        scales: factors of the vectors in the length of an upload; 1 if not given.
        noise: standard deviation z C u_max of a sum of vectors of scale 1.
        draws: seeds of the noise, each with a factor: one draw, or those that a tree adds and takes back.
        bits: noise and seed of the number of uploads within the clip, and the number that is expected; None to count none.
        cap: u_k = min(n_k, cap); None for u_k = 1.
        uniform: names with equal weights in any case.
        lengths: length of each vector that clients send, by name.
        totals: W̄ by name; {} to divide by the received weights.
        device: device of the vectors.
    """

    keeps_uploads = False
    uses = frozenset[str]()
    clip: float
    scales: Mapping[str, float]
    noise: float
    draws: Sequence[tuple[int, float]]
    bits: Bits | None
    cap: float | None
    uniform: frozenset[str]
    lengths: Mapping[str, int]
    totals: Mapping[str, float]
    device: torch.device

    @property
    def merges_none(self) -> bool:  # type: ignore[override]
        """True unless the received weights divide."""
        return bool(self.totals)

    def add(self, accumulator: dict[str, Any], upload: Upload) -> None:
        """Add u_k c_k x_k to the sum, and to the weight u_k."""
        message = {name: upload.message[name] for name in self.lengths if name in upload.message}
        norm = 0.0 if self.clip == inf else joint_norm(message, self.scales)
        factor = clip_factor(norm, self.clip)
        if self.bits is not None:
            add_weight(accumulator, BITS, float(norm <= self.clip) - 0.5, self.device)
        for name, vector in message.items():
            weight = 1.0 if self.cap is None or name in self.uniform else min(upload.result.weight, self.cap)
            add_weighted(accumulator, name, vector, weight * factor)
            add_weight(accumulator, weight_of(name), weight, vector.device)

    def finish(self, accumulator: dict[str, Any]) -> Message:
        """Return sum / W̄, without noise."""
        return {
            name: self._sum(accumulator, name).div_(self.totals.get(name, accumulator.get(weight_of(name), 1.0)))
            for name in sorted(self.lengths)
        }

    def combine(self, accumulator: dict[str, Any], merging: Merging) -> Message:
        """Return (sum + ξ) / W̄, and report b̃."""
        for seed, sign in self.draws if self.noise else ():
            for name, vector in drawn(seed, self.lengths, merging.context.unpruned).items():
                total = accumulator[name] = self._sum(accumulator, name)
                total.add_(vector.to(total.device), alpha=sign * self.noise / self.scales.get(name, 1.0))
        if self.bits is not None:
            merging.metrics[WITHIN] = self.bits.share(float(accumulator.get(BITS, 0.0)))
        return self.finish(accumulator)

    def _sum(self, accumulator: dict[str, Any], name: str) -> Tensor:
        """Return the sum of a vector; zeros if nobody came."""
        if name in accumulator:
            return accumulator[name]
        return torch.zeros(self.lengths[name], dtype=torch.float64, device=self.device)


def drawn(seed: int, lengths: Mapping[str, int], unpruned: Submodel | None) -> dict[str, Tensor]:
    """Return standard normal vectors by name, float64 on the host, 0 where a mask has pruned the model.

    All processes and a resumed run draw the same numbers, whatever their device.
    """
    generator = torch.Generator().manual_seed(seed)
    vectors = {}
    for name in sorted(lengths):
        vectors[name] = torch.randn(lengths[name], dtype=torch.float64, generator=generator)
        if unpruned is not None:
            kept = unpruned.masks(vectors).get(name)
            vectors[name].mul_(1.0 if kept is None else kept.cpu())
    return vectors

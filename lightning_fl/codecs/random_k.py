"""Send k random coordinates, with the seed of the draw instead of their positions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, Literal

import torch
from annotated_types import Interval
from torch import Tensor

from lightning_fl.checks import Called
from lightning_fl.coding.top_k import num_kept
from lightning_fl.errors import require
from lightning_fl.slots import Codec, Message, Packed, Payload, RoundContext, State, Traits, compressible
from lightning_fl.slots.codec import undeclared
from lightning_fl.slots.sparse_codec import VALUES, SparseCodec

SEEDS = "scalars/seed/"


@dataclass(frozen=True)
class RandomK(SparseCodec):
    """Send k = max(1, ⌊alpha · d⌋) numbers of a vector (d,), drawn at random; the others arrive as zero.

    A vector takes 32k bits plus the seed; 32d with alpha = 1. If each of K clients draws its own coordinates, the error of the
    mean falls as 1/K. With common coordinates the error does not fall, but only k numbers change. EDEN with less than one bit
    per number is `RandomK(b, values=EDEN(1))`.

    Attributes:
        alpha: share of the coordinates that are sent, in (0, 1].
        scale: `unbiased` sends (d/k) · x, whose mean over the draws is x, with an error of (d/k − 1) ‖x‖²; `none` sends x, which
            is a contraction, for error feedback.
        common: True if all clients of a round send the same coordinates.
        seed_bits: 64, or 0 if both sides derive the seed from the run's seed, which they must share.
        values: codec of the k numbers, which sees a model of k parameters; its bits replace 32k. It must be unbiased, or
            nearly so, or with `scale` none contract.
    """

    mark = SEEDS
    alpha: Annotated[float, Interval(gt=0, le=1), Called("alpha, the share of numbers that are sent,")] = 0.05
    scale: Literal["unbiased", "none"] = "unbiased"
    common: bool = False
    seed_bits: Literal[0, 64] = 64
    values: Codec | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self.check_values()
        if self.values is not None:
            traits, scaled = self.values.traits, self.scale == "unbiased"
            fits = traits.keep_means if scaled else Traits.CONTRACTS in traits
            kind = "unbiased" if scaled else "a contraction"
            require(
                fits,
                f"RandomK(scale={self.scale!r}) is {kind} only if the codec of its values is, and {self.values!r} is not: give "
                f"it another one, or another scale{undeclared(self.values, Traits.UNBIASED if scaled else Traits.CONTRACTS)}.",
            )

    @property
    def traits(self) -> Traits:
        """Unbiased if the numbers are scaled, else a contraction; both if all are sent; as far as the values' codec is.

        Idempotent for the same draw, without a codec of the values. Few numbers if less than half, and not the same by all
        clients.
        """
        values = Traits.EXACT if self.values is None else self.values.traits & ~Traits.IDEMPOTENT
        of_values = Traits.DELTAS_ONLY | Traits.NEEDS_ERROR_FEEDBACK
        if self.alpha == 1 or self.scale == "unbiased":
            of_values |= Traits.UNBIASED | Traits.NEARLY_UNBIASED
        if self.alpha == 1 or self.scale == "none":
            of_values |= Traits.CONTRACTS | Traits.IDEMPOTENT
        few = Traits.SENDS_FEW.only_if(self.alpha < 0.5 and not self.common)
        return values & of_values | Traits.DELTAS_ONLY.only_if(self.alpha < 1) | few

    def relative_variance(self, numel: int) -> float | None:
        """Return (d/k)(1 + ω) − 1, ω of the codec of the values; None if the numbers are not scaled."""
        kept = num_kept(self.alpha, numel)
        of_values = 0.0 if self.values is None else self.values.relative_variance(kept)
        if of_values is None or Traits.UNBIASED not in self.traits:
            return None
        return numel / max(1, kept) * (1 + of_values) - 1

    def is_lossy_for(self, name: str) -> bool:
        """True for the model and its moments, unless everything is sent as it is."""
        return compressible(name) and (self.alpha < 1 or (self.values is not None and self.values.is_lossy_for(name)))

    def chosen(self, vector: str, payload: Payload, context: RoundContext) -> Tensor | None:
        """Return the drawn positions, on the device of the vector's numbers."""
        if f"{SEEDS}{vector}" not in payload:
            return None
        sent = payload[f"{SEEDS}{vector}"].content
        seed = int(sent[0]) if len(sent) else context.draw.seed(vector, self.common)
        values = next(packed for name, packed in payload.items() if name == vector or f"{VALUES}{vector}:" in name)
        return self._drawn(seed, context.layout.numel, values.content.device)

    def context_inside(self, context: RoundContext) -> RoundContext:
        """Return the context for the codec of the values, whose draws must not be those of the positions."""
        return replace(context, draw=context.draw.inside())

    def encode(self, message: Message, memory: State, context: RoundContext) -> tuple[Payload, State]:
        """Encode values (k,) under the vector's name, and the seed under `scalars/seed/name`."""
        payload = {}
        for name, vector in message.items():
            if not self.is_lossy_for(name):
                payload[name] = Packed.whole(vector)
                continue
            seed = context.draw.seed(name, self.common)
            positions = self._drawn(seed, len(vector), vector.device)
            values = vector[positions]
            if self.scale == "unbiased":
                values = values * (len(vector) / max(1, len(values)))
            payload |= self.pack_values(name, values, positions, context)
            bits = self.seed_bits if self.alpha < 1 else 0
            payload[f"{SEEDS}{name}"] = Packed(torch.tensor([seed] if bits else [], dtype=torch.int64), bits)
        return payload, {}

    def _drawn(self, seed: int, count: int, device: torch.device) -> Tensor:
        return _positions(seed, num_kept(self.alpha, count), count, device)


@lru_cache(maxsize=1)  # sender and receiver draw the same, one after the other
def _positions(seed: int, num_kept: int, count: int, device: torch.device) -> Tensor:
    """Return k of `count` positions, not to be changed; they are drawn on the CPU, so that all devices draw the same."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[:num_kept].sort().values.to(device, non_blocking=True)

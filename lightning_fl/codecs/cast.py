"""Send numbers in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from lightning.pytorch.utilities.rank_zero import WarningCache
from torch import Tensor

from lightning_fl.slots import Packed, Payload, RoundContext, Traits, VectorCodec

HalfWidth = Literal["float16", "bfloat16"]
WARNINGS = WarningCache()


@dataclass(frozen=True)
class Cast(VectorCodec):
    """C(x) = the nearest number to x in 16 bits: 16 · d bits, with an error of at most 2⁻¹¹|x| in float16, 2⁻⁸|x| in bfloat16.

    In float16 the relative error is larger below 6 · 10⁻⁵, numbers below 3 · 10⁻⁸ arrive as 0, and finite ones beyond ±65,504 as
    ±65,504, with a warning; the callback `CodecError` counts them. bfloat16 has the range of float32.

    Attributes:
        dtype: `float16` has 11 significant bits, `bfloat16` has 8.
        stochastic: round up or down at random, so that the mean over the draws is x (up to the largest number of `dtype`),
            with errors up to twice as large.
    """

    any_size = True
    dtype: HalfWidth = "float16"
    stochastic: bool = False

    @property
    def traits(self) -> Traits:
        """Unbiased if it rounds at random; then the smallest numbers may be rounded up to many times their size."""
        return Traits.IDEMPOTENT | (Traits.UNBIASED if self.stochastic else Traits.CONTRACTS)

    @property
    def largest(self) -> float:
        """Largest number of `dtype`."""
        return float(torch.finfo(getattr(torch, self.dtype)).max)

    def encode_vector(self, name: str, vector: Tensor, context: RoundContext) -> Payload:
        """Encode numbers of 16 bits under the vector's name."""
        return {name: Packed.whole(self._rounded(name, vector, context))}

    def decode_vector(self, name: str, payload: Payload, context: RoundContext) -> Tensor:
        """Return the numbers in the dtype of the model."""
        return payload[name].content.to(context.dtype)

    def _rounded(self, name: str, vector: Tensor, context: RoundContext) -> Tensor:
        dtype = getattr(torch, self.dtype)
        vector = self._limited(vector, min(self.largest, _largest_of(vector.dtype, dtype)))
        if not self.stochastic:
            return vector.to(dtype)
        draws = torch.rand(len(vector), generator=context.draw.generator(name))
        return _rounded_at_random(vector, draws.to(vector.device, non_blocking=True), dtype)

    def _limited(self, vector: Tensor, largest: float) -> Tensor:
        """Return the vector with finite numbers in ±`largest`; warn if there are larger ones."""
        if not len(vector) or not float(torch.linalg.vector_norm(vector, torch.inf)) > largest:
            return vector
        finite = vector.isfinite()
        if (vector[finite].double().abs() > largest).any():
            wider = "; dtype='bfloat16' has the range of float32" if self.dtype == "float16" else ""
            WARNINGS.warn(
                f"Cast to {self.dtype} sends numbers beyond ±{largest:,g} as ±{largest:,g}{wider}. This is said once."
            )
        wide = vector.to(torch.promote_types(vector.dtype, torch.float32))  # ±65,504 is no number of bfloat16
        return torch.where(finite, wide.clamp(-largest, largest), wide)


def _largest_of(wide: torch.dtype, narrow: torch.dtype) -> float:
    """Return the largest number of a narrow dtype that is one of another dtype, too: 65,280 for float16 and bfloat16."""
    most = torch.tensor(torch.finfo(wide).max, dtype=torch.float64).clamp(max=torch.finfo(narrow).max)
    nearest = most.to(narrow)
    return float(nearest if nearest.double() <= most else torch.nextafter(nearest, nearest.new_zeros(())))


def _rounded_at_random(vector: Tensor, draws: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a vector (d,) to one of the two nearest numbers of `dtype`, with the probabilities with which the mean is exact.

    Args:
        vector: numbers in the range of `dtype`.
        draws: uniform numbers (d,) in [0, 1).
        dtype: a dtype of 16 bits. Its numbers of one sign are as far apart in order as their bits are as whole numbers.
    """
    nearest = vector.to(dtype)
    size = vector.abs()
    bits = nearest.view(torch.int16)
    inner = (bits - (nearest.abs() > size).to(torch.int16)).view(dtype)
    outer = (inner.view(torch.int16) + 1).view(dtype)
    low = inner.abs().to(vector.dtype)
    share = (size - low) / (outer.abs().to(vector.dtype) - low)
    return torch.where(draws < share, outer, inner)

"""Stochastic rounding of every number to one of its neighbouring levels, unbiased over the draws.

QSGD        levels 0, v/s, 2v/s … v of a bucket's norm v     Alistarh et al., QSGD: Communication-Efficient SGD via Gradient
                                                             Quantization and Encoding, NeurIPS 2017 (arXiv:1610.02132)
TernGrad    −v, 0, v of a tensor's largest magnitude v       Wen et al., TernGrad: Ternary Gradients to Reduce Communication in
                                                             Distributed Deep Learning, NeurIPS 2017 (arXiv:1705.07878)
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Interval
from torch import Tensor

from lightning_fl.checks import Called
from lightning_fl.coding.bit_packing import bit_width, pack, unpack
from lightning_fl.coding.elias import decode_levels, encode_levels
from lightning_fl.slots import Packed, Payload, RoundContext, Traits, VectorCodec
from lightning_fl.vectors.magnitudes import by_largest, power_of_two, scale_dtype

SCALES = "scalars/scale/"
MOST_LEVELS = 2**22  # float32 holds the whole numbers up to four times as many
POWERS = (1, 3, 9, 27, 81)
"""Worth of the five ternary digits of a byte."""


class Stochastic(VectorCodec):
    """Encodes each vector (d,) as whole numbers in −s … s, drawn at random, and a scale for each group of numbers."""

    beside = (SCALES,)

    @property
    @abstractmethod
    def most(self) -> int:
        """Highest level, s."""

    @abstractmethod
    def sizes(self, context: RoundContext) -> Tensor:
        """Return the number of numbers in each group."""

    @abstractmethod
    def scale(self, vector: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Return a vector, perhaps clipped, and the scale v of each group, of at least 32 bits; `sizes` is on the CPU."""

    def pack(self, codes: Tensor) -> Packed:
        """Pack whole numbers in [0, 2s], each in as many bits."""
        width = bit_width(2 * self.most + 1)
        return Packed(pack(codes, width), len(codes) * width)

    def unpack(self, packed: Tensor, count: int) -> Tensor:
        """Return the whole numbers (d,), d = `count`."""
        return unpack(packed, count, bit_width(2 * self.most + 1))

    def symbols(self, name: str, payload: Payload, context: RoundContext) -> tuple[Tensor, int] | None:
        """Return the levels of an encoded vector, unless there are too many different ones to count them."""
        if not self.is_lossy_for(name) or self.most > 2**15:
            return None
        return self.unpack(payload[name].content, context.layout.numel), 2 * self.most + 1

    def from_symbols(self, name: str, symbols: Tensor, num_values: int) -> Tensor:
        """Return packed levels."""
        return self.pack(symbols).content

    def encode_vector(self, name: str, vector: Tensor, context: RoundContext) -> Payload:
        """Encode levels under the vector's name, and scales (groups,) under `scalars/scale/name`."""
        sizes = self.sizes(context)
        clipped, scales = self.scale(vector, sizes)
        sizes = sizes.to(vector.device, non_blocking=True)
        wide = clipped.to(scales.dtype)
        value_scales = scales.repeat_interleave(sizes, output_size=len(vector))  # the host need not wait for the size
        share = wide.abs() / value_scales  # first: the product may overflow
        share = share.nan_to_num_(0.0, posinf=0.0).clamp_(max=1.0).mul_(self.most)  # infinite if the scale is 0
        level = share.floor()
        drawn = torch.rand(len(vector), generator=context.draw.generator(name))
        drawn = drawn.to(vector.device, non_blocking=True)
        level += drawn < share - level
        levels = self.pack((level.copysign_(wide) + self.most).to(torch.int64))
        return {name: levels, f"{SCALES}{name}": Packed.whole(scales)}

    def decode_vector(self, name: str, payload: Payload, context: RoundContext) -> Tensor:
        """Return v · level / s."""
        levels = self.unpack(payload[name].content, context.layout.numel).to(torch.int32) - self.most
        scales = payload[f"{SCALES}{name}"].content
        share = levels.to(scales.dtype).div_(self.most)
        sizes = self.sizes(context).to(scales.device, non_blocking=True)
        value_scales = scales.repeat_interleave(sizes, output_size=context.layout.numel)
        return share.mul_(value_scales).to(context.dtype)


@dataclass(frozen=True)
class QSGD(Stochastic):
    """C(x) = v · sgn(x) ℓ / s, where ℓ is |x| s / v, rounded up with the probability of its fraction; v is a bucket's norm.

    E C(x) = x, and E‖C(x) − x‖² = (v/s)² Σ f (1 − f) ≤ min(n/s², √n/s) ‖x‖² for a bucket of n numbers with fractions f. A vector
    takes d ⌈log2(2s + 1)⌉ + 32 ⌈d / bucket⌉ bits, with 64 bits per norm in a float64 model. Elias coding takes fewer bits if
    most levels are 0.

    Attributes:
        levels: s, from 1.
        bucket: consecutive numbers that share a norm, at least 1; the last bucket may have fewer.
        norm: `l2`, the paper's, or `max`, the largest magnitude, with a smaller error and more levels above 0.
        coding: `fixed`: equally many bits for every number; `elias`: the paper's Elias coding of the levels above 0 and their
            distances, or the fixed code if that is shorter, with one bit to say which. Elias codes are slow to decode if few
            levels are 0: 0.1 µs per number with s = 1, 2.6 µs with s = 128.
    """

    traits = Traits.DELTAS_ONLY | Traits.UNBIASED
    levels: Annotated[int, Interval(ge=1, le=MOST_LEVELS), Called("levels of QSGD")] = 4
    bucket: Annotated[int, Ge(1), Called("bucket of QSGD")] = 512
    norm: Literal["l2", "max"] = "l2"
    coding: Literal["fixed", "elias"] = "fixed"

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", int(self.levels))  # arithmetic with a NumPy integer may overflow

    def relative_variance(self, numel: int) -> float:
        """Return min(n/s², √n/s) for buckets of n numbers."""
        size = min(self.bucket, numel)
        return min(size / self.levels**2, size**0.5 / self.levels)

    @property
    def size_depends_on_values(self) -> bool:
        """True for Elias' code."""
        return self.coding == "elias"

    @property
    def most(self) -> int:
        """Highest level, s."""
        return self.levels

    def sizes(self, context: RoundContext) -> Tensor:
        """Return the lengths of the buckets."""
        whole, rest = divmod(context.layout.numel, self.bucket)
        return torch.tensor([self.bucket] * whole + [rest] * bool(rest), dtype=torch.int64)

    def scale(self, vector: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the vector and the norms of its buckets."""
        size = max(1, min(self.bucket, len(vector)))
        padded = torch.zeros(len(sizes) * size, dtype=vector.dtype, device=vector.device)
        padded[: len(vector)] = vector
        buckets = padded.view(len(sizes), size)
        if self.norm == "max":
            return vector, buckets.abs().amax(1).to(scale_dtype(vector.dtype))
        shares, largest = by_largest(buckets)
        norms = torch.linalg.vector_norm(shares, dim=1, dtype=torch.float64) * largest.view(-1)
        return vector, norms.to(scale_dtype(vector.dtype))

    def bits_by_tensor(self, name: str, payload: Payload, context: RoundContext) -> dict[str, int] | None:
        """Return {} for Elias coding, whose bits per number vary."""
        return {} if self.coding == "elias" and self.is_lossy_for(name) else None

    def pack(self, codes: Tensor) -> Packed:
        """Pack whole numbers in [0, 2s] in the chosen code."""
        fixed = super().pack(codes)
        if self.coding == "fixed":
            return fixed
        coded = encode_levels(codes - self.most, self.bucket)
        is_shorter = len(coded) < fixed.bits
        bits = coded if is_shorter else unpack(fixed.content, fixed.bits, 1).bool().cpu()
        flagged = torch.cat([torch.tensor([is_shorter]), bits])
        return Packed(pack(flagged, 1).to(codes.device), len(flagged))

    def unpack(self, packed: Tensor, count: int) -> Tensor:
        """Return the whole numbers (d,), d = `count`."""
        if self.coding == "fixed":
            return super().unpack(packed, count)
        bits = unpack(packed.cpu(), 8 * len(packed), 1).bool()
        if bits[0]:
            levels = decode_levels(bits[1:], count, self.bucket) + self.most
            return levels.to(packed.device)
        fixed = bits[1 : 1 + count * bit_width(2 * self.most + 1)]
        return super().unpack(pack(fixed, 1).to(packed.device), count)


@dataclass(frozen=True)
class TernGrad(Stochastic):
    """C(x) = v · sgn(x) with the probability |x| / v, else 0; v is the largest magnitude of a tensor.

    E C(x) = x, and E‖C(x) − x‖² = v‖x‖₁ − ‖x‖². A vector takes 8 ⌈d/5⌉ + 32 G bits for G tensors, or 2d + 32 G; 64 G
    in a float64 model. In the paper all workers scale a tensor by the largest of their v (scaler sharing), so that their
    messages add up to whole numbers. Here each client has its own v, which needs only one turn and gives a smaller error.

    Attributes:
        clip: clip numbers at this many standard deviations of their tensor, which biases them: 2.5 in the paper for large
            models; no clipping if not given.
        packing: `base3` puts five numbers into a byte, `two_bits` four.
    """

    clip: Annotated[float, Gt(0), Called("clip of TernGrad")] | None = None
    packing: Literal["base3", "two_bits"] = "base3"

    @property
    def traits(self) -> Traits:
        """Unbiased unless numbers are clipped."""
        return Traits.DELTAS_ONLY | Traits.ERROR_MAY_GROW | Traits.UNBIASED.only_if(self.clip is None)

    def relative_variance(self, numel: int) -> float | None:
        """Return √d − 1, as v‖x‖₁ ≤ √d ‖x‖²; None if numbers are cut off."""
        return numel**0.5 - 1 if self.clip is None else None

    @property
    def most(self) -> int:
        """Highest level, 1."""
        return 1

    def bits_by_tensor(self, name: str, payload: Payload, context: RoundContext) -> dict[str, int] | None:
        """Return the bits of each tensor's scale."""
        if not name.startswith(SCALES):
            return None
        layout, width = context.layout, 8 * payload[name].content.element_size()
        return {tensor: width for tensor, size in zip(layout.names, layout.sizes, strict=True) if size}

    def sizes(self, context: RoundContext) -> Tensor:
        """Return the sizes of the tensors that are not empty."""
        return torch.tensor([size for size in context.layout.sizes if size], dtype=torch.int64)

    def scale(self, vector: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the vector, clipped, and the largest magnitude of each tensor."""
        parts = list(vector.split(sizes.tolist()))
        if self.clip is not None:
            limits = [self.clip * _deviation(part) for part in parts]
            # Equal numbers, such as a single one, have no deviation: nothing is cut off.
            parts = [
                torch.where(limit > 0, part.clamp(-limit, limit), part)
                for part, limit in zip(parts, limits, strict=True)
            ]
        if not parts:
            return vector, vector.new_zeros(0, dtype=scale_dtype(vector.dtype))
        return torch.cat(parts), torch.stack([part.abs().amax() for part in parts]).to(scale_dtype(vector.dtype))

    def pack(self, codes: Tensor) -> Packed:
        """Pack the numbers 0, 1 and 2."""
        if self.packing == "two_bits":
            return super().pack(codes)
        num_bytes = -(-len(codes) // 5)
        padded = torch.zeros(num_bytes * 5, dtype=torch.int64, device=codes.device)
        padded[: len(codes)] = codes
        worth = torch.tensor(POWERS, device=codes.device)
        return Packed((padded.view(num_bytes, 5) * worth).sum(1).to(torch.uint8), 8 * num_bytes)

    def unpack(self, packed: Tensor, count: int) -> Tensor:
        """Return the numbers 0, 1 and 2."""
        if self.packing == "two_bits":
            return super().unpack(packed, count)
        worth = torch.tensor(POWERS, dtype=torch.uint8, device=packed.device)
        return (packed[:, None] // worth % 3).view(-1)[:count]


def _deviation(numbers: Tensor) -> Tensor:
    """Return the standard deviation () of numbers (n,), whose squares may lie outside the range of their dtype."""
    power = power_of_two(numbers)
    return numbers.std(correction=0) if power == 1 else (numbers * power).std(correction=0) / power

"""Stochastic rounding of every number to one of k equidistant levels between the smallest and the largest of its block.

Suresh et al., Distributed Mean Estimation with Limited Communication, ICML 2017 (arXiv:1611.00429): k-level stochastic
quantisation, and with `rotate` the stochastic rotated quantisation, in which a random Hadamard transform comes first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Interval
from torch import Tensor

from lightning_fl.checks import Called
from lightning_fl.coding.bit_packing import bit_width, pack, unpack
from lightning_fl.coding.rotation import chunk_sizes, random_signs, rotate
from lightning_fl.errors import require
from lightning_fl.slots import Packed, Payload, RoundContext, Traits, VectorCodec
from lightning_fl.vectors.magnitudes import power_of_two, scale_dtype

RANGES = "scalars/range/"
MOST_LEVELS = 2**16


@dataclass(frozen=True)
class Uniform(VectorCodec):
    """C(x) = a + ℓ (b − a)/(k − 1), ℓ being (x − a)(k − 1)/(b − a), rounded up with the probability of its fraction.

    a and b are the smallest and the largest number of a block. E C(x) = x, and the error of a block of n numbers is
    E‖C(x) − x‖² ≤ n(b − a)²/(4(k − 1)²) ≤ n‖x‖²/(2(k − 1)²). A vector takes d⌈log2 k⌉ + 64⌈d / block_size⌉ bits.

    `rotate` first replaces the vector by HDx/√n, with the random signs D and the Hadamard matrix H of `DRIVE`. Its blocks are
    the rotated chunks, powers of two with Σn = 64⌈d / 64⌉ numbers in all, which take Σn⌈log2 k⌉ + 64 bits for each chunk.
    Rotated numbers have similar sizes, so a few large numbers no longer make all levels coarse: the factor n/2 of the error
    becomes one of the order of log n. In a float64 model, a and b have 64 bits each instead of 32.

    Attributes:
        levels: k, from 2 to 65536. 2^b levels take b bits.
        rotate: rotate the vector before, and back after.
        block_size: consecutive numbers that share a and b, at least 1; None for the whole vector, as in the paper. Not with
            `rotate`.
    """

    beside = (RANGES,)
    traits = Traits.DELTAS_ONLY | Traits.UNBIASED
    levels: Annotated[int, Interval(ge=2, le=MOST_LEVELS), Called("levels of Uniform")] = 16
    rotate: bool = False
    block_size: Annotated[int, Ge(1), Called("block_size of Uniform")] | None = None

    def __post_init__(self) -> None:
        require(
            not self.rotate or self.block_size is None,
            f"rotate=True has its own blocks, the chunks that it rotates, got block_size={self.block_size}: leave one out.",
        )
        object.__setattr__(self, "levels", int(self.levels))

    def symbols(self, name: str, payload: Payload, context: RoundContext) -> tuple[Tensor, int] | None:
        """Return the levels of an encoded vector."""
        if not self.is_lossy_for(name):
            return None
        return unpack(payload[name].content, sum(self._sizes(context.layout.numel)), self._width), self.levels

    def bits_by_tensor(self, name: str, payload: Payload, context: RoundContext) -> dict[str, int] | None:
        """Return the bits of each tensor's numbers, without those of the zeros that fill up a chunk."""
        if not self.is_lossy_for(name):
            return None
        return {
            tensor: self._width * size for tensor, size in zip(context.layout.names, context.layout.sizes, strict=True)
        }

    def encode_vector(self, name: str, vector: Tensor, context: RoundContext) -> Payload:
        """Encode levels under the vector's name, and a and b (blocks, 2) under `scalars/range/name`."""
        sizes, power = self._sizes(len(vector)), 1.0
        wide = vector.to(scale_dtype(vector.dtype))
        if self.rotate:
            wide = torch.cat([wide, wide.new_zeros(sum(sizes) - len(wide))])
            power = power_of_two(wide)
            wide = _rotated(wide * power * random_signs(wide, context.draw.generator(name)), sizes)
        blocks = wide.split(sizes)
        ranges = wide.new_zeros(len(sizes), 2)
        if sizes:
            ranges = torch.stack([torch.stack(torch.aminmax(block)) for block in blocks])
        draws = torch.rand(len(wide), generator=context.draw.inside().generator(name)).to(
            wide.device, non_blocking=True
        )
        codes = torch.empty_like(wide, dtype=torch.int32)
        parts = zip(blocks, ranges.unbind(), codes.split(sizes), draws.split(sizes), strict=True)
        for block, (low, high), code, draw in parts:
            # Halves, because the difference of two large numbers may overflow; NaN where it is 0.
            share = ((block / 2 - low / 2) / (high / 2 - low / 2)).nan_to_num_(0.0).clamp_(0, 1).mul_(self.levels - 1)
            level = share.floor()
            code.copy_(level + (draw < share - level))
        return {
            name: Packed(pack(codes, self._width), len(codes) * self._width),
            f"{RANGES}{name}": Packed.whole(ranges if power == 1 else ranges / power),
        }

    def decode_vector(self, name: str, payload: Payload, context: RoundContext) -> Tensor:
        """Return the levels between a and b, rotated back."""
        count = context.layout.numel
        sizes = self._sizes(count)
        ranges = payload[f"{RANGES}{name}"].content
        vector = unpack(payload[name].content, sum(sizes), self._width).to(ranges.dtype).div_(self.levels - 1)
        for share, (low, high) in zip(vector.split(sizes), ranges.unbind(), strict=True):
            share.copy_(low * (1 - share) + high * share)
        if self.rotate:
            vector = _rotated(vector, sizes).mul_(random_signs(vector, context.draw.generator(name)))[:count]
        return vector.to(context.dtype)

    @property
    def _width(self) -> int:
        return bit_width(self.levels)

    def _sizes(self, count: int) -> list[int]:
        """Return the sizes of the blocks of `count` numbers."""
        if self.rotate:
            return chunk_sizes(count)
        size = self.block_size or max(1, count)
        return [min(size, count - start) for start in range(0, count, size)]


def _rotated(vector: Tensor, sizes: list[int]) -> Tensor:
    """Return a vector in which each chunk is rotated."""
    return torch.cat([rotate(chunk) for chunk in vector.split(sizes)]) if sizes else vector

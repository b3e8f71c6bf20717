"""Rotate a vector at random, and send a few bits for each rotated number: y = HDx/√n,  x̂ = S · DᵀHᵀc/√n.

DRIVE  c = sgn(y)                                          Vargaftik et al., NeurIPS 2021
EDEN   c the nearest of 2^b centroids to y√n/‖y‖           Vargaftik et al., ICML 2022

D are random signs, H is the Hadamard matrix (n, n). Rotated numbers are nearly normal whatever x is, so that one code book, the
Lloyd-Max quantiser of a normal number, fits all vectors. With the scale S = ‖y‖²/⟨c, y⟩, x̂ has no error in the direction of x:
⟨x, x̂⟩ = ‖x‖² and ‖x̂ − x‖² = ‖x̂‖² − ‖x‖².

The mean of x̂ over uniformly random rotations is x. Over the rotations here it is about x, unless a few numbers of a chunk
outweigh all others. If one number is r times the Euclidean norm of the others, it alone decides most codes. In chunks of 64
numbers or more, the mean of each other number is then this multiple of its value:

    r          0.25   0.5     1      2      3      6      20
    b = 1      1.00   0.98   0.83   0.27   0.03   0.00   0.00
    b = 2      1.00   0.99   0.97   1.04   1.31   2.45   7.0
    b = 3      1.00   1.00   1.00   1.00   1.00   1.36   3.3
    b = 4      1.00   1.00   1.00   1.00   1.00   1.00   0.3

So neither codec counts as unbiased. A second rotation would take twice the time, and only shift the effect to larger r.

Each message has its own rotation, which both sides draw without sending it. So errors of different clients are independent,
and the error of the mean of K clients falls as 1/K. With one rotation for all clients it would not fall if their vectors are
similar.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Literal

import torch
from annotated_types import Interval
from torch import Tensor

from lightning_fl.checks import Called
from lightning_fl.coding.bit_packing import nearest_level, pack, unpack
from lightning_fl.coding.rotation import Chunks, chunk_sizes, random_signs, rotate
from lightning_fl.slots import Packed, Payload, RoundContext, Traits, VectorCodec, compressible
from lightning_fl.vectors.magnitudes import power_of_two, scale_dtype

Scale = Literal["unbiased", "min_mse"]
SCALES = "scalars/scale/"
ENOUGH = 1e-6  # the centroids of unit variance are as near as this to those of the next iteration


@dataclass(frozen=True)
class Rotated(VectorCodec):
    """Rotates chunks of each vector (d,) and encodes their numbers with the code book `centroids`.

    Attributes:
        scale: `unbiased` is S = ‖y‖²/⟨c, y⟩, for a mean of about x; `min_mse` is S = ⟨c, y⟩/‖c‖², the scale with the smallest
            error, for error feedback.
        chunks: `split` rotates chunks of 2^i ≥ 64 numbers, the largest first, and fills up only the last 64 numbers with zeros;
            `pad` rotates the whole vector, filled up to a power of two. Each has a scale of 32 bits, 64 in a float64 model.
    """

    beside = (SCALES,)
    scale: Scale = field(default="unbiased", kw_only=True)
    chunks: Chunks = field(default="split", kw_only=True)

    @property
    @abstractmethod
    def centroids(self) -> Tensor:
        """Ascending code book (2^b,) on the CPU, float64."""

    @property
    def traits(self) -> Traits:
        """Nearly unbiased, see the module's table; for `min_mse` a contraction: ‖x̂ − x‖² ≤ ‖x‖² − S²‖c‖²."""
        return Traits.DELTAS_ONLY | (Traits.NEARLY_UNBIASED if self.scale == "unbiased" else Traits.CONTRACTS)

    def symbols(self, name: str, payload: Payload, context: RoundContext) -> tuple[Tensor, int] | None:
        """Return the codes of an encoded vector."""
        if not compressible(name):
            return None
        num = sum(chunk_sizes(context.layout.numel, self.chunks))
        return unpack(payload[name].content, num, self._width), 2**self._width

    def bits_by_tensor(self, name: str, payload: Payload, context: RoundContext) -> dict[str, int] | None:
        """Return the bits of each tensor's numbers, without those of the zeros that fill up a chunk."""
        if not compressible(name):
            return None
        return {
            tensor: self._width * size for tensor, size in zip(context.layout.names, context.layout.sizes, strict=True)
        }

    def encode_vector(self, name: str, vector: Tensor, context: RoundContext) -> Payload:
        """Encode codes under the vector's name, and scales (chunks,) under `scalars/scale/name`."""
        sizes = chunk_sizes(len(vector), self.chunks)
        padded = torch.zeros(sum(sizes), dtype=scale_dtype(vector.dtype), device=vector.device)
        padded[: len(vector)] = vector
        if (power := power_of_two(padded)) != 1:
            padded *= power
        padded *= random_signs(padded, context.draw.generator(name))
        codes, scales = torch.empty_like(padded, dtype=torch.uint8), padded.new_empty(len(sizes))
        for i, (chunk, code) in enumerate(zip(padded.split(sizes), codes.split(sizes), strict=True)):
            scales[i] = self._encode_chunk(rotate(chunk), code)
        return {
            name: Packed(pack(codes, self._width), len(codes) * self._width),
            f"{SCALES}{name}": Packed.whole(scales if power == 1 else scales / power),
        }

    def decode_vector(self, name: str, payload: Payload, context: RoundContext) -> Tensor:
        """Rotate the centroids back, and scale them."""
        count = context.layout.numel
        sizes = chunk_sizes(count, self.chunks)
        codes = unpack(payload[name].content, sum(sizes), self._width)
        scales = payload[f"{SCALES}{name}"].content
        vector = self._value(codes, scales.dtype)
        for chunk, scale in zip(vector.split(sizes), scales, strict=True):
            chunk.copy_(rotate(chunk).mul_(scale))
        vector.mul_(random_signs(vector, context.draw.generator(name)))
        return vector[:count].to(context.dtype)

    @property
    def _width(self) -> int:
        return (len(self.centroids) - 1).bit_length()

    def _value(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        return self.centroids.to(codes.device, dtype, non_blocking=True).index_select(0, codes.int())

    def _encode_chunk(self, rotated: Tensor, codes: Tensor) -> Tensor:
        """Write the codes (n,) of a rotated chunk, which is changed, and return its scale ()."""
        # Squares of smaller and of larger chunks than the largest lie outside float32's range.
        unit = (torch.linalg.vector_norm(rotated, dtype=torch.float64) / len(rotated) ** 0.5).to(rotated.dtype)
        shares = rotated.div_(unit)
        sent = self._value(codes.copy_(nearest_level(shares, self.centroids)), shares.dtype)
        product = sent @ shares
        scale = len(shares) / product if self.scale == "unbiased" else product / sent.square_().sum()
        return torch.where(unit == 0, 0.0, unit * scale)


@dataclass(frozen=True)
class DRIVE(Rotated):
    """C(x) = S · DᵀHᵀ sgn(HDx)/√n, sgn(0) = +1: a bit for each number, in all Σn + 32 · chunks bits, Σn = 64⌈d/64⌉.

    The error is ‖C(x) − x‖² ≈ 0.571‖x‖² (Vargaftik et al., "DRIVE: One-bit Distributed Mean Estimation", NeurIPS 2021).
    """

    @property
    def centroids(self) -> Tensor:
        """−1 and 1."""
        return torch.tensor([-1.0, 1.0], dtype=torch.float64)


@dataclass(frozen=True)
class EDEN(Rotated):
    """C(x) = S · DᵀHᵀc/√n, c the nearest centroids to the rotated numbers: b · Σn + 32 · chunks bits, Σn = 64⌈d/64⌉.

    With b = 1, 2, 3, 4 the error is ‖C(x) − x‖² ≈ 0.571, 0.133, 0.036, 0.0096 times ‖x‖²; one bit is DRIVE (Vargaftik et al.,
    "EDEN: Communication-Efficient and Robust Distributed Mean Estimation for Federated Learning", ICML 2022). With
    less than a bit for a number, b < 1, it is `RandomK(b, values=EDEN(1))`: k = ⌊bd⌋ drawn numbers, Σn = 64⌈k/64⌉ + 64 bits of
    the seed, an error of ≈ 1.571/b − 1.

    Attributes:
        bits: b, bits per number, from 1 to 8.
    """

    bits: Annotated[int, Interval(ge=1, le=8), Called("bits of a rotated number")] = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", int(self.bits))

    @property
    def centroids(self) -> Tensor:
        """Centroids of the Lloyd-Max quantiser of a normal number of variance 1."""
        return lloyd_max(self.bits)


@cache
def lloyd_max(bits: int) -> Tensor:
    """Return the 2^bits levels that round a normal number of variance 1 with the smallest mean square error, ascending.

    >>> [round(level, 4) for level in lloyd_max(2).tolist()]
    [-1.5104, -0.4528, 0.4528, 1.5104]
    """
    half = 2 ** (bits - 1)
    # Start from the levels that are best if there are very many: their density is that of a normal number of variance 3.
    shares = (torch.arange(half, dtype=torch.float64) + 0.5) / (2 * half)
    levels = math.sqrt(3) * torch.special.ndtri(0.5 + shares)
    while True:
        borders = torch.cat([levels.new_zeros(1), (levels[1:] + levels[:-1]) / 2])
        ends = torch.cat([borders[1:], levels.new_tensor([math.inf])])
        density = [torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi) for x in (borders, ends)]
        means = (density[0] - density[1]) / (torch.special.ndtr(-borders) - torch.special.ndtr(-ends))
        change, levels = float((means - levels).abs().max()), means
        if change < ENOUGH:
            return torch.cat([-levels.flip(0), levels])

"""Encode every number in a few bits, with one scale for each group of numbers.

OneBit      C(z) = s · sgn(z)                                       1-bit Adam: Tang et al., ICML 2021
            with s = 1                                              signSGD: Bernstein et al., ICML 2018
Quantiser   the nearest of a few levels in [−s, s]                  Efficient-Adam: Chen et al., 2022

A group is one tensor of the model, or the whole vector. These codecs lose the rounding error; `ErrorFeedback` around one adds
it to the next upload.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Interval
from torch import Tensor

from lightning_fl.checks import Called
from lightning_fl.coding.bit_packing import pack, unpack
from lightning_fl.slots import Message, Packed, Payload, RoundContext, State, Traits, VectorCodec, compressible
from lightning_fl.vectors.magnitudes import by_largest, scale_dtype

Groups = Literal["tensor", "global"]
SCALES = "scalars/scale/"


class FewBits(VectorCodec):
    """Encodes each vector (d,) as a code for every number and a scale for each group of numbers.

    Attributes:
        groups: numbers that share a scale: each `tensor` of the model, or `global`.
        known: entries that cost no bits, because the other side derives them from the configuration.
    """

    beside = (SCALES,)
    groups: Groups
    known: tuple[str, ...] = ()

    @abstractmethod
    def shrink(self, vector: Tensor, sizes: list[int]) -> tuple[Packed, Tensor | None]:
        """Return the codes of a vector (d,), and the scales of its groups, which have these sizes; None for no scales."""

    @abstractmethod
    def restore(self, codes: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Return the numbers (d,) that the codes stand for, as shares of the scales, in a dtype or a wider one; d = `count`."""

    @property
    @abstractmethod
    def width(self) -> int:
        """Bits of a code."""

    def symbols(self, name: str, payload: Payload, context: RoundContext) -> tuple[Tensor, int] | None:
        """Return the codes of an encoded vector, unless there are too many different ones to count them."""
        if not self.is_lossy_for(name) or self.width > 16:
            return None
        return unpack(payload[name].content, context.layout.numel, self.width), 2**self.width

    def bits_by_tensor(self, name: str, payload: Payload, context: RoundContext) -> dict[str, int] | None:
        """Return the bits of each tensor's scale."""
        if not name.startswith(SCALES) or self.groups != "tensor":
            return None
        layout, width = context.layout, 8 * payload[name].content.element_size()
        return {tensor: width for tensor, size in zip(layout.names, layout.sizes, strict=True) if size}

    def encode(self, message: Message, memory: State, context: RoundContext) -> tuple[Payload, State]:
        """Encode one vector after the other; what the other side knows takes no bits."""
        payload, memory = super().encode(message, memory, context)
        known = [name for name in self.known if name in message and not self.is_lossy_for(name)]
        return payload | {name: Packed(message[name], 0) for name in known}, memory

    def encode_vector(self, name: str, vector: Tensor, context: RoundContext) -> Payload:
        """Encode codes under the vector's name, and scales (groups,), if there are any, under `scalars/scale/name`."""
        codes, scales = self.shrink(vector, self._sizes(context))
        return {name: codes} if scales is None else {name: codes, f"{SCALES}{name}": Packed.whole(scales)}

    def decode_vector(self, name: str, payload: Payload, context: RoundContext) -> Tensor:
        """Return the numbers that the codes stand for, times their scales if there are any."""
        codes, count = payload[name].content, context.layout.numel
        if f"{SCALES}{name}" not in payload:
            return self.restore(codes, count, context.dtype)
        scales = payload[f"{SCALES}{name}"].content
        vector = self.restore(codes, count, scales.dtype)
        for part, scale in zip(vector.split(self._sizes(context)), scales, strict=True):
            part.mul_(scale)
        return vector.to(scales.dtype)

    def _sizes(self, context: RoundContext) -> list[int]:
        """Return the sizes of the groups that are not empty."""
        sizes = context.layout.sizes if self.groups == "tensor" else [context.layout.numel]
        return [size for size in sizes if size]


@dataclass(frozen=True)
class OneBit(FewBits):
    """C(z) = s · sgn(z), sgn(0) = +1: d bits and those of a number, 32 or the model's, for each group's scale s; none for `unit`.

    Attributes:
        scale: `l2` is s = ‖z‖₂ / √n, the choice of 1-bit Adam's authors, which keeps a group's norm but may move further from z
            than 0 is if few numbers of z are large; `l1` is s = ‖z‖₁ / n, the scale with the result nearest to z; `unit` is
            s = 1 for all groups, signSGD's message for a `MajorityVote`.
        groups: numbers that share a scale: each `tensor` of the model, or `global`.
        names: entries that it encodes; all of the model and its moments if empty.
        known: entries that cost no bits, because the other side derives them from the configuration.
    """

    scale: Literal["l2", "l1", "unit"] = "l2"
    groups: Groups = "tensor"
    names: tuple[str, ...] = ()
    known: tuple[str, ...] = ()

    @property
    def traits(self) -> Traits:
        """Signs are too coarse for a whole model; a contraction only for `l1`."""
        return Traits.DELTAS_ONLY | Traits.IDEMPOTENT | Traits.CONTRACTS.only_if(self.scale == "l1")

    @property
    def width(self) -> int:
        """1, for the sign."""
        return 1

    def is_lossy_for(self, name: str) -> bool:
        """True for the entries that it encodes."""
        return name in self.names if self.names else compressible(name)

    def applies_to(self, name: str) -> bool:
        """True for vectors, and for entries that both sides know."""
        return name in self.known or super().applies_to(name)

    def shrink(self, vector: Tensor, sizes: list[int]) -> tuple[Packed, Tensor | None]:
        """Return the signs, ⌈d/8⌉ bytes, and the scales."""
        signs = Packed(pack(vector >= 0, 1), len(vector))
        if self.scale == "unit":
            return signs, None
        # Computed in float64, a decoded vector has exactly the same scale, so encoding it again changes nothing.
        order = 2 if self.scale == "l2" else 1
        parts = [by_largest(part) for part in vector.split(sizes)]
        means = [shares.double().norm(order) / len(shares) ** (1 / order) for shares, _ in parts]
        scales = [mean * largest for mean, (_, largest) in zip(means, parts, strict=True)]
        return signs, torch.cat([vector.new_zeros(0), *scales]).to(vector.dtype)

    def restore(self, codes: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Return the signs as −1 and 1."""
        return unpack(codes, count, 1).to(dtype).mul_(2).sub_(1)


@dataclass(frozen=True)
class Quantiser(FewBits):
    """Round to the nearest of 2^bits − 1 levels, scaled by the group's largest magnitude s = ‖z‖∞.

    An upload takes bits · d, and those of a number, 32 or the model's, for each group's s.

    Attributes:
        levels: `log` has 0 and ±s · 2^−j for j = 0 … 2^(bits−1) − 2; `uniform` has s · q / (2^(bits−1) − 1) for whole q. A tie
            goes to the level with the larger magnitude.
        bits: bits per number, from 2 to 32.
        groups: numbers that share a scale: each `tensor` of the model, or `global`.
    """

    traits = Traits.CONTRACTS | Traits.IDEMPOTENT
    levels: Literal["log", "uniform"] = "log"
    bits: Annotated[int, Interval(ge=2, le=32), Called("bits of a quantised number")] = 3
    groups: Groups = "tensor"

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", int(self.bits))  # arithmetic with a NumPy integer may overflow

    @property
    def width(self) -> int:
        """Bits per number."""
        return self.bits

    def shrink(self, vector: Tensor, sizes: list[int]) -> tuple[Packed, Tensor]:
        """Return levels with signs, and the scales."""
        ratio = vector.abs().to(self._precision(vector.dtype))
        parts = ratio.split(sizes)
        scales = torch.cat([ratio.new_zeros(0), *(part.amax().view(1) for part in parts)]).to(vector.dtype)
        for part, scale in zip(parts, scales, strict=True):
            part.div_(scale)
        code = self._level(ratio.nan_to_num_(0.0))
        code |= (vector < 0).to(code.dtype) << (self.bits - 1)
        return Packed(pack(code, self.bits), len(vector) * self.bits), scales

    def restore(self, codes: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Return signed levels."""
        code = unpack(codes, count, self.bits)
        if self.bits > 8:
            return self._value(code, self._precision(dtype))
        # There are few codes: compute the value of each once.
        all_codes = torch.arange(2**self.bits, device=code.device)
        return self._value(all_codes, self._precision(dtype)).index_select(0, code.int())

    def _precision(self, dtype: torch.dtype) -> torch.dtype:
        """Return a dtype that tells apart the levels of numbers of some dtype."""
        return torch.float64 if self.bits > 16 else scale_dtype(dtype)

    @property
    def _most(self) -> int:
        """Highest level; the bit above it is the sign."""
        return 2 ** (self.bits - 1) - 1

    def _level(self, ratio: Tensor) -> Tensor:
        if self.levels == "uniform":
            return (ratio * self._most + 0.5).to(self._dtype).clamp_(max=self._most)
        # Count the borders at or below the ratio: 2^−most, then 0.75 · 2^−j, half-way to the next higher level.
        count = min(self._most, 1 - math.frexp(torch.finfo(ratio.dtype).smallest_normal)[1])
        borders = 0.75 * torch.exp2(torch.arange(1 - count, 1, device=ratio.device, dtype=ratio.dtype))
        if count == self._most:
            borders[0] = 2.0**-count
        level = torch.bucketize(ratio, borders, right=True, out_int32=True).to(self._dtype)
        return level if count == self._most else level.add_(self._most - count).mul_(level > self._most - count)

    def _value(self, code: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the signed fraction of the scale."""
        level = code & self._most
        if self.levels == "log":
            share = torch.exp2((level - self._most).to(dtype)).mul_(
                level > 0
            )  # subtract first: floats round large levels alike
        else:
            share = level.to(dtype) / self._most
        return torch.where(code > self._most, -share, share)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.uint8 if self.bits <= 8 else torch.int64

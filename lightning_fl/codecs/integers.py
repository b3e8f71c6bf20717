"""Round numbers to integers with a scale and a zero point for each tensor or channel, as in quantised inference.

Jacob et al., Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference, CVPR 2018.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Interval
from torch import Tensor

from lightning_fl.checks import Called
from lightning_fl.coding.bit_packing import pack, unpack
from lightning_fl.slots import Packed, Payload, RoundContext, Traits, VectorCodec
from lightning_fl.vectors.magnitudes import scale_dtype

SCALES, ZEROS = "scalars/scale/", "scalars/zero/"


@dataclass(frozen=True)
class Integers(VectorCodec):
    """C(x) = s(q − z), q = x/s + z, rounded to the nearest integer in 0 … 2^b − 1;  s = (h − l)/(2^b − 1),  z = −l/s, rounded.

    l ≤ 0 and h ≥ 0 are the smallest and the largest number of a group, or 0. So 0 arrives as 0, and the error of a number is
    at most s. `symmetric` has z = 2^(b−1) − 1 and s = max|x|/z: no zero point is sent, and a group of one sign uses half of
    the integers. A vector takes bd + (32 + b)G bits for G groups, symmetric bd + 32G. In a float64 model, scales have 64 bits
    instead of 32. The codec also suits whole models if no tensor has outliers.

    Attributes:
        bits: b, bits of an integer, from 2 to 16.
        per: group of numbers: each `tensor`, or each output `channel` of a tensor with two axes or more.
        symmetric: leave out the zero point.
    """

    beside = (SCALES, ZEROS)
    bits: Annotated[int, Interval(ge=2, le=16), Called("bits of an integer")] = 8
    per: Literal["tensor", "channel"] = "tensor"
    symmetric: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", int(self.bits))

    @property
    def traits(self) -> Traits:
        """Contracts, as no number is nearer to 0 than to its integer; needs shapes for channels."""
        return (
            Traits.CONTRACTS
            | Traits.IDEMPOTENT.only_if(self.symmetric)
            | Traits.NEEDS_SHAPES.only_if(self.per == "channel")
        )

    def symbols(self, name: str, payload: Payload, context: RoundContext) -> tuple[Tensor, int] | None:
        """Return the integers of an encoded vector, or its zero points."""
        if self.is_lossy_for(name):
            return unpack(payload[name].content, context.layout.numel, self.bits), self._most + 1
        if name.startswith(ZEROS):
            return unpack(payload[name].content, sum(self._groups(context).values()), self.bits), self._most + 1
        return None

    def bits_by_tensor(self, name: str, payload: Payload, context: RoundContext) -> dict[str, int] | None:
        """Return the bits of each tensor's scales or zero points."""
        if name.startswith(SCALES):
            width = 8 * payload[name].content.element_size()
        elif name.startswith(ZEROS):
            width = self.bits
        else:
            return None
        return {tensor: width * count for tensor, count in self._groups(context).items()}

    def encode_vector(self, name: str, vector: Tensor, context: RoundContext) -> Payload:
        """Encode integers by the vector's name, scales (G,) under `scalars/scale/name`, zero points under `scalars/zero/name`."""
        payload = {}
        wide = vector.to(scale_dtype(vector.dtype))
        codes = torch.empty_like(wide, dtype=torch.int32)
        scales, zeros = [wide.new_zeros(0)], [wide.new_zeros(0)]
        views = self._rows(wide, context).values(), self._rows(codes, context).values()
        for rows, target in zip(*views, strict=True):
            scale, zero = self._scale(rows.flatten(1))
            shape = (-1, *[1] * (rows.dim() - 1))
            ratio = rows / scale.view(shape)  # NaN or infinite where the scale is 0
            if self.symmetric:
                ratio *= self._middle
            target.copy_((ratio.round().nan_to_num_(0.0) + zero.view(shape)).clamp_(0, self._most))
            scales.append(scale)
            zeros.append(zero)
        payload[name] = Packed(pack(codes, self.bits), len(codes) * self.bits)
        payload[f"{SCALES}{name}"] = Packed.whole(torch.cat(scales))
        if not self.symmetric:
            points = torch.cat(zeros).to(torch.int32)
            payload[f"{ZEROS}{name}"] = Packed(pack(points, self.bits), len(points) * self.bits)
        return payload

    def decode_vector(self, name: str, payload: Payload, context: RoundContext) -> Tensor:
        """Return s(q − z)."""
        scales = payload[f"{SCALES}{name}"].content
        zeros = torch.full_like(scales, self._middle)
        if not self.symmetric:
            zeros = unpack(payload[f"{ZEROS}{name}"].content, len(scales), self.bits).to(scales.dtype)
        vector = unpack(payload[name].content, context.layout.numel, self.bits).to(scales.dtype)
        views = list(self._rows(vector, context).values())
        counts = [len(rows) for rows in views]
        for rows, scale, zero in zip(views, scales.split(counts), zeros.split(counts), strict=True):
            shape = (-1, *[1] * (rows.dim() - 1))
            rows.sub_(zero.view(shape))
            if self.symmetric:
                rows.div_(self._middle)
            rows.mul_(scale.view(shape))
        return vector.to(context.dtype)

    @property
    def _most(self) -> int:
        """Largest integer."""
        return 2 * self._middle if self.symmetric else 2**self.bits - 1

    @property
    def _middle(self) -> int:
        """Zero point of symmetric integers."""
        return 2 ** (self.bits - 1) - 1

    def _scale(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return scale and zero point of each row (G, n); the scale is s, or of symmetric integers max|x|, as it is sent."""
        low, high = rows.amin(1).clamp(max=0), rows.amax(1).clamp(min=0)
        if self.symmetric:
            return torch.maximum(-low, high), torch.full_like(low, self._middle)
        scale = high / self._most - low / self._most  # the difference may overflow
        return scale, (-low / scale).round().nan_to_num_(0.0).clamp_(0, self._most)

    def _rows(self, vector: Tensor, context: RoundContext) -> dict[str, Tensor]:
        """Return a view of each tensor that is not empty, whose first axis counts its groups."""
        layers, rows = {name: group for group in context.groups for name in group.parameters}, {}
        for name, view in context.layout.views(vector).items():
            if not view.numel():
                continue
            if self.per == "tensor" or view.dim() < 2:
                rows[name] = view.reshape(1, -1) if view.dim() == 0 else view.unsqueeze(0)
            else:
                rows[name] = view.movedim(layers[name].unit_axis(view.dim()), 0) if name in layers else view
        return rows

    def _groups(self, context: RoundContext) -> dict[str, int]:
        """Return the number of groups of each tensor that is not empty."""
        whole = torch.empty(context.layout.numel, device="meta")  # of which only the shapes count
        return {name: len(rows) for name, rows in self._rows(whole, context).items()}

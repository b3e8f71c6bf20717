"""Round blocks of numbers to a few levels: C(x) = a · the nearest level to x/a, a = ‖x‖∞ of the block.

Blocks and rounded scales: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022, and "QLoRA: Efficient
Finetuning of Quantized LLMs", NeurIPS 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Interval
from torch import Tensor

from lightning_fl.checks import Called
from lightning_fl.coding.bit_packing import nearest_level, pack, unpack
from lightning_fl.errors import require
from lightning_fl.slots import Packed, Payload, RoundContext, Traits, VectorCodec, compressible
from lightning_fl.vectors.magnitudes import scale_dtype

Levels = Literal["linear", "nf4"]
SCALES, TOPS = "scalars/scale/", "scalars/scale_of_scales/"
NESTED_BLOCK, MOST = 256, 255
# NormalFloat4: quantiles of a normal number, scaled to [−1, 1], with an exact 0 (QLoRA: Dettmers et al., NeurIPS 2023,
# appendix E).
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


@dataclass(frozen=True)
class Blockwise(VectorCodec):
    """C(x) = a · the nearest level to x/a, a = ‖x‖∞ of a block of consecutive numbers: b · d + 32⌈d/block_size⌉ bits.

    An outlier affects only its own block, so the codec also suits whole models. Blocks run over the whole vector, across
    tensors. The code book is part of the configuration, and is not sent. In a float64 model, scales have 64 bits instead of
    32.

    Attributes:
        levels: `linear`: the 2^b − 1 levels q/(2^(b−1) − 1) for whole q, with an error of at most half a step, a/(2^b − 2);
            `nf4`: the 16 levels of NormalFloat4 for normally distributed numbers, for b = 4.
        bits: b, bits per number, from 2 to 8.
        block_size: numbers of a block, at least 1.
        nested: also send the scales in 8 bits, with one scale of 32 bits for each 256 of them: 8⌈d/block_size⌉ bits and 32
            bits per 256 scales, instead of 32⌈d/block_size⌉.
    """

    beside = (SCALES, TOPS)
    levels: Levels = "linear"
    bits: Annotated[int, Interval(ge=2, le=8), Called("bits of a number in a block")] = 8
    block_size: Annotated[int, Ge(1)] = 256
    nested: bool = False

    def __post_init__(self) -> None:
        require(self.levels != "nf4" or self.bits == 4, f"levels 'nf4' take bits=4, got {self.bits}.")
        object.__setattr__(self, "bits", int(self.bits))

    @property
    def traits(self) -> Traits:
        """Contracts; idempotent unless the scales are rounded, too."""
        return Traits.CONTRACTS | Traits.IDEMPOTENT.only_if(not self.nested)

    def symbols(self, name: str, payload: Payload, context: RoundContext) -> tuple[Tensor, int] | None:
        """Return the codes of an encoded vector, or of its scales if they are rounded."""
        if self.nested and name.startswith(SCALES):
            return payload[name].content, MOST + 1
        if not compressible(name):
            return None
        return unpack(payload[name].content, context.layout.numel, self.bits), 2**self.bits - (self.levels == "linear")

    def encode_vector(self, name: str, vector: Tensor, context: RoundContext) -> Payload:
        """Encode codes by the vector's name, scales under `scalars/scale/name`, theirs under `scalars/scale_of_scales/name`."""
        payload = {}
        blocks = _in_blocks(vector.to(scale_dtype(vector.dtype)), self.block_size)
        scales = _largest(blocks)
        if self.nested:
            tops = _largest(_in_blocks(scales, NESTED_BLOCK))
            codes = _ratios(_in_blocks(scales, NESTED_BLOCK), tops).mul_(MOST).round_().to(torch.uint8)
            payload[f"{SCALES}{name}"] = Packed.whole(codes.view(-1)[: len(scales)])
            payload[f"{TOPS}{name}"] = Packed.whole(tops)
            scales = self._scales(payload, name)
        else:
            payload[f"{SCALES}{name}"] = Packed.whole(scales)
        codes = self._code(_ratios(blocks, scales)).view(-1)[: len(vector)]
        payload[name] = Packed(pack(codes, self.bits), len(vector) * self.bits)
        return payload

    def decode_vector(self, name: str, payload: Payload, context: RoundContext) -> Tensor:
        """Return the levels, times the scales of their blocks."""
        count = context.layout.numel
        levels = self._value(unpack(payload[name].content, count, self.bits), context.dtype)
        vector = _in_blocks(levels, self.block_size).mul_(self._scales(payload, name)[:, None])
        return vector.view(-1)[:count].to(context.dtype)

    def _scales(self, payload: Payload, name: str) -> Tensor:
        """Return the scales (blocks,) as they arrive, float32 or float64."""
        scales = payload[f"{SCALES}{name}"].content
        if not self.nested:
            return scales
        tops = payload[f"{TOPS}{name}"].content
        shares = _in_blocks(scales.to(tops.dtype) / MOST, NESTED_BLOCK)
        return (shares * tops[:, None]).view(-1)[: len(scales)]

    @property
    def _most(self) -> int:
        """Code of the largest linear level, less that of 0."""
        return 2 ** (self.bits - 1) - 1

    def _code(self, ratios: Tensor) -> Tensor:
        if self.levels == "nf4":
            return nearest_level(ratios, torch.tensor(NF4, dtype=ratios.dtype))
        return ratios.mul_(self._most).round_().add_(self._most).to(torch.uint8)

    def _value(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the levels of codes, at least in float32, so that only the result is rounded."""
        dtype = torch.promote_types(dtype, torch.float32)
        if self.levels == "nf4":
            return torch.tensor(NF4, dtype=dtype, device=codes.device).index_select(0, codes.int())
        return codes.to(dtype).sub_(self._most).div_(self._most)


def _in_blocks(vector: Tensor, size: int) -> Tensor:
    """Return a vector (d,) as blocks (⌈d/size⌉, size), the last one filled up with zeros."""
    size = max(1, min(size, len(vector)))
    count = -(-len(vector) // size)
    if count * size == len(vector):
        return vector.view(count, size)
    return torch.cat([vector, vector.new_zeros(count * size - len(vector))]).view(count, size)


def _largest(blocks: Tensor) -> Tensor:
    """Return the largest magnitude of each block."""
    return torch.linalg.vector_norm(blocks, torch.inf, dim=1)


def _ratios(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers as shares of their block's scale, in [−1, 1]; 0 where both are 0 or a number is not finite."""
    return (blocks / scales[:, None]).nan_to_num_().clamp_(-1, 1)

"""Send every number as it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fl.coding.bit_packing import pack, unpack
from lightning_fl.errors import require
from lightning_fl.slots import Codec, Message, Packed, Payload, RoundContext, State, Traits, kind_of


@dataclass(frozen=True)
class Dense(Codec):
    """Send each vector whole, 32 bits per number in float32, and masks (bools of the kind `mask`) at one bit each."""

    traits = Traits.EXACT | Traits.SUMS_SUFFICE

    def relative_variance(self, numel: int) -> float:
        """Return 0."""
        return 0.0

    def encode(self, message: Message, memory: State, context: RoundContext) -> tuple[Payload, State]:
        """Encode each vector, bits = its numbers × the width of its dtype; only masks are copied."""
        return {name: _packed(name, vector) for name, vector in message.items()}, {}

    def decode(self, payload: Payload, context: RoundContext) -> Message:
        """Return the vectors that were sent."""
        return {
            name: unpack(packed.content, packed.bits, 1).bool() if kind_of(name) == "mask" else packed.content
            for name, packed in payload.items()
        }


def _packed(name: str, vector: Tensor) -> Packed:
    if kind_of(name) != "mask":
        return Packed.whole(vector)
    require(
        vector.dtype == torch.bool,
        f"The entry {name!r} of a message is a mask, of bools, but has {str(vector.dtype).removeprefix('torch.')}: name other "
        "numbers moments/… or scalars/….",
    )
    require(
        vector.dim() == 1,
        f"The entry {name!r} of a message is a mask, a vector of bools, but has shape {tuple(vector.shape)}: flatten it.",
    )
    return Packed(pack(vector, 1), len(vector))

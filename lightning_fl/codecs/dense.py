"""Every number as it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_fl.slots import Codec, Message, Packed, Payload, Setting, State, kind_of


@dataclass(frozen=True)
class Dense(Codec):
    """Sends each vector whole, 32 bits a number in float32, and masks (bools of the kind `mask`) at one bit each."""

    def encode(self, message: Message, memory: State, setting: Setting) -> tuple[Payload, State]:
        """Bits of a vector = its numbers × the width of its dtype; nothing is copied but masks."""
        return {name: _packed(name, x) for name, x in message.items()}, {}

    def decode(self, payload: Payload, setting: Setting) -> Message:
        """The vectors that were sent."""
        return {
            name: _unpack_bits(packed) if kind_of(name) == "mask" else packed.content
            for name, packed in payload.items()
        }


def _packed(name: str, x: Tensor) -> Packed:
    if kind_of(name) == "mask":
        rows = pad(x.to(torch.uint8), (0, -len(x) % 8)).view(-1, 8)
        return Packed((rows << torch.arange(8, device=x.device)).sum(1, dtype=torch.uint8), len(x))
    return Packed(x, x.numel() * x.element_size() * 8)


def _unpack_bits(packed: Packed) -> Tensor:
    places = torch.arange(8, device=packed.content.device)
    return (packed.content.unsqueeze(1) >> places & 1).bool().flatten()[: packed.bits]

"""Top-k sparsification: send the k largest numbers of each vector (FedAdam-Top's codec in FedAdam-SSM's comparison)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from lightning_fl.checks import check_between, check_choice
from lightning_fl.slots import Codec, Message, Packed, Payload, Setting, State, compressible
from lightning_fl.vectors.top_k import (
    INDEX_BITS,
    IndexBits,
    num_kept,
    pack_positions,
    positions_bits,
    top_k,
    unpack_positions,
)


@dataclass(frozen=True)
class TopK(Codec):
    """Send the k largest numbers of each vector and their positions, as a mask or a list of indices, whichever is shorter.

    k = max(1, ⌊alpha · d⌋) over the whole vector (d,), of equal magnitudes the lower index first. A vector takes
    32k + min(d, k⌈log2 d⌉) bits, 32d with alpha = 1. The rest is dropped, unless `ErrorFeedback` around it sends it later.

    Attributes:
        alpha: share of the coordinates that are sent, in (0, 1]. Default of the paper: 0.05.
        index_bits: count ⌈log2 d⌉ bits per index, as encoded (`ceil`), or log2 d, as in the paper (`exact`).
    """

    alpha: float = 0.05
    index_bits: IndexBits = field(default="ceil", kw_only=True)

    def __post_init__(self) -> None:
        check_between("alpha, the share of numbers that are sent,", self.alpha, 0, 1, "(]")
        check_choice("index_bits", self.index_bits, INDEX_BITS)

    def deltas_only(self) -> bool:
        """True unless everything is sent."""
        return self.alpha < 1

    def is_lossy_for(self, name: str) -> bool:
        """True for the model and its moments, unless everything is sent."""
        return self.alpha < 1 and compressible(name)

    def encode(self, message: Message, memory: State, setting: Setting) -> tuple[Payload, State]:
        """Encode values (k,) under the vector's name, and their positions under `mask/name`."""
        payload = {}
        for name, vector in message.items():
            if not compressible(name):
                payload[name] = Packed.whole(vector)
                continue
            count = len(vector)
            positions = top_k(vector, num_kept(self.alpha, count))
            payload[name] = Packed.whole(vector[positions])
            bits = positions_bits(len(positions), count, self.index_bits)
            payload[f"mask/{name}"] = Packed(pack_positions(positions, count), bits)
        return payload, {}

    def decode(self, payload: Payload, setting: Setting) -> Message:
        """Decode; numbers that were not sent are zero."""
        message = {}
        for name, packed in payload.items():
            if f"mask/{name}" in payload:
                values, count = packed.content, setting.layout.numel
                vector = torch.zeros(count, dtype=values.dtype, device=values.device)
                positions = payload[f"mask/{name}"].content
                vector[unpack_positions(positions, len(values), count)] = values
                message[name] = vector
            elif not name.startswith("mask/"):
                message[name] = packed.content
        return message

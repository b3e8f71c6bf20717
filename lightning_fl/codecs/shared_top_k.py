"""One mask for all vectors of a message (FedAdam-SSM), chosen by one of them or by all (Fairness-Top).

The k coordinates are sent for every vector: with three of them 96k + min(d, k⌈log2 d⌉) bits, where three masks of their own
would take up to 2d bits more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_fl.errors import UserError, nearest, require
from lightning_fl.slots import Codec, Message, Packed, Payload, Setting, State, compressible
from lightning_fl.sparse import (
    num_kept,
    pack_positions,
    positions_bits,
    top_k,
    top_k_in_turns,
    top_k_of_max,
    unpack_positions,
)


@dataclass(frozen=True)
class SharedTopK(Codec):
    """Sends the coordinates where one vector, the leader, is largest, of all vectors.

    Attributes:
        alpha: share of the coordinates that are sent, in (0, 1]. Default of the paper: 0.05.
        leader: name of the vector whose k largest numbers make the mask.
    """

    alpha: float = 0.05
    leader: str = "model"

    def __post_init__(self) -> None:
        _check_alpha(self.alpha)

    def needs(self) -> frozenset[str]:
        """The leader."""
        return frozenset({self.leader})

    def deltas_only(self) -> bool:
        """Yes, unless everything is kept."""
        return self.alpha < 1

    def loses(self, name: str) -> bool:
        """All of the model and its moments, unless everything is kept."""
        return self.alpha < 1 and compressible(name)

    def encode(self, message: Message, memory: State, setting: Setting) -> tuple[Payload, State]:
        """Values (k,) under each vector's own name, their positions under `mask`."""
        if not _has_vectors(message):
            return {name: Packed.whole(x) for name, x in message.items()}, {}
        return _encode(message, top_k(message[self.leader], num_kept(self.alpha, setting.layout.numel))), {}

    def decode(self, payload: Payload, setting: Setting) -> Message:
        """Zero where nothing was sent."""
        return _decode(payload, setting)


@dataclass(frozen=True)
class FairTopK(Codec):
    """Sends coordinates that all vectors have a say in.

    Attributes:
        alpha: share of the coordinates that are sent, in (0, 1]. Default of the paper: 0.05.
        union: `interleaved` takes the vectors' largest numbers in turns, rank by rank, until k distinct coordinates are there
            (FAB-top-k, applied to vectors instead of clients); `max` takes the k largest of max(|x|, |y|, …).
    """

    alpha: float = 0.05
    union: Literal["interleaved", "max"] = "interleaved"

    def __post_init__(self) -> None:
        _check_alpha(self.alpha)
        allowed = ("interleaved", "max")
        if self.union not in allowed:
            raise UserError(f"union {self.union!r} is unknown; {nearest(str(self.union), allowed)}.")

    def deltas_only(self) -> bool:
        """Yes, unless everything is kept."""
        return self.alpha < 1

    def loses(self, name: str) -> bool:
        """All of the model and its moments, unless everything is kept."""
        return self.alpha < 1 and compressible(name)

    def encode(self, message: Message, memory: State, setting: Setting) -> tuple[Payload, State]:
        """Values (k,) under each vector's own name, their positions under `mask`."""
        if not _has_vectors(message):
            return {name: Packed.whole(x) for name, x in message.items()}, {}
        vectors = [x for name, x in message.items() if compressible(name)]
        choose = top_k_in_turns if self.union == "interleaved" else top_k_of_max
        return _encode(message, choose(vectors, num_kept(self.alpha, setting.layout.numel))), {}

    def decode(self, payload: Payload, setting: Setting) -> Message:
        """Zero where nothing was sent."""
        return _decode(payload, setting)


def _check_alpha(alpha: float) -> None:
    require(0 < alpha <= 1, f"alpha is the share of numbers that are sent and lies in (0, 1], got {alpha}.")


def _has_vectors(message: Message) -> bool:
    """A client may have buffers alone to send, where an exchange chose no layer of it."""
    return any(compressible(name) for name in message)


def _encode(message: Message, mask: Tensor) -> Payload:
    payload = {name: Packed.whole(x[mask] if compressible(name) else x) for name, x in message.items()}
    payload["mask"] = Packed(pack_positions(mask), positions_bits(int(mask.sum()), len(mask)))
    return payload


def _decode(payload: Payload, setting: Setting) -> Message:
    positions = None
    message = {}
    for name, packed in payload.items():
        if compressible(name):
            values, count = packed.content, setting.layout.numel
            if positions is None:
                positions = unpack_positions(payload["mask"].content, len(values), count)
            message[name] = torch.zeros(count, dtype=values.dtype, device=values.device)
            message[name][positions] = values
        elif name != "mask":
            message[name] = packed.content
    return message

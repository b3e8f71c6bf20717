"""The slot between a message and its bits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from lightning_fl.slots.message import Message, State, kind_of
from lightning_fl.slots.setting import Setting


@dataclass(frozen=True)
class Packed:
    """One encoded entry of a message.

    Attributes:
        content: the tensor that crosses, packed as its codec packs it.
        bits: what crossing costs, as the ledger books it.
    """

    content: Tensor
    bits: int

    @classmethod
    def whole(cls, content: Tensor) -> Packed:
        """Every number as it is: the width of its dtype for each."""
        return cls(content, content.numel() * content.element_size() * 8)


Payload = dict[str, Packed]


class Codec(ABC):
    """How a message becomes bits and back. `decode(encode(message))` is what the other side sees."""

    def needs_every_client(self) -> bool:
        """Whether a broadcast must reach every client of the federation, because the next one builds on it."""
        return False

    def deltas_only(self) -> bool:
        """Whether it leaves out what is small, which a delta survives and a whole model does not."""
        return False

    def needs(self) -> frozenset[str]:
        """Names without which it cannot encode a message."""
        return frozenset()

    def change_entry(self) -> tuple[str, Codec] | None:
        """For a broadcast that says only what the server did: the entry that says it, and the codec it goes through."""
        return None

    def applies_to(self, name: str) -> bool:
        """Whether an entry of that name goes through it; scalars and masks, whose every bit counts, cross whole otherwise."""
        return kind_of(name) not in ("scalars", "mask")

    def is_lossy_for(self, name: str) -> bool:
        """Whether an entry of that name may come out different from what went in."""
        return False

    @abstractmethod
    def encode(self, message: Message, memory: State, setting: Setting) -> tuple[Payload, State]:
        """Encode; `memory` is the sender's from the last time ({} at first), the second result is its new one."""

    @abstractmethod
    def decode(self, payload: Payload, setting: Setting) -> Message:
        """The message that the payload holds."""

    def decode_incremental(self, payload: Payload, memory: State, setting: Setting) -> Message:
        """The message of a broadcast for clients that have followed the earlier ones; `memory` is what `encode` was given."""
        return self.decode(payload, setting)


def through(codec: Codec, message: Message, setting: Setting) -> Message:
    """What a codec makes of a message of the server's: what it makes of the kept coordinates, 0 elsewhere."""
    unpruned = setting.unpruned
    if unpruned is None:
        payload, _ = codec.encode(message, {}, setting)
        return codec.decode(payload, setting)
    smaller = setting.within(unpruned)
    payload, _ = codec.encode(unpruned.gather(message), {}, smaller)
    return unpruned.scatter(codec.decode(payload, smaller), {})

"""Every number as it is."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_fl.slots import Codec, Message, Packed, Payload, Setting, State


@dataclass(frozen=True)
class Dense(Codec):
    """Sends each vector whole: 32 bits a number in float32. Nothing is copied."""

    def encode(self, message: Message, memory: State, setting: Setting) -> tuple[Payload, State]:
        """Bits of a vector = its numbers × the width of its dtype."""
        return {name: Packed.whole(x) for name, x in message.items()}, {}

    def decode(self, payload: Payload, setting: Setting) -> Message:
        """The vectors that were sent."""
        return {name: packed.content for name, packed in payload.items()}

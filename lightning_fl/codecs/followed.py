"""A broadcast of the server's step alone, from which clients that know the rest work it out (1-bit Adam, Efficient-Adam)."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_fl.slots import Codec, Message, Packed, Payload, Setting, State, compressible, kind_of

BESIDE = "/beside/"


@dataclass(frozen=True)
class Followed(Codec):
    """Where a broadcast holds the carrier, only that costs anything: the model and its moments follow from it.

    A broadcast without a carrier is sent whole, which the first one is. Clients hold the last broadcast and make the server's
    step themselves, so each broadcast goes to all of them. Buffers are sent whole always.

    Attributes:
        codec: how the carrier becomes bits; it must give back exactly what a step has already made of it, as encoding twice does.
        carrier: name of the entry that says what the server did: `model/change` of the step `Compress`, `moments/momentum` of
            `WarmedUpMoments`.
    """

    codec: Codec
    carrier: str = "model/change"

    def applies_to(self, name: str) -> bool:
        """What the codec inside takes."""
        return self.codec.applies_to(name)

    def needs_every_client(self) -> bool:
        """Yes."""
        return True

    def change_entry(self) -> tuple[str, Codec]:
        """The carrier, through the codec inside."""
        return self.carrier, self.codec

    def encode(self, message: Message, memory: State, setting: Setting) -> tuple[Payload, State]:
        """The carrier encoded; beside it the model and its moments at no cost."""
        payload: Payload = {}
        if self.carrier in message:
            payload, _ = self.codec.encode({self.carrier: message[self.carrier]}, {}, setting)
        for name, x in message.items():
            if name != self.carrier:
                follows = self.carrier in message and compressible(name)
                payload[f"{kind_of(name)}{BESIDE}{name}"] = Packed(x, 0) if follows else Packed.whole(x)
        return payload, {}

    def decode(self, payload: Payload, setting: Setting) -> Message:
        """The carrier decoded, the rest as it is."""
        message = {name.partition(BESIDE)[2]: packed.content for name, packed in payload.items() if BESIDE in name}
        encoded = {name: packed for name, packed in payload.items() if BESIDE not in name}
        return {**message, **(self.codec.decode(encoded, setting) if encoded else {})}

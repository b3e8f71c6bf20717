"""Incremental broadcasts: clients keep the last model, and the server sends only changes.

Changes     the new values where there are some: the union downlink of sparse uploads (FedAdam-SSM)
Followed    the server's step, from which clients compute the new model (1-bit Adam, Efficient-Adam, STC)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_fl.coding.top_k import pack_positions, positions_bits, unpack_positions
from lightning_fl.errors import require
from lightning_fl.slots import (
    KINDS,
    Codec,
    Message,
    Packed,
    Payload,
    RoundContext,
    State,
    Traits,
    check_inner,
    compressible,
    kind_of,
)

POSITIONS = "mask/changed"
BESIDE, ENCODED, CHANGE = "/beside/", "/encoded", "model/change"


@dataclass(frozen=True)
class Changes(Codec):
    """Send the new values of the u coordinates in which any vector has changed; u is at most the union of the clients' masks.

    With three vectors this takes min(96u + min(d, u⌈log2 d⌉), 96d) bits; the first broadcast is sent whole. The codec is
    lossless: clients keep the last broadcast and overwrite u positions. Each broadcast builds on the last one, so each goes to
    all clients.
    """

    traits = Traits.NEEDS_EVERY_CLIENT | Traits.EXACT
    size_depends_on_values = True

    def encode(self, message: Message, memory: State, context: RoundContext) -> tuple[Payload, State]:
        """Encode values (u,) under each vector's name and their positions, or whole vectors; memory: the last broadcast."""
        vectors = {name: vector for name, vector in message.items() if compressible(name)}
        payload = {name: Packed.whole(vector) for name, vector in message.items()}
        if vectors.keys() != memory.keys():
            return payload, vectors
        changed = torch.zeros(context.layout.numel, dtype=torch.bool, device=message["model"].device)
        for name, vector in vectors.items():
            changed |= vector != memory[name]
        positions, count = changed.nonzero().flatten(), len(changed)
        sparse = {name: Packed.whole(vector[positions]) for name, vector in vectors.items()}
        sparse[POSITIONS] = Packed(pack_positions(positions, count), positions_bits(len(positions), count))
        if _bits(sparse) < _bits({name: payload[name] for name in vectors}):
            payload |= sparse
        return payload, vectors

    def choice(self, name: str, payload: Payload, context: RoundContext) -> tuple[int, int] | None:
        """Return d and u for the positions of the changes."""
        if name != POSITIONS:
            return None
        changed = next(packed for entry, packed in payload.items() if compressible(entry))
        return context.layout.numel, len(changed.content)

    def decode(self, payload: Payload, context: RoundContext) -> Message:
        """Decode a whole broadcast; changes need `decode_incremental`."""
        if POSITIONS in payload:
            raise ValueError("a broadcast of changes cannot be decoded without the broadcast before it")
        return {name: packed.content for name, packed in payload.items()}

    def decode_incremental(self, payload: Payload, memory: State, context: RoundContext) -> Message:
        """Return the last broadcast with the new values in it."""
        if POSITIONS not in payload:
            return self.decode(payload, context)
        message = {name: packed.content for name, packed in payload.items() if name != POSITIONS}
        positions = unpack_positions(payload[POSITIONS].content, len(message["model"]), context.layout.numel)
        for name in memory:
            message[name] = memory[name].index_copy(0, positions, message[name])
        return message


@dataclass(frozen=True)
class Followed(Codec):
    """Send only the server's step (the carrier), from which clients compute the new model and its moments.

    A broadcast without a carrier, such as the first one, is sent whole. Clients keep the last broadcast and repeat the
    server's step. So each broadcast goes to all clients, or with `catch_up` to the round's clients, with all changes that they
    have missed. After a round without a change, for example without an accepted upload, nothing is sent. Buffers are sent
    whole, and so are parameters that a callback has changed between two rounds.

    Attributes:
        codec: codec of the carrier, the same as in the step that encodes it.
        carrier: name of the entry that contains the server's step: `model/change` of the step `Compress`, `moments/momentum`
            of `WarmedUpMoments`.
        catch_up: count bits only for the round's clients, each for the sum of the changes since its last round, at most for a
            whole model, as in STC's paper; if not given, count bits for all clients of the federation in each round.
    """

    codec: Codec
    carrier: str = CHANGE
    catch_up: bool | None = None

    def __post_init__(self) -> None:
        check_inner(self, "codec", Codec, "STC()")
        require(
            not self.catch_up or self.carrier == CHANGE,
            f"Followed(catch_up=True) adds up changes of the model, {CHANGE!r}, and {self.carrier!r} is none: leave it out.",
        )

    @property
    def traits(self) -> Traits:
        """Broadcasts build on each other."""
        return Traits.NEEDS_EVERY_CLIENT | Traits.CATCHES_UP.only_if(bool(self.catch_up))

    def check(self, context: RoundContext) -> None:
        """Check the inner codec."""
        self.codec.check(context)

    def applies_to(self, name: str) -> bool:
        """True if the inner codec applies to the entry."""
        return self.codec.applies_to(name)

    def change_entry(self) -> tuple[str, Codec]:
        """Return the carrier's name, and the inner codec."""
        return self.carrier, self.codec

    def encode(self, message: Message, memory: State, context: RoundContext) -> tuple[Payload, State]:
        """Encode the carrier, and add the model and its moments at no cost."""
        payload: Payload = {}
        if self.carrier in context.encoded:  # encoding it again would draw, and lose, anew
            bits = dict(zip(KINDS, context.encoded[self.carrier].tolist(), strict=True))
            payload = {f"{kind}{ENCODED}": Packed(message[self.carrier], count) for kind, count in bits.items()}
        elif self.carrier in message:  # from a step that keeps no bits
            inner = type(self.codec).__name__
            require(
                Traits.IDEMPOTENT in self.codec.traits,
                f"Followed({inner}) would encode {self.carrier!r} a second time, which loses more: the step that sends it must "
                "return its bits from `encoded`.",
            )
            payload, _ = self.codec.encode({self.carrier: message[self.carrier]}, {}, context)
        for name, entry in message.items():
            if name != self.carrier:
                is_known = self.carrier in message and not (name == "model" and context.is_replaced)
                follows = is_known and compressible(name)
                payload[f"{kind_of(name)}{BESIDE}{name}"] = Packed(entry, 0) if follows else Packed.whole(entry)
        return payload, {}

    def decode(self, payload: Payload, context: RoundContext) -> Message:
        """Decode the carrier, and return the rest as it is."""
        message = {name.partition(BESIDE)[2]: packed.content for name, packed in payload.items() if BESIDE in name}
        encoded = {name: packed for name, packed in payload.items() if BESIDE not in name}
        for name in [name for name in encoded if name.endswith(ENCODED)]:
            message[self.carrier] = encoded.pop(name).content
        return {**message, **(self.codec.decode(encoded, context) if encoded else {})}


def _bits(payload: Payload) -> int:
    return sum(packed.bits for packed in payload.values())

"""Broadcast only the changes since the last broadcast: the union downlink of sparse uploads (FedAdam-SSM)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_fl.slots import Codec, Message, Packed, Payload, Setting, State, compressible
from lightning_fl.vectors.top_k import pack_positions, positions_bits, unpack_positions

POSITIONS = "mask/changed"


@dataclass(frozen=True)
class Changes(Codec):
    """Send the new values of the u coordinates in which any vector has changed, u at most the union of the clients' masks.

    With three vectors this takes min(96u + min(d, u⌈log2 d⌉), 96d) bits; the first broadcast is whole. Nothing is lost: the
    clients keep the last broadcast and overwrite u positions. As each broadcast builds on the last, each goes to all clients.
    """

    needs_every_client = is_unbiased = contracts = is_idempotent = True

    def encode(self, message: Message, memory: State, setting: Setting) -> tuple[Payload, State]:
        """Encode values (u,) under each vector's name and their positions, or whole vectors; memory: the last broadcast."""
        vectors = {name: vector for name, vector in message.items() if compressible(name)}
        payload = {name: Packed.whole(vector) for name, vector in message.items()}
        if vectors.keys() != memory.keys():
            return payload, vectors
        changed = torch.zeros(setting.layout.numel, dtype=torch.bool, device=message["model"].device)
        for name, vector in vectors.items():
            changed |= vector != memory[name]
        positions, count = changed.nonzero().flatten(), len(changed)
        sparse = {name: Packed.whole(vector[positions]) for name, vector in vectors.items()}
        sparse[POSITIONS] = Packed(pack_positions(positions, count), positions_bits(len(positions), count))
        if _bits(sparse) < _bits({name: payload[name] for name in vectors}):
            payload |= sparse
        return payload, vectors

    def decode(self, payload: Payload, setting: Setting) -> Message:
        """Decode a whole broadcast; changes need `decode_incremental`."""
        if POSITIONS in payload:
            raise ValueError("a broadcast of changes cannot be decoded without the broadcast before it")
        return {name: packed.content for name, packed in payload.items()}

    def decode_incremental(self, payload: Payload, memory: State, setting: Setting) -> Message:
        """Return the last broadcast with the new values in it."""
        if POSITIONS not in payload:
            return self.decode(payload, setting)
        message = {name: packed.content for name, packed in payload.items() if name != POSITIONS}
        positions = unpack_positions(payload[POSITIONS].content, len(message["model"]), setting.layout.numel)
        for name in memory:
            message[name] = memory[name].index_copy(0, positions, message[name])
        return message


def _bits(payload: Payload) -> int:
    return sum(packed.bits for packed in payload.values())

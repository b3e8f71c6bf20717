"""Codecs that encode each vector alone, as most do."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from lightning_fl.slots.codec import Codec, Packed, Payload
from lightning_fl.slots.message import Message, State
from lightning_fl.slots.round_context import RoundContext


class VectorCodec(Codec):
    """Encodes each vector for which it is lossy (`is_lossy_for`) alone and without memory. Other entries cross unchanged.

    Attributes:
        beside: prefixes of the names of a vector's other entries, such as `("scalars/scale/",)` for `scalars/scale/model`.
    """

    any_size = False
    beside: tuple[str, ...] = ()

    @abstractmethod
    def encode_vector(self, name: str, vector: Tensor, context: RoundContext) -> Payload:
        """Return the entries of a vector (d,): one under its name, and others `beside` it."""

    @abstractmethod
    def decode_vector(self, name: str, payload: Payload, context: RoundContext) -> Tensor:
        """Return the vector (d,) of this name, d = `context.layout.numel`, in the model's dtype."""

    def encode(self, message: Message, memory: State, context: RoundContext) -> tuple[Payload, State]:
        """Encode one vector after the other."""
        payload: Payload = {}
        for name, vector in message.items():
            if self.is_lossy_for(name):
                payload |= self.encode_vector(name, vector, context)
            else:
                payload[name] = Packed.whole(vector)
        return payload, {}

    def decode(self, payload: Payload, context: RoundContext) -> Message:
        """Decode one vector after the other."""
        message = {}
        for name, packed in payload.items():
            if self.is_lossy_for(name):
                message[name] = self.decode_vector(name, payload, context)
            elif not name.startswith(self.beside):
                message[name] = packed.content
        return message

"""Error feedback: what a lossy codec left out of one upload is added to the next (Seide et al., Interspeech 2014)."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_fl.slots import Codec, Message, Payload, Setting, State

RESIDUAL = "residual/"


@dataclass(frozen=True)
class ErrorFeedback(Codec):
    """z = x + e;  sends C(z);  e ← z − C(z).  All that was ever sent, and e, add up to all that was to be sent.

    A client keeps an e of its own, which changes only if the server accepted the upload.

    Attributes:
        codec: C, any codec; entries that it does not lose anything of have no e.
    """

    codec: Codec

    def deltas_only(self) -> bool:
        """As the inner codec: what is left out of a whole model is missed at once."""
        return self.codec.deltas_only()

    def needs(self) -> frozenset[str]:
        """What the inner codec needs."""
        return self.codec.needs()

    def applies_to(self, name: str) -> bool:
        """What the codec inside takes."""
        return self.codec.applies_to(name)

    def is_lossy_for(self, name: str) -> bool:
        """What the inner codec loses, though for a time only."""
        return self.codec.is_lossy_for(name)

    def encode(self, message: Message, memory: State, setting: Setting) -> tuple[Payload, State]:
        """Encode z; the new memory is e beside the inner codec's."""
        wanted = {name: x + memory[RESIDUAL + name] if RESIDUAL + name in memory else x for name, x in message.items()}
        inner = {name: x for name, x in memory.items() if not name.startswith(RESIDUAL)}
        payload, inner = self.codec.encode(wanted, inner, setting)
        sent = self.codec.decode(payload, setting)
        kept = {name: x for name, x in memory.items() if name.startswith(RESIDUAL)}
        kept |= {RESIDUAL + name: wanted[name] - sent[name] for name in message if self.is_lossy_for(name)}
        return payload, {**inner, **kept}

    def decode(self, payload: Payload, setting: Setting) -> Message:
        """C(z)."""
        return self.codec.decode(payload, setting)

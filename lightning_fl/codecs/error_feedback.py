"""Error feedback: add the loss of a lossy codec in one upload to the next one (Seide et al., Interspeech 2014)."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_fl.errors import require
from lightning_fl.slots import Codec, Message, Payload, RoundContext, State, Traits, check_inner, forwards
from lightning_fl.slots.codec import undeclared

RESIDUAL = "residual/"


@forwards(
    "codec",
    "any_size applies_to bits_by_tensor change_entry check choice decode_incremental from_symbols in_common is_lossy_for largest "
    "needs positions provides symbols uses",
)
@dataclass(frozen=True)
class ErrorFeedback(Codec):
    """z = x + e;  sends C(z);  e ← z − C(z).  So Σ x = Σ C(z) + e over all uploads.

    Each client keeps its own e, which changes only if the server accepted the upload.

    Attributes:
        codec: C, a codec that contracts, such as TopK, and no unbiased one such as QSGD. Entries that it encodes without loss
            have no e.
    """

    codec: Codec

    def __post_init__(self) -> None:
        check_inner(self, "codec", Codec, "TopK()")
        inner = type(self.codec).__name__
        require(
            Traits.ERROR_FEEDBACK not in self.codec.traits,
            f"ErrorFeedback around {inner} would add errors twice: use one of them alone.",
        )
        require(
            self.codec.traits.fit_error_feedback,
            f"ErrorFeedback around {inner} would add up errors that may be larger than the messages: leave ErrorFeedback out, or "
            f"give it a codec that contracts{undeclared(self.codec)}.",
        )

    @property
    def traits(self) -> Traits:
        """Traits of the inner codec, except those of a single message."""
        of_message = Traits.UNBIASED | Traits.NEARLY_UNBIASED | Traits.IDEMPOTENT | Traits.NEEDS_ERROR_FEEDBACK
        return self.codec.traits & ~of_message | Traits.ERROR_FEEDBACK

    def relative_variance(self, numel: int) -> float | None:
        """Return None: a message holds the errors of earlier ones."""
        return None

    def encode(self, message: Message, memory: State, context: RoundContext) -> tuple[Payload, State]:
        """Encode z; the new memory is e and the inner codec's memory."""
        wanted = {name: x + memory[RESIDUAL + name] if RESIDUAL + name in memory else x for name, x in message.items()}
        inner = {name: x for name, x in memory.items() if not name.startswith(RESIDUAL)}
        payload, inner = self.codec.encode(wanted, inner, context)
        sent = self.codec.decode(payload, context)
        residuals = {name: x for name, x in memory.items() if name.startswith(RESIDUAL)}
        residuals |= {RESIDUAL + name: wanted[name] - sent[name] for name in message if self.is_lossy_for(name)}
        return payload, {**inner, **residuals}

    def decode(self, payload: Payload, context: RoundContext) -> Message:
        """Return C(z)."""
        return self.codec.decode(payload, context)

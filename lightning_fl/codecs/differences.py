"""Compressed differences with momentum (DASHA: Tyurin, Richtárik, ICLR 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Interval
from torch import Tensor

from lightning_fl.checks import Called
from lightning_fl.errors import require
from lightning_fl.slots import Codec, Message, Payload, RoundContext, State, Traits, check_inner, forwards
from lightning_fl.slots.codec import undeclared

LAST, ESTIMATE = "last/model", "estimate/model"


@forwards(
    "codec",
    "any_size applies_to bits_by_tensor change_entry check choice decode_incremental from_symbols in_common largest positions "
    "provides symbols",
)
@dataclass(frozen=True)
class Differences(Codec):
    """Sends m = C(x − h − a(g − h));  g ← g + m;  h ← x.

    x is the client's delta, h its previous delta, and g the sum of all m that the server has received from the client. h and g
    are 0 before the client's first upload, and change only if the server accepts an upload. The server adds up the means of
    the m (`Accumulate`), which gives the mean of the g. C encodes all other entries as they are.

    Attributes:
        codec: C, unbiased, with E‖C(x) − x‖² ≤ ω‖x‖² for a known ω (`Codec.relative_variance`).
        momentum: a in (0, 1], the share of the error g − h that a message corrects; 1/(2ω + 1), as in the paper, if not given.
    """

    codec: Codec
    momentum: Annotated[float, Interval(gt=0, le=1), Called("the momentum of compressed differences")] | None = None

    def __post_init__(self) -> None:
        check_inner(self, "codec", Codec, "RandomK()")
        inner = self.codec
        require(
            Traits.UNBIASED in inner.traits and inner.relative_variance(1) is not None,
            f"differences of messages need an unbiased codec with a known bound on E‖C(x) − x‖²/‖x‖², and {inner!r} has none: "
            "give RandomK(), QSGD(), TernGrad() without clip, Dense(), or EntropyCoded around one of them"
            f"{undeclared(inner, Traits.UNBIASED)}.",
        )

    @property
    def traits(self) -> Traits:
        """Increments with error feedback: later messages correct earlier errors; other traits are the inner codec's."""
        of_message = Traits.SENDS_FEW | Traits.NEEDS_SHAPES
        return self.codec.traits & of_message | Traits.DELTAS_ONLY | Traits.ERROR_FEEDBACK | Traits.INCREMENTS

    @property
    def needs(self) -> frozenset[str]:
        """The change of the model, and what the codec inside needs."""
        return self.codec.needs | {"model"}

    @property
    def uses(self) -> frozenset[str]:
        """The change of the model, and what the codec inside uses."""
        return self.codec.uses | {"model"}

    def is_lossy_for(self, name: str) -> bool:
        """True for the model, which arrives as differences; for other entries as in the inner codec."""
        return name == "model" or self.codec.is_lossy_for(name)

    def relative_variance(self, numel: int) -> float | None:
        """Return None, because a decoded message is no estimate of that message alone."""
        return None

    def momentum_of(self, numel: int) -> float:
        """Return a for vectors (d,), d = `numel`.

        >>> from lightning_fl.codecs import RandomK
        >>> Differences(RandomK(0.25)).momentum_of(100), Differences(RandomK(0.25), momentum=0.5).momentum_of(100)
        (0.14285714285714285, 0.5)
        """
        variance = self.codec.relative_variance(max(numel, 1))
        assert variance is not None
        return 1 / (2 * variance + 1) if self.momentum is None else self.momentum

    def encode(self, message: Message, memory: State, context: RoundContext) -> tuple[Payload, State]:
        """Encode m; the new memory is h and g, and that of the codec inside."""
        change = message["model"]
        last, estimate = (_of(memory, name, change) for name in (LAST, ESTIMATE))
        momentum = self.momentum_of(context.layout.numel)
        wanted = change - last - momentum * (estimate - last)
        inner = {name: x for name, x in memory.items() if name not in (LAST, ESTIMATE)}
        payload, inner = self.codec.encode({**message, "model": wanted}, inner, context)
        sent = self.codec.decode(payload, context)["model"]
        return payload, {**inner, LAST: change, ESTIMATE: estimate + sent}

    def decode(self, payload: Payload, context: RoundContext) -> Message:
        """Return m in place of the model's change."""
        return self.codec.decode(payload, context)


def _of(memory: State, name: str, like: Tensor) -> Tensor:
    return memory[name] if name in memory else torch.zeros_like(like)

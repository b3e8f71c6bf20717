"""Send the server's change through a lossy codec with error feedback (Efficient-Adam: Chen et al., 2022)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_fl.errors import require
from lightning_fl.slots import (
    PROPOSAL,
    Codec,
    Message,
    ServerTurn,
    State,
    Step,
    Traits,
    check_inner,
    is_finite,
    through,
)
from lightning_fl.slots.codec import undeclared

CHANGE, BITS = "model/change", "scalars/bits"


@dataclass(frozen=True)
class Compress(Step):
    """y = proposal − w + e;  w ← w + C(y);  e ← y − C(y).

    C(y) goes down with the next model; with the downlink `Followed(C)` the model itself costs no bits. Over all rounds,
    Σ C(y) + e is the sum of the changes that the earlier steps proposed. Buffers are left as proposed.

    Attributes:
        codec: C, a lossy codec, the same as inside the downlink.
        feedback: add the error e; without it e is 0. If not given, add e unless it may grow, as with an unbiased C that is no
            contraction.
    """

    sums_suffice = True
    needs = uses = frozenset({PROPOSAL})
    provides = frozenset({CHANGE})
    changes_model = False
    codec: Codec
    feedback: bool | None = None

    def __post_init__(self) -> None:
        check_inner(self, "codec", Codec, "STC()")
        missing = self.codec.needs - {CHANGE}
        require(
            not missing,
            f"Compress sends one vector, but {type(self.codec).__name__} needs {', '.join(sorted(missing))}.",
        )
        require(
            Traits.ERROR_FEEDBACK not in self.codec.traits,
            f"Compress has error feedback of its own: give it the codec inside {type(self.codec).__name__}.",
        )
        inner, hint = type(self.codec).__name__, undeclared(self.codec)
        require(
            self.feedback is not None or not hint,
            f"Compress({inner}) adds its error to the next change only if the error stays bounded, which is not known{hint}.",
        )
        require(
            not self.feedback or self.codec.traits.fit_error_feedback,
            f"Compress({inner}, feedback=True) would add up errors that may be larger than the changes: leave feedback=True out"
            f"{hint}.",
        )
        require(
            self.feedback is not False or Traits.NEEDS_ERROR_FEEDBACK not in self.codec.traits,
            f"Compress({inner}) needs error feedback: leave feedback=False out.",
        )

    @property
    def adds_error(self) -> bool:
        """True if the error of a round is added to the next."""
        return self.feedback if self.feedback is not None else self.codec.traits.fit_error_feedback

    def change_entry(self) -> tuple[str, Codec]:
        """Return the name of the change, and its codec."""
        return CHANGE, self.codec

    def share(self, state: State) -> Message:
        """Return C(y) of the last round, from the second round on."""
        return {CHANGE: state["change"]} if "change" in state else {}

    def encoded(self, state: State) -> dict[str, Tensor]:
        """Return the bits of C(y)."""
        return {CHANGE: state[BITS]} if BITS in state else {}

    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Replace the proposal by w + C(y)."""
        wanted = turn.proposal - turn.params
        if "error" in state:
            wanted = wanted + state["error"]
        arrived, bits = through(self.codec, {CHANGE: wanted}, turn.context)
        change = arrived[CHANGE]
        turn.proposal = turn.params + change
        new = {"change": change, BITS: bits}
        if self.adds_error:
            # An error that is not finite, beyond the dtype's largest number, would spoil all later changes.
            error = {"error": wanted - change}
            new |= error if is_finite(error) else {name: state[name] for name in error if name in state}
        return new

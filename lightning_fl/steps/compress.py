"""Send the server's change through a lossy codec with error feedback (Efficient-Adam: Chen et al., 2022)."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_fl.errors import require
from lightning_fl.slots import PROPOSAL, Codec, Message, ServerTurn, State, Step, through

CHANGE = "model/change"


@dataclass(frozen=True)
class Compress(Step):
    """y = proposal − w + e;  w ← w + C(y);  e ← y − C(y).

    C(y) goes down with the next model; with the downlink `Followed(C)` the model itself costs no bits. Over all rounds,
    Σ C(y) + e is the sum of the changes that the earlier steps proposed. Buffers are left as proposed.

    Attributes:
        codec: C, a lossy codec, the same as inside the downlink.
    """

    needs = uses = frozenset({PROPOSAL})
    provides = frozenset({CHANGE})
    changes_model = False
    codec: Codec

    def __post_init__(self) -> None:
        missing = self.codec.needs - {CHANGE}
        require(
            not missing,
            f"Compress sends one vector, but {type(self.codec).__name__} needs {', '.join(sorted(missing))}.",
        )
        require(
            not self.codec.has_error_feedback,
            f"Compress has error feedback of its own: give it the codec inside {type(self.codec).__name__}.",
        )

    def change_entry(self) -> tuple[str, Codec]:
        """Return the name of the change, and its codec."""
        return CHANGE, self.codec

    def share(self, state: State) -> Message:
        """Return C(y) of the last round, from the second round on."""
        return {CHANGE: state["change"]} if "change" in state else {}

    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Replace the proposal by w + C(y)."""
        wanted = turn.proposal - turn.params
        if "error" in state:
            wanted = wanted + state["error"]
        change = through(self.codec, {CHANGE: wanted}, turn.setting)[CHANGE]
        turn.proposal = turn.params + change
        return {"change": change, "error": wanted - change}

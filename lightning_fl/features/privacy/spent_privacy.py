"""Releases of a private run, from which an accountant computes the privacy loss."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from lightning_fl.state.run_state import NOISE, Run

PRIVACY = "privacy"
"""Name of the state in a run."""
Event = tuple[str, float, float, float]
"""A release: how clients were drawn, its noise multiplier, and numbers of the draw, 0 for none: q, or N and K, or the rounds of a
pass."""


@dataclass
class SpentPrivacy:
    """Releases of a private run so far.

    Attributes:
        noise_multiplier: z of the run, once it is known.
        clip: clip of the next round, which an adaptive one changes.
        events: number of releases of each kind.
        uploads: Σ 1/z² over the uploads of each client that added noise itself.
        cohort_size: clients of a round, by which passes over all are cut; 0 if not known.
        num_clients: clients that can be drawn, whom each pass takes once; 0 if not known.
        noise_key: number that decides the noise besides the seed.
    """

    noise_multiplier: float = 0.0
    clip: float = float("inf")
    events: Counter[Event] = field(default_factory=Counter)
    uploads: dict[int, float] = field(default_factory=dict)
    cohort_size: int = 0
    num_clients: int = 0
    noise_key: int = 0

    def state_dict(self) -> dict[str, Any]:
        """Return a snapshot in plain containers."""
        events = [[*event, count] for event, count in self.events.items()]
        return {**vars(self), "events": events, "uploads": dict(self.uploads)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> SpentPrivacy:
        """Return the state of a checkpoint."""
        events = Counter({(name, *numbers): count for name, *numbers, count in state["events"]})
        return cls(**{**state, "events": events, "uploads": dict(state["uploads"])})


def spent_of(run: Run) -> SpentPrivacy | None:
    """Return what a run has released; None if it is not private, or has not begun."""
    state = run.features.get(PRIVACY)
    if isinstance(state, dict):  # of a checkpoint
        state = run.features[PRIVACY] = SpentPrivacy.from_state(state)
    return state


def spent_by(run: Run) -> SpentPrivacy:
    """Return what a private run has released since it began."""
    spent = spent_of(run)
    assert spent is not None
    return spent


def noise_seeds(run: Run, client: int = 0, in_round: int | None = None) -> list[int]:
    """Return the seeds of a round's noise, for the server's sum or a client, and for the count of uploads within the clip."""
    spent = spent_of(run)
    return run.torch_seeds(NOISE, client, in_round=in_round, key=0 if spent is None else spent.noise_key)

"""Early stops of a run: which callback or module stopped it, and whether a resumed run stays stopped.

A callback or the module stops a run by `trainer.should_stop = True`. The checkpoint keeps its class and settings. The resumed
run stays stopped while these are the same and `max_rounds` is not larger.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from lightning.pytorch.callbacks import Timer

from lightning_fl.checks import is_a
from lightning_fl.settings.settings import RunSettings


@dataclass(frozen=True)
class Stop:
    """Callback, module or flag that stopped a run.

    Attributes:
        by: class of the callback or module, or the flag `max_time`; empty if neither set `should_stop`.
        watched: metric that the callback watches; empty without one.
        settings: settings of the callback or module.
    """

    by: str
    watched: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.by}: {self.watched}" if self.watched else self.by or "should_stop was set"

    def in_words(self, rounds: int, num_rounds: int) -> str:
        """Return the start of a sentence about the stop."""
        watched = f" ({self.watched})" if self.watched else ""
        return f"{self.by or 'Something that set should_stop'}{watched} stopped the run after round {rounds} of {num_rounds}"


def stoppers_of(trainer: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Return the callbacks and the module with their settings at the start of a fit."""
    stoppers: list[tuple[Any, dict[str, Any]]] = []
    for owner in (*trainer.callbacks, trainer.lightning_module):
        settings = RunSettings()
        settings.add("it", owner, True)
        stoppers.append((owner, settings.values))
    return stoppers


def stop_of(trainer: Any) -> Stop:
    """Return the callback or module whose method is setting `should_stop`."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        running = frame.f_locals.get("self")
        for owner, settings in trainer.stoppers:
            if owner is running:
                watched = getattr(owner, "watched", None) or getattr(owner, "monitor", None)
                by = "max_time" if owner is trainer.timer else type(owner).__name__
                return Stop(by, watched if isinstance(watched, str) else "", settings)
        frame = frame.f_back
    return Stop("")


def remaining_stop(trainer: Any, stop: Stop) -> Stop | None:
    """Return the stop of a checkpoint if it still holds; None if its callback or module is gone or has other settings.

    A timer is left out: it counts the time of the earlier rounds, and decides itself when the fit starts.
    """
    same = [
        (type(owner).__name__, settings) == (stop.by, stop.settings)
        for owner, settings in trainer.stoppers
        if not is_a(owner, Timer)
    ]
    return stop if not stop.by or any(same) else None

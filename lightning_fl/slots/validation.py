"""Validation of the server's model, as an algorithm sees it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from lightning_fl.slots.setting import Setting


class Validation(Protocol):
    """A validation or test of the server's model; see `lightning_fl.server.validation`.

    Attributes:
        setting: facts about the run; None outside a run.
        cohort_size: clients of a round, K; 0 outside a run.
    """

    setting: Setting | None
    cohort_size: int

    @property
    def module(self) -> Any:
        """Module that holds the server's model."""

    @property
    def owns(self) -> bool:
        """True if clients have personal parameters."""

    def clients(self, most: int | None = None) -> list[int]:
        """Return the indices of all clients, or of at most `most` clients drawn by seed and round."""

    def has_taken_part(self, client: int) -> bool:
        """True if a client has personal parameters of its own; until then it uses the common initial ones."""

    def averages(self, client: int | None = None) -> dict[str, float]:
        """Return the logged averages on the validation data, by name, with a client's personal parameters or the initial ones."""

    def local_averages(self, client: int) -> dict[str, float]:
        """Return the logged averages on a client's own validation samples, with its personal parameters; {} if it has none."""

    def macs(self, inside: Callable[[Any], AbstractContextManager[Any]]) -> int | None:
        """Return the multiply-accumulates of `forward` for one sample within `inside(module)`; None if they cannot be counted."""

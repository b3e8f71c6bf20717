"""What a method may measure of the server's model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from lightning_fl.slots.setting import Setting


class Validation(Protocol):
    """A validation or test of the server's model, see `lightning_fl.server.validation`.

    Attributes:
        setting: of the run, or None outside of one.
        cohort_size: clients of a round, K.
    """

    setting: Setting | None
    cohort_size: int

    @property
    def module(self) -> Any:
        """The module, with the server's model in it."""

    @property
    def owns(self) -> bool:
        """Whether clients own parts of the model."""

    def clients(self, most: int | None = None) -> list[int]:
        """All clients, or `most` of them, drawn by seed and round."""

    def has_taken_part(self, client: int) -> bool:
        """Whether a client has values of its own; until then it is like all others."""

    def averages(self, client: int | None = None) -> dict[str, float]:
        """What the module logs with what a client owns, or with what all began with, on the data of the validation."""

    def local_averages(self, client: int) -> dict[str, float]:
        """The same on the client's own validation part; {} if it has none."""

    def macs(self, inside: Callable[[Any], AbstractContextManager[Any]]) -> int | None:
        """Multiply-accumulates of `forward` for one sample inside a context; None where `forward` does not take one alone."""

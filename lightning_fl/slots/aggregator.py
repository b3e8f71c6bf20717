"""The slot in which uploads merge."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from lightning_fl.slots.exchange import Upload
from lightning_fl.slots.message import Message


class Aggregator(ABC):
    """How uploads merge.

    Where clients send parts of a model, the aggregator says what it divides by: the weights of all clients, so that what was
    not sent counts as no change, or of those that sent the coordinate (`Upload.sent`).
    """

    keeps_uploads = True
    """True if the accumulator keeps every upload; False if it is a dict of tensors that are summed over the processes."""

    def needs(self) -> frozenset[str]:
        """Names it needs in every upload besides `model` and `buffers`."""
        return frozenset()

    @abstractmethod
    def add(self, accumulator: dict[str, Any], upload: Upload) -> None:
        """Take one accepted upload into the accumulator ({} at first), in place."""

    @abstractmethod
    def finish(self, accumulator: dict[str, Any]) -> Message:
        """The merged message, in any floating dtype."""

"""Base class of methods whose server does not wait for the clients of a round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_fl.algorithms.method import Method
from lightning_fl.slots import Pace, Step


class Asynchronous(Method):
    """A method whose server updates the model without waiting for a round's clients."""

    def __init__(self, pace: Pace, method_steps: Sequence[Step], /, **slots: Any) -> None:
        """Fill the slots, and check that they need no round of clients.

        Args:
            pace: When the server makes its next model.
            method_steps: The method's own steps of the server.
        """
        super().__init__(method_steps, **slots)
        self.pace: Pace = pace
        self._check_pace()

    @property
    def buffer_size(self) -> int:
        """Number of uploads per update."""
        return self.pace.buffer_size

    @property
    def max_staleness(self) -> int | None:
        """Largest staleness of an upload that is accepted; None: no limit."""
        return self.pace.max_staleness

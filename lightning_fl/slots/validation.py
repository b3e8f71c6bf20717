"""Validation of the server's model, as an algorithm sees it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from lightning_fl.slots.round_context import RoundContext
from lightning_fl.slots.width import Width


class Validation(Protocol):
    """A validation or test of the server's model; see `lightning_fl.evaluation.validation`.

    Attributes:
        context: facts about the run; None outside a run.
        cohort_size: clients of a round, K; 0 outside a run.
    """

    context: RoundContext | None
    cohort_size: int

    @property
    def module(self) -> Any:
        """Module that holds the server's model."""

    @property
    def owns(self) -> bool:
        """True if clients own parts of the model, or models of their own."""

    def averages(self) -> dict[str, float]:
        """Return the logged averages of the server's model on the validation data, by name.

        Personal parameters have the values with which every client begins.
        """

    def client_means(self) -> dict[str, float]:
        """Return the means over clients of their logged averages, each measured with the model with which the client predicts.

        Names that end in `_local` have the means on the clients' own validation samples. Each mean is unweighted, over the
        clients that logged the name: a client without samples of some class may not log it, for example. The user may limit the
        clients (`trainer.validation_clients`).
        """

    def averages_at(self, width: Width) -> dict[str, float]:
        """Return the logged averages of a smaller network of the server's model, by name."""

    def macs(self, inside: Callable[[Any], AbstractContextManager[Any]]) -> int | None:
        """Return the multiply-accumulates of `forward` for one sample within `inside(module)`; None if they cannot be counted."""

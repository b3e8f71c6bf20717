"""Name of FedRep's phases in version 0.2, where they were a rule."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_fl.slots import Gradients, Rule


@dataclass(frozen=True)
class HeadThenBody(Rule):
    """Stand for `lightning_fl.personal.HeadThenBody`, by which `Algorithm` replaces it, with a warning.

    Attributes:
        head_epochs: as there.
        body_epochs: as there.
    """

    reads = Gradients.NONE
    head_epochs: int | None = None
    body_epochs: int = 1

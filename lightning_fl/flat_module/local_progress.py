"""Progress of a local training, as modules and schedules read it from the trainer."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_fl.errors import require
from lightning_fl.slots import LocalTraining


@dataclass
class LocalProgress:
    """Progress of the local training that the module makes, which modules and schedules read from the trainer.

    Attributes:
        local: the local training, which counts its optimiser steps; in a stack, that of the clients with the most steps.
        batches_in_pass: batches of one pass of the client, in a stack of the client with the most; infinity if unknown.
        planned_steps: optimiser steps of the whole local training; infinity if unknown.
        batch_index: index of the present batch, from 0.
        differs: True while clients of a stack that have different numbers of batches make a step.
        read: attribute of the trainer that was read meanwhile, although it is another one for each client; "" if none was.
    """

    local: LocalTraining
    batches_in_pass: int | float
    planned_steps: int | float
    batch_index: int = -1
    differs: bool = False
    read: str = ""

    def check_alike(self, name: str = "") -> None:
        """Raise `UserError` if an attribute of the trainer that is or was read is another one for each client of a stack."""
        if self.differs and name:
            self.read = name
        require(not self.read, f"trainer.{self.read} differs between clients that train at once.")

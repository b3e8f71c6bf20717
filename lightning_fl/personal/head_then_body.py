"""FedRep's phases (Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge

from lightning_fl.errors import require
from lightning_fl.slots import LocalTraining, Personal, Phase, RoundContext


@dataclass(frozen=True)
class HeadThenBody(Personal):
    """Train only the clients' own parameters for the first passes, then only the others, by the module's optimiser.

    Waiting parameters do not change, not even by weight decay or momentum. Buffers change in all passes. Other parts declare
    the parameters that clients own.

    Attributes:
        head_epochs: passes E_h ≥ 0 that train the clients' own parameters; all passes before the last E_b if None.
        body_epochs: passes E_b ≥ 1 at the end, which train the rest.
    """

    changeable = frozenset({"head_epochs", "body_epochs"})
    has_phases = True
    head_epochs: Annotated[int, Ge(0)] | None = None
    body_epochs: Annotated[int, Ge(1)] = 1

    def check(self, context: RoundContext) -> None:
        """Raise `UserError` unless the local training has as many passes as both phases."""
        head, body, local_epochs = self.head_epochs, self.body_epochs, context.local_epochs
        least, open_end = body + (1 if head is None else head), head is None
        actual = "local_steps instead" if local_epochs is None else local_epochs
        require(
            local_epochs is not None and (local_epochs >= least if open_end else local_epochs == least),
            f"a client trains its head for {'one epoch or more' if open_end else f'{head} epochs'} and then the body for {body}, "
            f"so local_epochs must be {least}{' or more' if open_end else ''}, got {actual}: "
            f"set --trainer.local_epochs {least}, or other head_epochs and body_epochs.",
        )

    def start(self, local: LocalTraining) -> None:
        """Count the steps of the first phase."""
        batches_per_epoch = torch.as_tensor(local.steps_in_pass).max().cpu()
        epochs = self.head_epochs
        if epochs is None:
            epochs = (local.context.local_epochs or 0) - self.body_epochs
        local.memory["head_steps"] = (epochs * batches_per_epoch).view(1)

    def phase(self, local: LocalTraining) -> Phase:
        """Train the clients' own parameters in the first phase."""
        return Phase.PERSONAL if local.num_steps < int(local.memory["head_steps"]) else Phase.SHARED

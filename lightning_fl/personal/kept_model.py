"""The trained model as a personal model that differs from the upload: pFedMe (Dinh et al., NeurIPS 2020)."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_fl.slots import OwnTraining, Personal


@dataclass(frozen=True)
class KeptModel(Personal):
    """Keep the model that the rule has trained, and predict with it, whatever the client uploads."""

    keeps_model = True

    def finish(self, training: OwnTraining) -> None:
        """Keep the trained model."""
        training.own = training.trained()

"""A model that each client trains alone, from round to round: the lower bound of a comparison."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_fl.slots import OwnTraining, Personal


@dataclass(frozen=True)
class TrainedAlone(Personal):
    """Begin each round at the client's model of its last round, and predict with it.

    It begins at the received model the first time.
    """

    keeps_model = True
    continues = True

    def finish(self, training: OwnTraining) -> None:
        """Keep the trained model."""
        training.own = training.trained()

"""Clients without samples beside the others, whose run must be the same as without them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_fl.data import Partition
from trials.commands import require_same
from trials.trial import Trial


@dataclass(frozen=True)
class Filled(Partition):
    """Divide the samples evenly, in their order, over all clients but the last `num_empty`, which get none."""

    needs_labels = False
    num_empty: int = 0

    def __call__(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Divide `labels` over the clients: see `Partition`."""
        parts = np.array_split(np.arange(len(labels)), num_clients - self.num_empty)
        return [*parts, *[parts[0][:0]] * self.num_empty]


def beside_empty_clients(trial: Trial) -> None:
    """Run it with the same samples, and with one to three clients more that have none."""
    num_filled, num_empty = 4 + trial.whole_numbers(2), 1 + trial.whole_numbers(3)
    others = [flag for flag in trial.flags if not flag.startswith(("--data.partition", "--data.num_clients"))]

    def set_empty(count: int) -> None:
        own = [
            "partition=trials.empty_clients.Filled",
            f"partition.num_empty={count}",
            f"num_clients={num_filled + count}",
        ]
        trial.flags = [*others, *(f"--data.{flag}" for flag in own)]

    set_empty(0)
    whole = trial.whole()
    if whole is None:
        return
    set_empty(num_empty)
    if trial.end(trial.start("beside")) == "completed":
        require_same(whole, trial.folder / "beside")
        trial.outcomes["the same beside empty clients"] += 1

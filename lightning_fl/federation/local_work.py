"""Length of the clients' local training in a round: batches, samples, and clients that run out of time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from lightning_fl.clients.local_schedule import LocalSchedule
from lightning_fl.state.run_state import Run


@dataclass(frozen=True)
class LocalWork:
    """Count what clients do in the present round.

    Attributes:
        schedule: length and batches of a client's local training in the round.
        run: says which clients straggle.
        sizes: number of samples of each client (N,).
    """

    schedule: LocalSchedule
    run: Run
    sizes: np.ndarray

    def num_batches(self, clients: Iterable[int]) -> int:
        """Return the number of batches of these clients' training."""
        return sum(self.schedule.num_batches(int(self.sizes[k]), self._steps_done(k)) for k in clients)

    def num_steps(self, clients: Iterable[int]) -> int:
        """Return the number of optimiser steps of these clients' training."""
        return sum(self.schedule.steps_done(self._in_pass(k), self.run, k) for k in clients)

    def num_samples(self, clients: Iterable[int]) -> int:
        """Return the number of samples in these batches."""
        return sum(self.schedule.num_samples(int(self.sizes[k]), self._steps_done(k)) for k in clients)

    def num_stragglers(self, clients: Iterable[int]) -> int | None:
        """Return the number of these clients that run out of time; None if clients never do."""
        if not self.schedule.straggler_rate:
            return None
        return sum(self._steps_done(k) != self.schedule.num_steps(self._in_pass(k)) for k in clients)

    def _steps_done(self, client: int) -> int | None:
        """Return the optimiser steps that a client makes in this round; None for all, if clients never run out of time."""
        if not self.schedule.straggler_rate:
            return None
        return self.schedule.steps_done(self._in_pass(client), self.run, client)

    def _in_pass(self, client: int) -> int:
        """Return the batches of one pass of a client."""
        return self.schedule.pass_batches(int(self.sizes[client]))

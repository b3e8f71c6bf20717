"""Length of the clients' local training in a round: batches, samples, and clients that run out of time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

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
        gradients_per_step: gradients of each step's batches.
        passes_at_received: passes over a client's samples for gradients at the received model, besides its steps.
        num_losses: forward passes over a client's samples for losses before its steps.
        share: returns the multiply-accumulates of a client's network as a share of those of the whole one; None: all train that.
    """

    schedule: LocalSchedule
    run: Run
    sizes: np.ndarray
    gradients_per_step: int = 1
    passes_at_received: int = 0
    num_losses: int = 0
    share: Callable[[int], float] | None = None

    def num_batches(self, clients: Iterable[int]) -> int:
        """Return the number of batches of these clients' training."""
        return sum(self.schedule.num_batches(int(self.sizes[k]), self._steps_done(k)) for k in clients)

    def num_steps(self, clients: Iterable[int]) -> int:
        """Return the number of optimiser steps of these clients' training."""
        return sum(self.schedule.steps_done(self._in_pass(k), self.run, k) for k in clients)

    def num_samples(self, clients: Iterable[int]) -> int:
        """Return the number of samples whose gradients these clients compute."""
        return sum(self._num_samples(int(self.sizes[k]), self._steps_done(k)) for k in clients)

    def share_of(self, client: int) -> float:
        """Return the multiply-accumulates of a client's network as a share of those of the whole one."""
        return 1.0 if self.share is None else self.share(client)

    def planned_samples(self, client: int) -> int:
        """Return the number of samples whose gradients a client computes if it does not stop early."""
        return self._num_samples(int(self.sizes[client]))

    def loss_samples(self, client: int) -> int:
        """Return the number of samples, once for each model, whose losses a client computes before its steps."""
        return self.num_losses * int(self.sizes[client])

    def mean_samples(self) -> Fraction:
        """Return the mean of these numbers over the clients with samples; 0 if there are none."""
        sizes, counts = np.unique(self.sizes[self.sizes > 0], return_counts=True)
        total = sum(
            self._num_samples(size) * count for size, count in zip(sizes.tolist(), counts.tolist(), strict=True)
        )
        return Fraction(total, max(1, int(counts.sum())))

    def counts(self, clients: Sequence[int], macs: int | None) -> dict[str, int]:
        """Return what these clients do, by column; `macs` are the multiply-accumulates of a sample with the whole network."""
        stragglers, num_samples = self.num_stragglers(clients), self.num_samples(clients)
        counts = {} if stragglers is None else {"clients/straggling": stragglers}
        counts["clients/samples"] = num_samples  # also of rejected clients, once for each gradient
        if self.num_losses:
            counts["clients/loss_samples"] = sum(map(self.loss_samples, clients))
        if self.share is not None and macs is not None:
            counts["clients/macs"] = sum(self.num_samples([k]) * round(self.share_of(k) * macs) for k in clients)
        return counts

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

    def _num_samples(self, size: int, num_steps: int | None = None) -> int:
        """Return the number of samples whose gradients a client with `size` samples computes in all steps, or some."""
        in_steps = self.gradients_per_step * self.schedule.num_samples(size, num_steps)
        return in_steps + self.passes_at_received * self.schedule.pass_samples(size)

    def _in_pass(self, client: int) -> int:
        """Return the batches of one pass of a client."""
        return self.schedule.pass_batches(int(self.sizes[client]))

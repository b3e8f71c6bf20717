"""The server's intake of uploads: it rejects some, and merges the accepted ones over all processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from lightning_fl.communication.link import Link
from lightning_fl.federation.loss_guard import LossGuard
from lightning_fl.federation.population import Cohort
from lightning_fl.processes import UploadMerge, gather_objects
from lightning_fl.slots import Aggregator, Message, Upload, is_finite
from lightning_fl.state.outcome import Outcome


class Intake:
    """Takes the uploads of one round, one by one.

    Attributes:
        outcome: outcome of the clients of this process; after `finish`, of all processes.
        shares_uploads: True if every process merges the uploads of all processes itself.
    """

    def __init__(
        self,
        aggregator: Aggregator,
        guard: LossGuard,
        fabric: Fabric,
        initial_loss: float | None,
        check_counters: Callable[[Mapping[str, Tensor]], None],
    ) -> None:
        self.outcome = Outcome()
        self._check_counters = check_counters
        self._aggregator, self._guard, self._fabric, self._initial_loss = aggregator, guard, fabric, initial_loss
        self._merge = UploadMerge(fabric, aggregator)
        self.shares_uploads = self._merge.shares_uploads

    def take(self, upload: Upload, link: Link) -> None:
        """Accept an upload, or reject one whose loss explodes, or which, or what its client would keep, is not finite."""
        result = upload.result
        self.outcome.num_steps += result.num_steps
        self.outcome.most_steps = max(self.outcome.most_steps, result.num_steps)
        memory = link.commit(result.client)
        # Check all: a codec may drop numbers that are not finite, and states and memories, which stay, would spoil later uploads.
        finite = is_finite(upload.message, result.message, result.owned, result.state, memory)
        if finite and not self._guard.rejects(result, self._initial_loss):
            self._check_counters(result.counters)
            self._merge.add(upload)
            self.outcome.accept(result, memory)

    def finish(self, cohort: Cohort, link: Link) -> tuple[Message, Outcome]:
        """Merge over all processes; returns the merged message, {} if no upload was accepted, and the outcome."""
        self.outcome.num_uploads = len(cohort.answering)
        self.outcome.bits = link.client_bits
        accumulator = self._merge.accumulate(cohort.answering)
        for other in _gather_others(self._fabric, self.outcome):
            self.outcome.add(other)
        return self._aggregator.finish(accumulator) if self.outcome.logs else {}, self.outcome


def _gather_others(fabric: Fabric, mine: Outcome) -> list[Outcome]:
    """Return the outcomes of all other processes, without states and memories, on this process's accelerator."""
    if fabric.world_size == 1:
        return []
    small = move_data_to_device(vars(replace(mine, states={}, memory={})), torch.device("cpu"))
    parts = gather_objects(fabric, small)
    others = [part for rank, part in enumerate(parts) if rank != fabric.global_rank]
    return [Outcome(**move_data_to_device(part, fabric.device)) for part in others]

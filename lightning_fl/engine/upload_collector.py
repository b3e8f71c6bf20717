"""The server's collector of uploads: it rejects some, and merges the accepted ones over all processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_fl.engine.engine import Engine
from lightning_fl.engine.population import Cohort
from lightning_fl.errors import require
from lightning_fl.flat_module.module_buffers import check_counters
from lightning_fl.flat_module.module_logs import LoggedNames, merged, on_host
from lightning_fl.link.link import Link
from lightning_fl.processes import Forms, UploadMerge, check_agreement, checksum, forms_of, gather_objects
from lightning_fl.slots import Merging, Message, RoundContext, Upload, check_tensors, is_finite
from lightning_fl.state.outcome import IN_MEMORY, Keep, Outcome


class UploadCollector:
    """Takes the uploads of one round, one by one.

    Attributes:
        outcome: outcome of the clients of this process; after `finish`, of all processes.
        merging: what the aggregator reports; after `finish`. It is skipped, too, if there is nothing to merge.
        shares_uploads: True if every process merges the uploads of all processes itself.
        known: how each process logs; after `finish`.
        forms: `forms_of` the new client states and of the new codec memories of each process; after `finish`.
        has_drifted: True if the processes have not begun the round with the same model; after `finish`.
    """

    def __init__(self, engine: Engine, context: RoundContext) -> None:
        """Create the collector of the present round, which has the context."""
        run, self._fabric = engine.run, engine.flat_module.fabric
        self.outcome, self.merging = Outcome(), Merging(context)
        self.known: list[LoggedNames] | None = None
        self.forms: tuple[Sequence[Forms], Sequence[Forms]] | None = None
        self.has_drifted = False
        self._engine, self._aggregator = engine, engine.roles.aggregator(context)
        self._keep: Keep = (run.clients.ahead, run.client_memory.ahead) if self._fabric.world_size == 1 else IN_MEMORY
        self._merge = UploadMerge(self._fabric, self._aggregator)  # until `finish`
        self.shares_uploads = self._merge.shares_uploads

    def take(self, upload: Upload, link: Link) -> None:
        """Accept an upload, or reject one that is not finite, of which what its client keeps is not finite, or by role."""
        result = upload.result
        self.outcome.num_steps += result.num_steps
        self.outcome.most_steps = max(self.outcome.most_steps, result.num_steps)
        self.outcome.num_attackers += int(result.attacking or 0)
        memory = link.commit(result.client)
        # Check all: a codec may drop numbers that are not finite, and states and memories, which stay, would spoil later uploads.
        finite = is_finite(upload.message, result.message, result.owned, result.state, memory)
        reason = self._engine.roles.accept(upload) if finite else "not finite"
        if reason:
            self.outcome.rejected[reason] += 1
            return
        check_counters(self._engine.flat_module.module, self._engine.run.counters, result.counters)
        self._merge.add(upload)
        if result.client in self.outcome.logs:  # of a client that has sent an earlier upload of this update
            result.logs = merged([self.outcome.logs[result.client], result.logs])
        self.outcome.accept(result, memory, self._engine.run.staging, self._keep)
        if result.client not in link.senders and not any(bool(entry.any()) for entry in upload.message.values()):
            self.outcome.silent |= {result.client}

    def finish(self, cohort: Cohort, link: Link) -> tuple[Message, Outcome]:
        """Merge over all processes, which exchange one object and one vector.

        Returns:
            The merged message, {} if there is nothing to merge or the sum is lost, and the outcome.

        Raises:
            UserError: processes have pruned the model differently.
        """
        self.outcome.num_uploads = len(cohort.answering)
        self.outcome.bits, self.outcome.bits_by_client = link.client_bits, link.bits_by_client
        sizes: Sequence[Mapping[str, int]] = ()
        if self._fabric.world_size > 1:
            sizes = self._exchange()
        accumulator = self._merge.accumulate(cohort.answering, sizes)
        del self._merge
        if link.num_lost or (link.only_sum is not None and link.only_sum.is_lost(self.outcome.num_accepted)):
            self.outcome.lose(link.num_lost or self.outcome.num_accepted)
            accumulator = {}
        if not self.outcome.logs and not self._aggregator.merges_none:
            self.merging.is_skipped = True
            return {}, self.outcome
        merged = self._aggregator.combine(accumulator, self.merging)
        if not self.merging.is_skipped:
            self._check(merged)
        return merged, self.outcome

    def _check(self, merged: Message) -> None:
        """Raise `UserError` unless the aggregator has returned tensors, and those of the model with its size."""
        run, method = self._engine.run, self._engine.algorithm
        name = type(method.aggregator).__name__
        check_tensors(merged, f"What {name} returns")
        for entry, present in (("model", run.params), ("buffers", run.buffers)):
            require(
                entry not in merged or merged[entry].shape == present.shape,
                f"{name} must return {entry!r} of shape {tuple(present.shape)}, got {tuple(merged.get(entry, present).shape)}.",
            )

    def _exchange(self) -> Sequence[Mapping[str, int]]:
        """Exchange all that is small, in one object; returns the sizes of the accumulators."""
        outcome = self.outcome
        outcome.logs = dict(zip(outcome.logs, on_host(list(outcome.logs.values())), strict=True))
        names, counts = outcome.counts()
        mine = {
            "outcome": vars(replace(outcome, states={}, memory={}, counters={})),
            "counters": (names, counts),
            "sizes": self._merge.sizes,
            "known": self._engine.flat_module.logs.knowledge(),
            "states": forms_of(outcome.states),
            "memory": forms_of(outcome.memory),
            "model": checksum(self._engine.run.params),
            "prunings": self._engine.prunings,
        }
        parts = gather_objects(self._fabric, mine)
        check_agreement([part["prunings"] for part in parts])
        for rank, part in enumerate(parts):
            if rank != self._fabric.global_rank:
                other = Outcome(**part["outcome"])
                forms, values = part["counters"]
                other.raise_counts(forms, values, self._fabric.device)
                outcome.add(other)
        self.known = [part["known"] for part in parts]
        self.forms = [part["states"] for part in parts], [part["memory"] for part in parts]
        self.has_drifted = len({part["model"] for part in parts}) > 1
        return [part["sizes"] for part in parts]

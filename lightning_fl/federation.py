"""The round, as the field draws it: cohort, download, local training, upload, aggregation, server steps."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
import torch

from lightning_fl.algorithms import Algorithm
from lightning_fl.clock import SimulatedClock
from lightning_fl.data import FederatedDataModule
from lightning_fl.link import Link
from lightning_fl.run import COHORT, DROPOUT, Run
from lightning_fl.runners import LocalPlan, Outcome, gather, merge, serial, share_of
from lightning_fl.slots import Message, ServerTurn, Setting
from lightning_fl.worker import Worker


@dataclass
class Federation:
    """Clients and server of one run.

    Attributes:
        algorithm: the method.
        worker: the module that the clients train.
        data: the clients' samples.
        run: all that changes.
        plan: how long a client trains.
        clock: the simulated time.
        eligible: clients that have samples.
        cohort_size: clients selected in a round, K.
        num_rounds: rounds of the run.
        dropout_rate: probability that a selected client never answers.
        macs: multiply-accumulates of one sample's forward pass, if they can be counted.
        on_upload: called after each upload with the client, its place and the number of uploads of the round.
    """

    algorithm: Algorithm
    worker: Worker
    data: FederatedDataModule
    run: Run
    plan: LocalPlan
    clock: SimulatedClock
    eligible: np.ndarray
    cohort_size: int
    num_rounds: int
    dropout_rate: float
    macs: int | None
    on_upload: Callable[[int, int, int], None]

    def train_round(self) -> dict[str, float]:
        """One round; returns its numbers under the names of `metrics.csv`."""
        run, algorithm, fabric = self.run, self.algorithm, self.worker.fabric
        run.ledger.open_round()
        cohort = self._select_cohort()
        arriving = self._arriving(cohort)

        setting = Setting(run.layout, run.buffer_layout, self.data.num_clients, run.round, self.num_rounds)
        link = Link(setting, algorithm.uplink, algorithm.downlink, run.ledger, run.client_memory, run.server_memory)
        received = {"buffers": run.buffers, **link.broadcast(cohort, self._broadcast_message())}

        booked = deepcopy(run.ledger.round_bits)
        mine = share_of(arriving, self.data.client_sizes, fabric.global_rank, fabric.world_size)
        results = serial(self.worker, algorithm.rule, setting, received, mine, self.data, self.plan, run)

        accumulator: dict[str, Any] = {}
        outcome = Outcome()
        for place, upload in enumerate(algorithm.exchange.collect(results, link), start=1):
            result = upload.result
            outcome.num_steps += result.num_steps
            if _is_finite(upload.message, result.message):
                algorithm.aggregator.add(accumulator, upload)
                outcome.accept(result, link.commit(result.client))
            self.on_upload(result.client, place, len(mine))
        link.close_round()

        outcome.bits = run.ledger.since(booked)
        accumulator, everywhere = merge(fabric, algorithm.aggregator, accumulator), gather(fabric, outcome)
        self._take_in(outcome, everywhere)
        metrics: dict[str, float] = {}
        if everywhere.logs:
            dtypes = {"buffers": run.buffers.dtype}
            merged = {
                name: x.to(dtypes.get(name, run.params.dtype))
                for name, x in algorithm.aggregator.finish(accumulator).items()
            }
            turn = ServerTurn(setting, run.round, run.params, run.buffers, merged, run.params, run.buffers)
            for key, step in zip(algorithm.step_names(), algorithm.steps, strict=True):
                run.server[key] = step(turn, run.server[key])
            run.params, run.buffers, metrics = turn.proposal, turn.proposed_buffers, turn.metrics
        record = self._record(cohort, arriving, everywhere) | metrics
        run.round += 1
        return record

    def _take_in(self, mine: Outcome, everywhere: Outcome) -> None:
        """Make the run know what the clients of all ranks did; the ledger knows of this rank's already."""
        run = self.run
        run.num_steps += everywhere.num_steps
        run.clients |= everywhere.states
        run.client_memory |= everywhere.memory
        run.counters |= {
            name: torch.maximum(run.counters[name], x.to(run.params.device)) for name, x in everywhere.counters.items()
        }
        run.ledger.add(everywhere.bits)
        run.ledger.add({way: {kind: -bits for kind, bits in kinds.items()} for way, kinds in mine.bits.items()})

    def num_batches(self) -> int:
        """Batches of the round that comes next, over all clients that will answer and that this rank trains."""
        arriving = self._arriving(self._select_cohort())
        fabric, sizes = self.worker.fabric, self.data.client_sizes
        mine = share_of(arriving, sizes, fabric.global_rank, fabric.world_size)
        return sum(self.plan.num_batches(int(sizes[client]), self.worker.skips_single_samples) for client in mine)

    def _select_cohort(self) -> list[int]:
        """K clients with samples, uniformly without replacement, by seed and round alone."""
        chosen = self.run.random(COHORT).choice(self.eligible, self.cohort_size, replace=False)
        return [int(client) for client in chosen]

    def _arriving(self, cohort: list[int]) -> list[int]:
        """The clients of the cohort that will answer; the others receive the model and drop out."""
        if not self.dropout_rate:
            return cohort
        return [client for client in cohort if self.run.random(DROPOUT, client).random() >= self.dropout_rate]

    def _broadcast_message(self) -> Message:
        message = {"model": self.run.params, **self.algorithm.share(self.run.server)}
        if self.worker.buffer_layout.names:
            message["buffers"] = self.run.buffers
        return message

    def _record(self, cohort: list[int], arriving: list[int], outcome: Outcome) -> dict[str, float]:
        run, ledger = self.run, self.run.ledger
        logs = [outcome.logs[client] for client in arriving if client in outcome.logs]
        most = int(self.data.client_sizes[arriving].max(initial=0))
        num_samples = self.plan.num_samples(most, self.worker.skips_single_samples) if most else 0
        macs = (self.macs or 0) * num_samples
        run.simulated_seconds += self.clock.seconds(ledger.bits("up"), ledger.bits("down"), macs)
        return {
            "round": run.round,
            **self.worker.logs.averages(logs),
            "comm/uplink_bits": ledger.bits("up"),
            "comm/downlink_bits": ledger.bits("down"),
            "comm/total_uplink_bytes": ledger.total_bytes("up"),
            "comm/total_downlink_bytes": ledger.total_bytes("down"),
            "clients/selected": len(cohort),
            "clients/accepted": len(outcome.logs),
            "clients/rejected": len(arriving) - len(outcome.logs),
            "clients/dropped": len(cohort) - len(arriving),
            "model/parameters": sum(parameter.numel() for parameter in self.worker.module.parameters()),
            **({"model/macs": self.macs} if self.macs is not None else {}),
        }


def _is_finite(*messages: Message) -> bool:
    """Whether no number of an upload is NaN or infinite, as it arrived and as it was sent: a codec may leave such numbers out.

    A finite sum says so at once.
    """
    vectors = {id(x): x for message in messages for x in message.values()}.values()
    return all(isfinite(float(x.sum())) or bool(torch.isfinite(x).all()) for x in vectors)

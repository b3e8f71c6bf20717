"""The round, as the field draws it: cohort, download, local training, upload, aggregation, server steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fl.algorithms import Algorithm
from lightning_fl.clients.choose_runner import Runner
from lightning_fl.clients.client_job import ClientJob
from lightning_fl.clients.flat_module import FlatModule
from lightning_fl.clients.local_schedule import LocalSchedule
from lightning_fl.clients.serial import serial
from lightning_fl.codecs import Dense
from lightning_fl.communication.ledger import Ledger
from lightning_fl.communication.link import Link
from lightning_fl.communication.simulated_clock import SimulatedClock
from lightning_fl.data import FederatedDataModule, Source
from lightning_fl.federation.callback_queries import CallbackQueries
from lightning_fl.federation.loss_guard import LossGuard
from lightning_fl.federation.outcome import Outcome, gather_others
from lightning_fl.processes import gather_by_client, mean, merge, share_of, share_states, share_uploads
from lightning_fl.pruning import Plan
from lightning_fl.server.pretraining import ModuleLearner
from lightning_fl.server.server_side import ServerSide
from lightning_fl.slots import Message, PruningTurn, Result, ServerTurn, Setting, SetupTurn, State, Upload, is_finite
from lightning_fl.state.run_state import COHORT, DROPOUT, EXCHANGE, SETUP, Run
from lightning_fl.vectors.layer_groups import Group


@dataclass
class Federation:
    """Clients and server of one run.

    Attributes:
        algorithm: the method.
        flat_module: the module that the clients train.
        data: the clients' samples.
        run: all that changes.
        groups: the layers of the network.
        schedule: how long a client trains.
        clock: the simulated time.
        guard: what is thrown away because the loss explodes.
        eligible: clients that have samples.
        cohort_size: clients selected in a round, K.
        num_rounds: rounds of the run.
        dropout_rate: probability that a selected client never answers.
        macs: multiply-accumulates of one sample's forward pass, if they can be counted.
        runner: trains the clients.
        on_upload: called after each upload with the client, its place and the number of uploads of the round.
        on_prepared: called likewise for each client that has done its work before the first round.
    """

    algorithm: Algorithm
    flat_module: FlatModule
    data: FederatedDataModule
    run: Run
    groups: tuple[Group, ...]
    schedule: LocalSchedule
    clock: SimulatedClock
    guard: LossGuard
    eligible: np.ndarray
    cohort_size: int
    num_rounds: int
    dropout_rate: float
    macs: int | None
    on_upload: Callable[[int, int, int], None]
    on_prepared: Callable[[int, int, int], None]
    runner: Runner = serial
    _queries: CallbackQueries = field(default_factory=CallbackQueries, init=False, repr=False)

    @property
    def setting(self) -> Setting:
        """What every part may know of the run, as it is now."""
        run = self.run
        setting = Setting(
            run.layout,
            run.buffer_layout,
            self.data.num_clients,
            self.groups,
            round=run.round,
            num_rounds=self.num_rounds,
            momentum=self.flat_module.optimizer.momentum,
        )
        return setting if run.unpruned is None else replace(setting, unpruned=run.unpruned)

    @property
    def schedule_of_round(self) -> LocalSchedule:
        """How long a client trains in the round under way, and in what batches."""
        return self.schedule.in_round(self.algorithm.rule, self.setting)

    def set_mask(self, mask: Tensor) -> None:
        """Keep these parameters (d,) and no others, everywhere."""
        self.run.set_mask(mask, self.algorithm.rule.unmasked_state)
        self.flat_module.fabric.barrier()  # where states are files that one process of a machine writes, they are there for all

    @property
    def server(self) -> ServerSide:
        """The server's own samples, and training on them."""
        return ServerSide(self.flat_module, self.data, self.run, self.schedule, self.setting)

    def prepare(self) -> None:
        """The turn before the first round, whose transfers are set-up."""
        run = self.run
        link = Link(self.setting, Dense(), Dense(), run.ledger, {}, {}, random=partial(run.random, SETUP))
        learner = ModuleLearner(self.flat_module, self.data, run, self.eligible, self.on_prepared)
        turn = SetupTurn(self.setting, self.data, link, self.server, learner, run.params, run.buffers)
        self.algorithm.prepare(turn)
        run.params, run.buffers = self._of_rank_zero(turn.params), self._of_rank_zero(turn.buffers)
        if turn.mask is not None:
            self.set_mask(turn.mask)
        run.ledger.close_setup()

    def broadcast_pruning(self, plan: Plan) -> None:
        """What crosses because the network is about to be cut; it belongs to the round that comes next."""
        run, booked = self.run, Ledger()
        link = Link(self.setting, Dense(), Dense(), booked, {}, {})
        self.algorithm.broadcast_pruning(
            PruningTurn(plan, link, self.setting, self._select_cohort(), run.params, run.buffers)
        )
        run.ledger.add_ahead(booked.round_bits)

    def sources(self) -> list[Source]:
        """Everyone who holds training samples, for callbacks that ask about the model; see `charge_queries`."""
        return [replace(source, on_answer=self._record_query) for source in self.data.sources()]

    def _record_query(self, client: int, count: int) -> None:
        self._queries.record(client, count, self._broadcast_message())

    def charge_queries(self) -> None:
        """What crosses because clients have been asked; it belongs to the round that comes next."""
        if self._queries.counts:
            self._queries.charge(self.run.ledger, self.setting, set(self._select_cohort()))

    def train_round(self) -> dict[str, float]:
        """One round; returns its numbers under the names of `metrics.csv`."""
        run, algorithm, fabric = self.run, self.algorithm, self.flat_module.fabric
        run.open_round()
        cohort = self._select_cohort()
        arriving = self._arriving(cohort)
        if run.initial_loss is None and self.guard.knows_initial_loss and self.server.num_samples:
            run.initial_loss = self.server.loss(run.params, run.buffers)

        setting, shared = self.setting, algorithm.share(run.server)
        link = Link(
            setting,
            algorithm.uplink,
            algorithm.downlink,
            run.ledger,
            run.client_memory,
            run.server_memory,
            gather=partial(gather_by_client, fabric, arriving),
            random=partial(run.random, EXCHANGE),
            mean=partial(mean, fabric, algorithm.aggregator, arriving),
        )
        recipients = algorithm.exchange.recipients(cohort, setting)
        self._send_mask(link, recipients)
        received = {"buffers": run.buffers, **link.broadcast(recipients, self._broadcast_message() | shared)}

        booked = deepcopy(run.ledger.round_bits)
        mine: Sequence[int] = share_of(arriving, self.data.client_sizes, fabric.global_rank, fabric.world_size)
        job = ClientJob(algorithm.rule, setting, received, self.schedule_of_round, run)
        job, mine = algorithm.exchange.before_training(job, mine, self._train, link)
        results = self._train(job, mine)

        accumulator: dict[str, Any] = {}
        members: list[Upload] = []
        outcome = Outcome()
        for position, upload in enumerate(algorithm.exchange.collect(results, link), start=1):
            result = upload.result
            outcome.num_steps += result.num_steps
            # A codec may leave out what is not finite, and what a client owns is not sent at all.
            is_good = is_finite(upload.message, result.message, result.owned)
            if is_good and not self.guard.rejects(result, run.initial_loss):
                if self._shares_uploads:
                    members.append(upload)
                else:
                    algorithm.aggregator.add(accumulator, upload)
                outcome.accept(result, link.commit(result.client))
            self.on_upload(result.client, position, len(mine))
        link.close_round()

        outcome.bits = run.ledger.since(booked)
        for upload in share_uploads(fabric, members, arriving) if self._shares_uploads else ():
            algorithm.aggregator.add(accumulator, upload)
        accumulator = merge(fabric, algorithm.aggregator, accumulator)
        for other in gather_others(fabric, outcome):
            outcome.add(other)
            run.ledger.add(other.bits)
        run.num_steps += outcome.num_steps
        record = self._record(cohort, arriving, outcome)
        if outcome.logs:
            before = {name: job.received[name] for name in algorithm.exchange.provides if name in job.received}
            merged = algorithm.aggregator.finish(accumulator) | before
            record |= self._finish_round(setting, outcome, shared, merged)
            if run.initial_loss is None and self.guard.knows_initial_loss:
                run.initial_loss = record.get("train/loss")
        run.round += 1
        return record

    def _train(self, job: ClientJob, clients: Sequence[int]) -> Iterator[Result]:
        """Train clients of this process."""
        return self.runner(self.flat_module, job, clients, self.data)

    def _finish_round(self, setting: Setting, outcome: Outcome, shared: Message, merged: Message) -> dict[str, float]:
        """The server's steps, and what they and the clients leave behind unless that is undone; returns the steps' numbers."""
        run, counters = self.run, dict(self.run.counters)
        run.counters |= {
            name: torch.maximum(run.counters[name], x.to(run.params.device)) for name, x in outcome.counters.items()
        }
        turn, states = self._server_turn(setting, list(outcome.logs), shared, merged)
        if self.guard.undoes(turn, run.initial_loss):
            run.counters = counters
            return turn.metrics
        run.server = states
        run.params, run.buffers = turn.proposal, turn.proposed_buffers
        if self._shares_uploads:  # every rank has learned from them, and rounding must not lead them apart
            run.params, run.buffers = self._of_rank_zero(run.params), self._of_rank_zero(run.buffers)
        if setting.unpruned is not None:
            run.params = run.params.clone().mul_(setting.unpruned.factors)  # whatever a step may have added
        self._store_client_states(outcome)
        if turn.mask is not None and turn.mask is not run.mask:
            self.set_mask(turn.mask)
        return turn.metrics

    def _server_turn(
        self, setting: Setting, clients: list[int], shared: Message, merged: Message
    ) -> tuple[ServerTurn, dict[str, State]]:
        """The chain of steps on what the accepted clients sent; returns what they propose and their new states."""
        run, algorithm = self.run, self.algorithm
        dtypes = {"buffers": run.buffers.dtype}
        merged = {name: x.to(dtypes.get(name, run.params.dtype)) for name, x in merged.items()}
        turn = ServerTurn(
            setting=setting,
            server=self.server,
            round=run.round,
            clients=sorted(clients),
            num_samples=float(self.data.client_sizes[clients].sum()),
            shared=shared,
            params=run.params,
            buffers=run.buffers,
            merged=merged,
            proposal=run.params,
            proposed_buffers=run.buffers,
            mask=run.mask,
        )
        states = {}
        for position, (key, step) in enumerate(zip(algorithm.step_names(), algorithm.steps, strict=True)):
            turn, states[key] = self.guard.take_step(position, step, turn, run.server[key])
        return turn, states

    def _send_mask(self, link: Link, recipients: Sequence[int]) -> None:
        """Send the mask, d bits, to those who take part for the first time since it changed."""
        run = self.run
        if run.mask is None:
            return
        if link.downlink.needs_every_client():
            recipients = range(self.data.num_clients)
        link.send_to_all(
            [client for client in recipients if client not in run.clients_with_mask], {"mask/kept": run.mask}
        )
        run.clients_with_mask.update(recipients)

    def _store_client_states(self, outcome: Outcome) -> None:
        """Make the run know what the clients of all ranks keep."""
        run, fabric = self.run, self.flat_module.fabric
        for kept, new in ((run.clients, outcome.states), (run.client_memory, outcome.memory)):
            for client, state in share_states(fabric, new):
                kept[client] = state
        fabric.barrier()  # where states are files that one process of a machine writes, they are there for all

    @property
    def _shares_uploads(self) -> bool:
        """Whether every rank needs the uploads of all."""
        return self.flat_module.fabric.world_size > 1 and self.algorithm.aggregator.reduction == "members"

    def _of_rank_zero(self, x: Tensor) -> Tensor:
        return self.flat_module.fabric.broadcast(x).to(x.device)

    def num_batches(self) -> int:
        """Batches of the round that comes next, over all clients that will answer and that this rank trains."""
        arriving = self._arriving(self._select_cohort())
        fabric, sizes = self.flat_module.fabric, self.data.client_sizes
        mine = share_of(arriving, sizes, fabric.global_rank, fabric.world_size)
        schedule, skips = self.schedule_of_round, self.flat_module.skips_single_samples
        return sum(schedule.num_batches(int(sizes[client]), skips, self._steps(client)[0]) for client in mine)

    def _select_cohort(self) -> list[int]:
        """K clients with samples, uniformly without replacement, by seed and round alone."""
        size = self.cohort_size if self.algorithm.trains_in_rounds else 0
        chosen = self.run.random(COHORT).choice(self.eligible, size, replace=False)
        return [int(client) for client in chosen]

    def _arriving(self, cohort: list[int]) -> list[int]:
        """The clients of the cohort that will answer; the others receive the model and drop out."""
        if not self.dropout_rate:
            return cohort
        return [client for client in cohort if self.run.random(DROPOUT, client).random() >= self.dropout_rate]

    def _steps(self, client: int) -> tuple[int, int]:
        """Optimiser steps that a client makes in this round, and those that it would make if it had the time."""
        schedule = self.schedule_of_round
        in_pass = schedule.pass_batches(int(self.data.client_sizes[client]), self.flat_module.skips_single_samples)
        return schedule.steps_done(in_pass, self.run, client), schedule.num_steps(in_pass)

    def _num_stragglers(self, arriving: list[int]) -> int:
        """Clients whose time is up before they are done."""
        return sum(done < planned for done, planned in map(self._steps, arriving))

    def _broadcast_message(self) -> Message:
        message = {"model": self.run.params}
        if self.flat_module.buffer_layout.names:
            message["buffers"] = self.run.buffers
        return message

    def _record(self, cohort: list[int], arriving: list[int], outcome: Outcome) -> dict[str, float]:
        run, ledger = self.run, self.run.ledger
        logs = [outcome.logs[client] for client in arriving if client in outcome.logs]
        most = int(self.data.client_sizes[arriving].max(initial=0))
        num_samples = self.schedule_of_round.num_samples(most, self.flat_module.skips_single_samples) if most else 0
        macs = (self.macs or 0) * num_samples
        share = self.macs / run.macs_at_start if self.macs and run.macs_at_start else 1.0
        run.simulated_seconds += self.clock.seconds(ledger.bits("up"), ledger.bits("down"), macs, share)
        run.count_uploads(len(arriving), len(outcome.logs))
        return {
            "round": run.round,
            **self.flat_module.logs.averages(logs),
            "comm/uplink_bits": ledger.bits("up"),
            "comm/downlink_bits": ledger.bits("down"),
            **{f"comm/setup_{way}link_bits": bits for way, bits in ledger.setup().items()},
            "comm/total_uplink_bytes": ledger.total_bytes("up"),
            "comm/total_downlink_bytes": ledger.total_bytes("down"),
            "clients/selected": len(cohort),
            "clients/accepted": len(outcome.logs),
            "clients/rejected": len(arriving) - len(outcome.logs),
            "clients/dropped": len(cohort) - len(arriving),
            **({"clients/straggling": self._num_stragglers(arriving)} if self.schedule.straggler_rate else {}),
            "model/parameters": sum(parameter.numel() for parameter in self.flat_module.module.parameters()),
            **({"model/macs": self.macs} if self.macs is not None else {}),
        }

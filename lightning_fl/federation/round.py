"""One round of federated learning: cohort, broadcast, local training, upload, aggregation, server steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_fl.algorithms import Algorithm
from lightning_fl.clients.choose_runner import Runner
from lightning_fl.clients.client_job import ClientJob
from lightning_fl.clients.device_group import DeviceGroup
from lightning_fl.clients.local_schedule import LocalSchedule
from lightning_fl.clients.serial import serial
from lightning_fl.codecs import Dense
from lightning_fl.communication.link import Link
from lightning_fl.communication.messages import RoundObserver
from lightning_fl.communication.secure_sums import SecureAggregation, SecureSum
from lightning_fl.communication.simulated_clock import SimulatedClock
from lightning_fl.data import FederatedDataModule, Source
from lightning_fl.errors import require
from lightning_fl.federation.attackers import Attackers
from lightning_fl.federation.callback_queries import CallbackQueries
from lightning_fl.federation.client_devices import ClientDevices, ClientTimes, RoundTimes, in_time
from lightning_fl.federation.intake import Intake
from lightning_fl.federation.local_work import LocalWork
from lightning_fl.federation.loss_guard import LossGuard
from lightning_fl.federation.planned_bits import planned_bits
from lightning_fl.federation.population import Cohort, Population
from lightning_fl.federation.round_record import round_record
from lightning_fl.federation.server_steps import take_steps
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.flat_module.module_buffers import check_counters
from lightning_fl.outputs.losses import rejection_reasons, say_lost
from lightning_fl.processes import gather_by_client, mean, of_rank_zero, share_states
from lightning_fl.pruning import Plan
from lightning_fl.server.network import Network
from lightning_fl.server.pretraining import ModuleLearner
from lightning_fl.server.server_side import ServerSide
from lightning_fl.slots import (
    SENT,
    Draw,
    Message,
    PruningTurn,
    Result,
    RoundContext,
    ServerTurn,
    SetupTurn,
    Upload,
    is_finite,
)
from lightning_fl.state.outcome import Outcome, Proposal, added_by_client, maximum
from lightning_fl.state.run_state import CODEC, EXCHANGE, SETUP, Run
from lightning_fl.vectors.pieces import converted, narrowed


@dataclass
class Federation:
    """Clients and server of one run.

    Attributes:
        algorithm: filled slots that the round calls.
        flat_module: module that clients and server train.
        data: samples of clients and server.
        run: state that changes from round to round.
        population: draws the cohorts.
        network: layers and size of the module; replaced when the module is pruned.
        schedule: length and batches of a client's local training.
        num_rounds: rounds of the run.
        clock: simulates the time of a round.
        client_devices: devices of the clients, if the clock is one of clients; else None.
        deadline: seconds after which a round closes; None for never.
        guard: rejects uploads, and undoes steps or rounds, whose loss explodes.
        secure_aggregation: lets the server see only sums over the clients, at a cost; None if it sees their messages.
        observer: is told of each upload and message.
        accuracy: logged name that the user has given as the accuracy for methods that need one; None to find it.
        attackers: lets clients attack; None if nobody does.
        runner: trains clients on a job.
        group: processes that train each client together with this one; None if this one trains its clients alone.
        prunings: checksum of the prunings of the module in this process since the run began or was resumed.
        most_setup_steps: optimiser steps of each training of clients before the first round at most; None for all.
        setup_steps_left_out: steps that `most_setup_steps` has left out.
    """

    algorithm: Algorithm
    flat_module: FlatModule
    data: FederatedDataModule
    run: Run
    population: Population
    network: Network
    schedule: LocalSchedule
    num_rounds: int
    clock: SimulatedClock
    guard: LossGuard
    client_devices: ClientDevices | None = None
    deadline: float | None = None
    secure_aggregation: SecureAggregation | None = None
    observer: RoundObserver = field(default_factory=RoundObserver)
    accuracy: str | None = None
    attackers: Attackers | None = None
    runner: Runner = serial
    group: DeviceGroup | None = None
    prunings: int = 0
    most_setup_steps: int | None = None
    setup_steps_left_out: int = field(default=0, init=False)
    _queries: CallbackQueries = field(default_factory=CallbackQueries, init=False, repr=False)
    _drawn: tuple[tuple[object, ...], Cohort] | None = field(default=None, init=False, repr=False)
    _planned_seconds: dict[int, float] = field(default_factory=dict, init=False, repr=False)
    _has_drifted: bool = field(default=False, init=False, repr=False)
    _warned: bool = field(default=False, init=False, repr=False)
    _warned_of_lost_sum: bool = field(default=False, init=False, repr=False)
    _warned_of_deadline: bool = field(default=False, init=False, repr=False)
    _warned_without_loss: bool = field(default=False, init=False, repr=False)

    def train_round(self) -> dict[str, float]:
        """Train one round; returns its numbers by their column names in `metrics.csv`."""
        run, method, context = self.run, self.algorithm, self.context
        cohort, work = self.cohort, self.work
        server = self._server_side(context)
        guard = self.guard.in_round(run, server)
        link, shared = self._open_link(cohort, context), method.share(run.server)
        module, fabric = self.flat_module.module, self.flat_module.fabric
        check = partial(check_counters, module, run.counters)
        logs, staging = self.flat_module.logs, run.staging
        keep = (run.clients.ahead, run.client_memory.ahead) if fabric.world_size == 1 else None
        intake = Intake(method.aggregator, guard, fabric, check, logs, staging, method.pace, keep)
        provided = self._take_uploads(self._broadcast(link, cohort.selected, shared, work), cohort, link, intake)
        merged, outcome = intake.finish(cohort, link, run.params, self.prunings)
        self._say_if_none_accepted(outcome)
        self._say_if_lost(outcome, link)
        self._say_if_all_late(cohort)
        self._warn_without_loss(outcome, work)
        client_logs = [outcome.logs[k] for k in dict.fromkeys(cohort.answering) if k in outcome.logs]
        averages = self.flat_module.logs.averages(client_logs, intake.known)

        stragglers = work.num_stragglers(cohort.answering)
        num_samples = work.num_samples(cohort.answering) * method.num_models
        times, attacks = self._times(cohort, work, outcome, link), self._attack_columns(cohort)
        run.book(outcome, link, partial(self._seconds, cohort, work, times), guard.later_initial_loss(averages))
        proposal = None
        if outcome.logs and not intake.is_skipped:
            turn = self._server_turn(context, server, outcome, shared, merged, provided)
            turn.uploaders = intake.uploaders
            del merged, provided  # so that steps may let go of what they have used
            proposal = take_steps(method, guard, turn, run.server)
        self._warn_if_nothing_changes(proposal, outcome)
        self._commit(proposal, outcome, intake)
        reported = intake.metrics | ({} if proposal is None else proposal.metrics)
        columns = ({} if times is None else times.columns()) | attacks
        sees_sums = link.secure_sum is not None
        return round_record(
            run, cohort, outcome, self.network, averages, num_samples, stragglers, reported, columns, sees_sums
        )

    @property
    def context(self) -> RoundContext:
        """Facts about the run that every part may use, in the present round."""
        run = self.run
        return RoundContext(
            run.layout,
            run.buffer_layout,
            self.data.num_clients,
            self.network.groups,
            round=run.round,
            num_rounds=self.num_rounds,
            momentum=self.flat_module.optimizer.momentum,
            unpruned=run.unpruned,
            local_epochs=self.schedule.epochs,
            learning_rate=self.flat_module.optimizer.largest_rate,
            dtype=run.params.dtype,
            draw=Draw((run.seed, run.round, CODEC), self.data.num_clients),
            encoded=self.algorithm.encoded(run.server),
        )

    @property
    def cohort(self) -> Cohort:
        """Cohort of the present round, drawn once."""
        run = self.run
        drawn_for: tuple[object, ...] = run.seed, run.round
        closes_early = self.deadline is not None or self.population.over_selection > 1
        if closes_early:  # who is in time depends on the sizes of model and training, which callbacks may change
            drawn_for += self.schedule, self.network, id(run.unpruned)
        if self._drawn is None or self._drawn[0] != drawn_for:
            self._drawn = drawn_for, self.population.cohort(run, self._in_time if closes_early else None)
        return self._drawn[1]

    @property
    def server(self) -> ServerSide:
        """The server's own samples, and training on them, in the present round."""
        return self._server_side(self.context)

    def _server_side(self, context: RoundContext) -> ServerSide:
        return ServerSide(
            self.flat_module,
            self.data,
            self.run,
            self.schedule,
            context,
            self.run.counters,
            self.algorithm.name,
            self.accuracy,
        )

    def _open_link(self, cohort: Cohort, context: RoundContext) -> Link:
        """Open the link of a round."""
        run, method, fabric = self.run, self.algorithm, self.flat_module.fabric
        return Link(
            context,
            method.uplink,
            method.downlink,
            client_memory=run.memory_on_device,
            server_memory=run.server_memory,
            gather=partial(gather_by_client, fabric, cohort.answering),
            random=partial(run.random, EXCHANGE),
            mean=partial(mean, fabric, method.aggregator, context, cohort.answering),
            observer=self.observer,
            catch_up=run.ledger.catch_up,
            timed=() if self.client_devices is None else list(dict.fromkeys([*cohort.selected, *cohort.answering])),
            secure_sum=self._secure_sum(cohort.selected),
        )

    def _secure_sum(self, selected: Sequence[int]) -> SecureSum | None:
        """Return the sum that the server sees of the selected clients; None if it sees their messages."""
        if self.secure_aggregation is None:
            return None
        in_parts = SENT in self.algorithm.exchange.provides & self.algorithm.aggregator.uses
        return SecureSum(self.secure_aggregation, len(selected), weighs_each=in_parts)

    def _broadcast(self, link: Link, selected: Sequence[int], shared: Message, work: LocalWork) -> ClientJob:
        """Send the model, and the pruning mask, d bits, to clients that do not have it yet; returns the job of the clients."""
        run, method = self.run, self.algorithm
        recipients = method.exchange.recipients(selected, link.context)
        if run.mask is not None:
            charged = link.charged(recipients)
            link.send_mask([client for client in charged if client not in run.clients_with_mask], run.mask)
        link.agree_on_keys(selected)
        received = link.broadcast(recipients, self._model_message() | shared)
        received = {"buffers": run.buffers} | received
        return ClientJob(
            method.rule, link.context, received, work.schedule, run, personal=method.personal, group=self.group
        )

    def _train(self, job: ClientJob, clients: Sequence[int]) -> Iterator[Result]:
        """Train clients of this process, and yield their results; of a group of processes only the first one yields them."""
        attackers, attacking = self.attackers, self._attacking(job.run)
        data = self.data if attackers is None else attackers.poisoned_data(attacking)
        results = self.runner(self.flat_module, job, clients, data)
        if self.group is not None and not self.group.is_first:
            for _ in results:
                """Train along with the first process."""
            results = iter(())
        if attackers is not None:
            results = attackers.attacked(results, job, attacking, self.cohort.answering)
        yield from results if self.secure_aggregation is None else map(_out_of_the_sum_if_lost, results)

    def _attacking(self, run: Run) -> frozenset[int]:
        """Return the clients that attack in the present round of a run."""
        return frozenset() if self.attackers is None else self.attackers.among(run, self.cohort.selected)

    def _attack_columns(self, cohort: Cohort) -> dict[str, float]:
        """Return the columns about attackers."""
        if self.attackers is None:
            return {}
        attacking = self._attacking(self.run)
        return {"attack/attackers": sum(client in attacking for client in cohort.answering)}

    def _take_uploads(self, job: ClientJob, cohort: Cohort, link: Link, intake: Intake) -> Message:
        """Train the clients and take their uploads; returns what the exchange provides to the server's steps.

        What clients need for their training, besides the model, is not kept any longer than this.
        """
        exchange = self.algorithm.exchange
        job, clients = exchange.before_training(job, cohort.mine, self._train, link)
        if self.group is not None:  # only its first process has seen what the clients sent
            clients = self.group.gather(clients)[0]
        positions = count(1)
        for upload in self._uploads(job, clients, link, intake.outcome):
            intake.take(upload, link)
            self.observer.on_upload(upload.result.client, next(positions), len(clients))
            del upload  # before the next client trains, as `enumerate` would not
        link.received = {}
        self.flat_module.release_gradient()
        if self.attackers is not None and self.attackers.adversary.attack.remembers:
            self.run.attack = {name: job.received[name] for name in ("model", "buffers")}
        return {name: job.received[name] for name in exchange.provides if name in job.received}

    def _uploads(self, job: ClientJob, clients: Sequence[int], link: Link, outcome: Outcome) -> Iterator[Upload]:
        """Train the clients, and yield their uploads; `outcome` has what has been accepted of them so far."""
        return iter(self.algorithm.exchange.collect(self._train(job, clients), link))

    def _server_turn(
        self,
        context: RoundContext,
        server: ServerSide,
        outcome: Outcome,
        shared: Message,
        merged: Message,
        provided: Message,
    ) -> ServerTurn:
        """Return the turn that the first of the server's steps gets, in the memory of the merged message."""
        run, clients = self.run, sorted(outcome.logs)
        counters = maximum(run.counters, outcome.counters)
        dtypes = {"buffers": run.buffers.dtype}
        return ServerTurn(
            context=context,
            server=replace(server, counters=counters),
            round=run.round,
            clients=clients,
            num_samples=float(self.data.client_sizes[clients].sum()),
            shared=shared,
            params=run.params,
            buffers=run.buffers,
            merged={
                name: change(vector, dtypes.get(name, run.params.dtype))
                for change, message in ((narrowed, merged), (converted, provided))
                for name, vector in message.items()
            },
            proposal=run.params,
            proposed_buffers=run.buffers,
            mask=run.mask,
        )

    def _say_if_none_accepted(self, outcome: Outcome) -> None:
        """Say so in the first round that rejects every upload, not only stale ones; the run's last table counts them all."""
        if outcome.num_accepted or outcome.num_lost or outcome.num_uploads == outcome.num_stale or self._warned:
            return
        self._warned = True
        why = rejection_reasons(self.guard.clients is not None, outcome.num_stale > 0)
        say_lost(
            f"Round {self.run.round + 1}: all uploads ({outcome.num_uploads}) were rejected ({why}), so the model did not "
            "change. Most likely the learning rate is too high, or the inputs have values that are not finite."
        )

    def _say_if_lost(self, outcome: Outcome, link: Link) -> None:
        """Say so in the first round whose secure sum is lost; the table at the end of the run counts them all."""
        if link.secure_sum is None or not outcome.num_lost or self._warned_of_lost_sum:
            return
        self._warned_of_lost_sum = True
        n = link.secure_sum.num_clients
        say_lost(
            f"Round {self.run.round + 1}: {outcome.num_lost} of {n} clients answered, and a secure sum over {n} needs "
            f"{link.secure_sum.protocol.threshold(n)}, so it is lost and the model did not change."
        )

    def _say_if_all_late(self, cohort: Cohort) -> None:
        """Say so in the first round in which nobody answers before the deadline, so that it trains nothing."""
        if cohort.answering or not cohort.late or self._warned_of_deadline:
            return
        self._warned_of_deadline = True
        fastest = min(self._planned_seconds[client] for client in cohort.late)
        say_lost(
            f"Round {self.run.round + 1}: none of the {len(cohort.late)} clients that answer does so before the deadline of "
            f"{self.deadline:g} simulated seconds, so the model did not change; the fastest would need {fastest:.3g}."
        )

    def _warn_without_loss(self, outcome: Outcome, work: LocalWork) -> None:
        """Warn in the first round in which clients have batches, but no loss to train on."""
        had_steps = outcome.num_steps or outcome.num_lost  # a sum may be lost before the training
        if had_steps or self._warned_without_loss or not work.num_samples(self.cohort.answering):
            return
        self._warned_without_loss = True
        name = type(self.flat_module.module).__name__
        what, remedy = "returned None for every batch of all clients", "end it with `return loss`"
        if self.flat_module.is_manual:
            what, remedy = "made no step of an optimizer", "call step() of what self.optimizers() returns"
        rank_zero_warn(f"Round {self.run.round + 1}: training_step of {name} {what}, so nothing was trained: {remedy}.")

    def _warn_if_nothing_changes(self, proposal: Proposal | None, outcome: Outcome) -> None:
        """Warn in the first round if the clients' steps leave the server's model as it was."""
        run = self.run
        if run.round or proposal is None or proposal.is_undone or not outcome.num_steps:
            return
        trains_own = run.personal_layout.names or any(part.continues for part in self.algorithm.personal)
        if torch.equal(proposal.params, run.params) and not trains_own:
            rate = self.flat_module.optimizer.largest_rate
            why = "the learning rate is 0" if not rate else "most likely the loss does not depend on what is trained"
            rank_zero_warn(
                f"Round 1: {outcome.num_steps} optimiser steps of the clients changed no parameter of the model; {why}."
            )

    def _commit(self, proposal: Proposal | None, outcome: Outcome, intake: Intake) -> None:
        """End the round; unless it is undone, store the server's proposal and the clients' states in the run."""
        run, fabric = self.run, self.flat_module.fabric
        self._say_if_drifted(intake)
        if proposal is None or proposal.is_undone:
            run.end_round()
            return
        # Every process may have merged the uploads itself, or steps on another kind of GPU: rounding must not make models differ.
        if intake.shares_uploads or self._has_drifted:
            proposal = replace(
                proposal,
                params=of_rank_zero(fabric, proposal.params),
                buffers=of_rank_zero(fabric, proposal.buffers),
            )
        state_forms, memory_forms = intake.forms or (None, None)
        run.commit(
            proposal,
            share_states(fabric, outcome.states, state_forms),
            share_states(fabric, outcome.memory, memory_forms),
        )
        if run.keeps_files:
            fabric.barrier()  # one process of a machine writes the files that the others read
        if proposal.mask is not None and proposal.mask is not run.mask:
            self.set_mask(proposal.mask)

    def _say_if_drifted(self, intake: Intake) -> None:
        """Say so in the first round that the processes have begun with different models."""
        if intake.has_drifted and not self._has_drifted:
            self._has_drifted = True
            rank_zero_warn(
                f"Round {self.run.round + 1}: the processes have begun with models that differ, most likely because they "
                "compute on accelerators of different kinds; from now on all take the model of process 0 after each round."
            )

    def _model_message(self) -> Message:
        buffers = {"buffers": self.run.buffers} if self.flat_module.buffer_layout.names else {}
        return {"model": self.run.params, **buffers}

    # -- duration ---------------------------------------------------------------------------------------------------------

    def num_batches(self) -> int:
        """Batches of the next round, over all answering clients that this process trains, and their own models after them."""
        num_trainings = 1 + sum(len(part.rules()) for part in self.algorithm.personal)
        return self.work.num_batches(self.cohort.mine) * num_trainings

    def num_client_steps(self) -> int:
        """Optimiser steps of the next round, over all answering clients of all processes."""
        return self.work.num_steps(self.cohort.answering)

    @property
    def work(self) -> LocalWork:
        """Length of the clients' local training in the present round."""
        schedule = self.schedule.in_round(self.algorithm.rule, self.context)
        return LocalWork(schedule, self.run, self.data.client_sizes)

    @property
    def _macs(self) -> tuple[float, float]:
        """Multiply-accumulates of a sample's forward pass, and these as a fraction of those when the run began."""
        macs, at_start = self.network.macs or 0, self.run.macs_at_start or 0
        return macs, macs / at_start if macs and at_start else 1.0

    def _seconds(
        self, cohort: Cohort, work: LocalWork, times: RoundTimes | None, uplink_bits: int, downlink_bits: int
    ) -> float:
        """Return the simulated seconds of a round, which lasts as long as the client with the most samples needs.

        With a clock of clients it lasts until the round closes, and begins when enough clients are there.
        """
        if times is not None and self.client_devices is not None:
            self.run.radio_seconds = self.client_devices.radio_seconds(times.bits, (uplink_bits, downlink_bits))
            return (cohort.begin - self.run.simulated_seconds) + self.run.coming_seconds + times.seconds
        most = int(self.data.client_sizes[cohort.answering].max(initial=0))
        num_samples = work.schedule.num_samples(most) if most else 0
        macs, share = self._macs
        return self.clock.seconds(uplink_bits, downlink_bits, macs * num_samples * self.algorithm.num_models, share)

    def _client_times(self, work: LocalWork) -> ClientTimes:
        assert self.client_devices is not None
        return ClientTimes(self.client_devices, work, self.algorithm.num_models, *self._macs)

    def _times(self, cohort: Cohort, work: LocalWork, outcome: Outcome, link: Link) -> RoundTimes | None:
        """Return the seconds of the round and of its clients, with the bits that they sent; None if the clock is not theirs."""
        if self.client_devices is None:
            return None
        times, bits = self._client_times(work), added_by_client(link.broadcast_bits_by_client, outcome.bits_by_client)
        seconds = {client: times.seconds(client, bits[client]) for client in cohort.answering}
        seconds |= {client: self._planned_seconds[client] for client in cohort.late}
        return RoundTimes(cohort, self.population.cohort_size, self.deadline, seconds, bits)

    def _in_time(self, selected: list[int], arriving: list[int]) -> list[int]:
        """Return the clients that answer before the round closes, by the bits that they are going to send and receive."""
        run, work, shared = self.run, self.work, self.algorithm.share(self.run.server)
        broadcast = partial(self._broadcast, selected=selected, shared=shared, work=work)
        secure_sum = self._secure_sum(selected)
        bits = planned_bits(self.flat_module, self.algorithm, run, self.context, selected, broadcast, secure_sum)
        times = self._client_times(work)
        self._planned_seconds = {client: times.seconds(client, bits[client]) for client in arriving}
        return in_time(self._planned_seconds, self.population.cohort_size, self.deadline)

    # -- between rounds ---------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Take the turn before the first round, whose transfers count as set-up."""
        run = self.run
        link = Link(self.context, Dense(), Dense(), random=partial(run.random, SETUP))
        learner = ModuleLearner(
            self.flat_module,
            self.data,
            run.counters,
            link.ledger,
            self.observer.on_prepared,
            self.most_setup_steps,
        )
        turn = SetupTurn(self.context, self.data, link, self.server, learner, run.params, run.buffers)
        self.algorithm.prepare(turn)
        self.setup_steps_left_out = learner.num_left_out
        run.finish_setup(
            of_rank_zero(self.flat_module.fabric, turn.params),
            of_rank_zero(self.flat_module.fabric, turn.buffers),
            turn.server.counters,
            turn.server.num_steps + learner.num_steps,
            link.ledger.round_bits,
        )
        if turn.mask is not None:
            self.set_mask(turn.mask)

    def set_mask(self, mask: Tensor) -> None:
        """Prune all parameters outside a mask (d,), bools, in the model and in all states."""
        self.algorithm.check_mask("a callback")  # steps are checked when the algorithm is made
        self.run.set_mask(mask, self.algorithm.rule.unmasked_state)
        if self.run.keeps_files:
            self.flat_module.fabric.barrier()  # one process of a machine writes the files that the others read

    def broadcast_pruning(self, plan: Plan) -> None:
        """Let the algorithm announce a structured pruning to the clients, and charge the next round for it."""
        if not self.algorithm.exchange.uses_link:
            return
        run, cohort = self.run, self.population.select(self.run)
        link = Link(self.context, Dense(), Dense(), timed=() if self.client_devices is None else cohort)
        self.algorithm.broadcast_pruning(PruningTurn(plan, link, self.context, cohort, run.params, run.buffers))
        run.ledger.add(link.ledger.round_bits, ahead=True)
        self._time_ahead(link)

    def refresh_network(self) -> None:
        """Read layers and size of the module again, after a pruning."""
        self.network = Network.of(self.flat_module, self.data)

    def sources(self) -> list[Source]:
        """Return the holders of training samples, for callbacks that query them about the model; see `charge_queries`."""
        if not self.algorithm.exchange.uses_link:
            return self.data.sources()
        return [replace(source, on_answer=self._record_query) for source in self.data.sources()]

    def _record_query(self, client: int, count: int) -> None:
        require(
            self.secure_aggregation is None,
            "trainer.secure_aggregation lets the server see only sums over clients, and a callback asks one client: leave one of "
            "them out.",
        )
        self._queries.record(client, count, self._model_message())

    def charge_queries(self) -> None:
        """Charge the next round for the queries of callbacks to clients."""
        if self._queries.counts:
            cohort, is_timed = set(self.population.select(self.run)), self.client_devices is not None
            self._time_ahead(self._queries.charge(self.run.ledger, self.context, cohort, is_timed))

    def _time_ahead(self, link: Link) -> None:
        """Let the next round begin once the slowest of a link's clients has its messages, if the clock is one of clients."""
        if self.client_devices is not None:
            self.run.coming_seconds += self.client_devices.slowest_transfer(link.bits_by_client)


def _out_of_the_sum_if_lost(result: Result) -> Result:
    """Return a result, with NaN as its message if the client will not keep its part of the round: it must not be in a sum."""
    if not is_finite(result.owned, result.state):
        result.message = {name: torch.full_like(entry, torch.nan) for name, entry in result.message.items()}
    return result

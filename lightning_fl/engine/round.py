"""One round of federated learning: cohort, broadcast, local training, upload, aggregation, server steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from itertools import count

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_fl.algorithms import Algorithm
from lightning_fl.clients.choose_runner import Runner
from lightning_fl.clients.client_job import ClientJob
from lightning_fl.clients.device_group import DeviceGroup
from lightning_fl.clients.local_schedule import LocalSchedule
from lightning_fl.clients.serial import serial
from lightning_fl.clients.shown_models import show
from lightning_fl.codecs import Dense
from lightning_fl.data import FederatedDataModule, Source
from lightning_fl.engine.callback_queries import CallbackQueries
from lightning_fl.engine.intake import Intake
from lightning_fl.engine.local_work import LocalWork
from lightning_fl.engine.network import Network
from lightning_fl.engine.planned_bits import planned_bits, planned_link
from lightning_fl.engine.population import Cohort, Population
from lightning_fl.engine.pretraining import ModuleLearner
from lightning_fl.engine.roles import Feature, Roles, Round
from lightning_fl.engine.round_record import round_record
from lightning_fl.engine.server_side import ServerSide
from lightning_fl.engine.server_steps import take_steps
from lightning_fl.errors import require
from lightning_fl.features.clock.client_devices import Computation, RoundTimes, in_time
from lightning_fl.features.clock.simulated_time import SimulatedTime
from lightning_fl.features.privacy.mechanism import Mechanism
from lightning_fl.features.privacy.side_channels import times as times_clients
from lightning_fl.features.secure_sums import SecureAggregation, SecureSum
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.flat_module.module_buffers import check_counters
from lightning_fl.link.link import Link
from lightning_fl.link.messages import RoundObserver
from lightning_fl.outputs.losses import say_lost
from lightning_fl.processes import gather_by_client, mean, of_rank_zero, share_states
from lightning_fl.pruning import Plan
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
)
from lightning_fl.state.outcome import IN_MEMORY, Outcome, Proposal, added_by_client, maximum
from lightning_fl.state.run_state import CODEC, EXCHANGE, SERVER, SETUP, Run
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
        time: simulated seconds of the rounds.
        secure_aggregation: lets the server see only sums over the clients, at a cost; None if it sees their messages.
        observer: is told of each upload and message.
        privacy: clips and adds noise if the run is private.
        accuracy: logged name that the user has given as the accuracy for methods that need one; None to find it.
        features: what stands around the round, the innermost first.
        runner: trains clients on a job.
        group: processes that train each client together with this one; None if this one trains its clients alone.
        prunings: checksum of the prunings and unfreezings of the module in this process since the run began or was resumed.
        most_setup_steps: optimiser steps of each training of clients before the first round at most; None for all.
        setup_steps_left_out: steps that `most_setup_steps` has left out.
        logged_in_training: names of what has been logged while clients train, also with Lightning's suffixes.
    """

    algorithm: Algorithm
    flat_module: FlatModule
    data: FederatedDataModule
    run: Run
    population: Population
    network: Network
    schedule: LocalSchedule
    num_rounds: int
    time: SimulatedTime
    secure_aggregation: SecureAggregation | None = None
    observer: RoundObserver = field(default_factory=RoundObserver)
    privacy: Mechanism = field(default_factory=Mechanism)
    accuracy: str | None = None
    features: Sequence[Feature] = ()
    runner: Runner = serial
    group: DeviceGroup | None = None
    prunings: int = 0
    most_setup_steps: int | None = None
    setup_steps_left_out: int = field(default=0, init=False)
    logged_in_training: set[str] = field(default_factory=set, init=False)
    _queries: CallbackQueries = field(default_factory=CallbackQueries, init=False, repr=False)
    _drawn: tuple[tuple[object, ...], Cohort] | None = field(default=None, init=False, repr=False)
    _has_drifted: bool = field(default=False, init=False, repr=False)
    _says_dropped: bool = field(default=False, init=False, repr=False)

    @cached_property
    def roles(self) -> Roles:
        """Roles of a round, with the features around them."""
        return self.around(Roles(self._train))

    def around(self, roles: Roles) -> Roles:
        """Return roles with the features around them."""
        return reduce(lambda inner, feature: feature.around(inner), self.features, roles)

    def train_round(self) -> dict[str, float]:
        """Train one round; returns its numbers by their column names in `metrics.csv`."""
        run, method, context = self.run, self.algorithm, self.context
        cohort, work = self.cohort, self.work
        server = self._server_side(context, f"Round {run.round + 1}")
        roles = self.roles
        for observer in roles.observers:
            observer.begin_round(run, server)
        link, shared = self._open_link(cohort, context), method.share(run.server)
        module, fabric = self.flat_module.module, self.flat_module.fabric
        check = partial(check_counters, module, run.counters)
        logs, staging = self.flat_module.logs, run.staging
        keep = (run.clients.ahead, run.client_memory.ahead) if fabric.world_size == 1 else IN_MEMORY
        aggregator, merges_none = self.privacy.aggregator(method, run, context), self.privacy.merges_none
        intake = Intake(aggregator, roles.accepts, fabric, check, logs, staging, method.pace, keep, merges_none)
        provided = self._take_uploads(self._broadcast(link, cohort.selected, shared, work), cohort, link, intake)
        merged, outcome = intake.finish(cohort, link, run.params, self.prunings)
        num_samples = work.num_samples(cohort.answering)
        client_logs = [outcome.logs[k] for k in dict.fromkeys(cohort.answering) if k in outcome.logs]
        averages = logs.averages(client_logs, intake.known)
        self.logged_in_training.update(*({name, *logs.suffixed.get(name, ())} for name in averages))

        stragglers = work.num_stragglers(cohort.answering)
        computation = self.time.computation(work, self.network)
        times = self._times(cohort, computation, outcome, link)
        counted, seen = cohort, outcome
        if self.privacy.hides_costs:
            seen = replace(outcome)
            counted = self._expect(cohort, link, outcome)
        seconds = partial(self.time.seconds, counted, computation, times)
        run.book(outcome, link, seconds)
        proposal = None
        if not intake.is_skipped:
            turn = self._server_turn(context, server, outcome, shared, merged, provided)
            turn.uploaders = intake.uploaders
            del merged, provided  # so that steps may let go of what they have used
            # Steps may let the module draw, as FedDF's student with dropout does.
            self.flat_module.seed(run.torch_seeds(SERVER)[1])
            proposal = take_steps(method, roles, turn, run.server, self.flat_module.newly_frozen)
        finished = Round(run, cohort, link, seen, work, times, averages, intake.metrics, proposal)
        columns: dict[str, float] = {}
        for observer in roles.observers:
            columns |= observer.end_round(finished)
        self._commit(proposal, outcome, intake)
        reported = intake.metrics | ({} if proposal is None else proposal.metrics)
        averages = {} if self.privacy.hides_costs else averages
        record = round_record(run, counted, outcome, self.network, averages, num_samples, stragglers, reported, columns)
        return self.privacy.shown(record)

    @property
    def context(self) -> RoundContext:
        """Facts about the run that every part may use, in the present round."""
        run = self.run
        return RoundContext(
            run.layout,
            run.buffer_layout,
            len(self.population.everyone),
            self.network.groups,
            round=run.round,
            num_rounds=self.num_rounds,
            momentum=self.flat_module.optimizer.momentum,
            unpruned=run.unpruned,
            local_epochs=self.schedule.epochs,
            learning_rate=self.flat_module.optimizer.largest_rate,
            dtype=run.params.dtype,
            draw=Draw((run.seed, run.round, CODEC), self.population.everyone[-1] + 1),
            encoded=self.algorithm.encoded(run.server),
            clients=self.population.everyone,
        )

    @property
    def cohort(self) -> Cohort:
        """Cohort of the present round, drawn once."""
        run = self.run
        drawn_for: tuple[object, ...] = run.seed, run.round
        closes_early = self.time.deadline is not None or self.population.over_selection > 1
        if closes_early:  # who is in time depends on the sizes of model and training, which callbacks may change
            drawn_for += self.schedule, self.network, id(run.unpruned)
        if self._drawn is None or self._drawn[0] != drawn_for:
            self._drawn = drawn_for, self.population.cohort(run, self._in_time if closes_early else None)
        return self._drawn[1]

    @property
    def server(self) -> ServerSide:
        """The server's own samples, and training on them, in the present round."""
        return self._server_side(self.context, f"Round {self.run.round + 1}")

    def _server_side(self, context: RoundContext, when: str) -> ServerSide:
        return ServerSide(
            self.flat_module,
            self.data,
            self.run,
            self.schedule,
            context,
            self.run.counters,
            self.algorithm.name,
            self.accuracy,
            on_dropped=partial(self._say_dropped, when),
        )

    def _say_dropped(self, when: str) -> None:
        """Say once that a training on the server's samples was dropped; `when` is its round, or the time before the first."""
        if not self._says_dropped:
            say_lost(
                f"{when}: the server's training on its own samples changed nothing, because its result was not finite. Most "
                "likely the learning rate is too high, or the inputs have values that are not finite."
            )
        self._says_dropped = True

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
            timed=() if self.time.devices is None else list(dict.fromkeys([*cohort.selected, *cohort.answering])),
            secure_sum=self._secure_sum(cohort.selected),
            is_unchanged=run.is_unchanged,
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
        self.privacy.announce(link, recipients)
        received = link.broadcast(recipients, self._model_message() | shared)
        received = {"buffers": run.buffers} | received
        return ClientJob(
            method.rule, link.context, received, work.schedule, run, personal=method.personal, group=self.group
        )

    def _train(self, job: ClientJob, clients: Sequence[int]) -> Iterator[Result]:
        """Train clients of this process, and yield their results; of a group of processes only the first one yields them."""
        assert job.data is not None
        results = self.runner(self.flat_module, job, clients, job.data)
        if self.group is None or self.group.is_first:
            yield from results
            return
        for _ in results:
            """Train along with the first process."""

    def _take_uploads(self, job: ClientJob, cohort: Cohort, link: Link, intake: Intake) -> Message:
        """Train the clients and take their uploads; returns what the exchange provides to the server's steps.

        What clients need for their training, besides the model, is not kept any longer than this.
        """
        exchange = self.algorithm.exchange
        if self.group is None or self.group.is_first:
            self.privacy.answer(link, cohort.mine)
        job = replace(job, data=self.data, selected=cohort.selected, answering=cohort.answering)
        job, clients = exchange.before_training(job, cohort.mine, self.roles.train, link)
        if self.group is not None:  # only its first process has seen what the clients sent
            clients = self.group.gather(clients)[0]
        positions = count(1)
        for upload in self._uploads(job, clients, link, intake.outcome):
            intake.take(upload, link)
            show(self.flat_module, upload.result.trained)
            self.observer.on_upload(upload.result.client, next(positions), len(clients))
            del upload  # before the next client trains, as `enumerate` would not
        link.received = {}
        self.flat_module.release_gradient()
        for observer in self.roles.observers:
            observer.trained(job)
        return {name: job.received[name] for name in exchange.provides if name in job.received}

    def _uploads(self, job: ClientJob, clients: Sequence[int], link: Link, outcome: Outcome) -> Iterator[Upload]:
        """Train the clients, and yield their uploads; `outcome` has what has been accepted of them so far."""
        return iter(self.algorithm.exchange.collect(self.roles.train(job, clients), link))

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
        run, hides_clients = self.run, self.privacy.hides_clients
        clients = [] if hides_clients else sorted(outcome.logs)
        counters = run.counters if self.privacy.keeps_counters else maximum(run.counters, outcome.counters)
        dtypes = {"buffers": run.buffers.dtype}
        is_alone = len({vector.data_ptr() for vector in merged.values()}) == len(merged)  # no vector has two names
        change = narrowed if is_alone else converted
        message = {
            name: function(vector, dtypes.get(name, run.params.dtype))
            for function, entries in ((change, merged), (converted, provided))
            for name, vector in entries.items()
        }
        return ServerTurn(
            context=context,
            server=replace(server, counters=counters),
            round=run.round,
            clients=clients,
            num_samples=self.privacy.num_samples(outcome.num_samples),
            shared=shared,
            params=run.params,
            buffers=run.buffers,
            merged=self.privacy.merged(message, run, server.untrained),
            proposal=run.params,
            proposed_buffers=run.buffers,
            mask=run.mask,
        )

    def _commit(self, proposal: Proposal | None, outcome: Outcome, intake: Intake) -> None:
        """End the round; unless it is undone, store the server's proposal and the clients' states in the run."""
        run, fabric = self.run, self.flat_module.fabric
        if intake.has_drifted:
            self._say_drifted()
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

    def _say_drifted(self) -> None:
        """Warn once that the processes have begun a round with different models."""
        if not self._has_drifted:
            rank_zero_warn(
                f"Round {self.run.round + 1}: the processes have begun with models that differ, most likely because they "
                "compute on accelerators of different kinds; from now on all take the model of process 0 after each round."
            )
        self._has_drifted = True

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
        return self._work_of(self.schedule, self.run, self.context)

    def _work_of(self, schedule: LocalSchedule, run: Run, context: RoundContext) -> LocalWork:
        """Return the length of the clients' local training in the present round of a run, which has the context."""
        method, sizes = self.algorithm, self.data.client_sizes
        in_round = schedule.in_round(method.rule, context)
        return LocalWork(in_round, run, sizes, method.gradients_per_step, method.passes_at_received)

    def _times(self, cohort: Cohort, computation: Computation, outcome: Outcome, link: Link) -> RoundTimes | None:
        """Return the seconds of the round and of its clients, with the bits that they sent; None if the clock is not theirs."""
        bits = added_by_client(link.broadcast_bits_by_client, outcome.bits_by_client)
        return self.time.of_round(cohort, self.population.cohort_size, computation, bits)

    def _in_time(self, selected: list[int], arriving: list[int]) -> list[int]:
        """Return the clients that answer before the round closes, by the bits that they are going to send and receive."""
        run, work, shared = self.run, self.work, self.algorithm.share(self.run.server)
        broadcast = partial(self._broadcast, selected=selected, shared=shared, work=work)
        secure_sum = self._secure_sum(selected)
        bits = planned_bits(
            self.flat_module, self.algorithm, run, self.context, selected, broadcast, self.around, secure_sum
        )
        planned = self.time.plan(arriving, self.time.computation(work, self.network), bits)
        return in_time(planned, self.population.cohort_size, self.time.deadline)

    def _expect(self, cohort: Cohort, link: Link, outcome: Outcome) -> Cohort:
        """Replace the bits of a round by their expected values, and count no uploads.

        Returns:
            A cohort of one client whose number of samples is the median, for the time of the round.
        """
        sizes, eligible = self.data.client_sizes, self.population.eligible
        median = int(eligible[np.argsort(sizes[eligible], kind="stable")[len(eligible) // 2]])
        recipients = self.population.cohort_size
        selected = [median, *eligible[eligible != median].tolist()][:recipients]
        broadcast = partial(
            self._broadcast, selected=selected, shared=self.algorithm.share(self.run.server), work=self.work
        )
        one = planned_link(self.flat_module, self.algorithm, self.run, self.context, selected, broadcast, self.around)
        self.privacy.answer(one, [median])
        link.broadcast_bits = one.broadcast_bits
        outcome.bits = times_clients(one.client_bits, recipients * (1 - self.population.dropout_rate))
        outcome.num_uploads = outcome.num_accepted = 0
        outcome.num_steps, outcome.most_steps = (
            self.work.num_steps([median]) * recipients,
            self.work.num_steps([median]),
        )
        return Cohort([median], [median], cohort.mine)

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
        server = self._server_side(self.context, "Before round 1")
        turn = SetupTurn(self.context, self.data, link, server, learner, run.params, run.buffers)
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
        link = Link(self.context, Dense(), Dense(), timed=() if self.time.devices is None else cohort)
        self.algorithm.broadcast_pruning(PruningTurn(plan, link, self.context, cohort, run.params, run.buffers))
        run.ledger.add(link.ledger.round_bits, ahead=True)
        self._send_ahead(link)

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
            context, is_timed = self.context, self.time.devices is not None
            recipients = self.algorithm.exchange.recipients(self._selected(), context)
            charged = set(Link(context, Dense(), self.algorithm.downlink).charged(recipients))
            self._send_ahead(self._queries.charge(self.run.ledger, context, charged, is_timed))

    def _selected(self) -> Sequence[int]:
        """Return the clients that receive the model in the present round, before it begins."""
        return self.population.select(self.run)

    def _send_ahead(self, link: Link) -> None:
        """Count the time of messages between two rounds."""
        self.time.send_ahead(link)

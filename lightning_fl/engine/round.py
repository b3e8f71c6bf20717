"""One round of federated learning: cohort, broadcast, local training, upload, aggregation, server steps."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from itertools import count
from typing import Protocol

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
from lightning_fl.engine.dry_round import mean_alone, results_without_training
from lightning_fl.engine.intake import Intake
from lightning_fl.engine.local_work import LocalWork
from lightning_fl.engine.network import Network
from lightning_fl.engine.population import Cohort, Population
from lightning_fl.engine.pretraining import ModuleLearner
from lightning_fl.engine.roles import Roles, Round, Train
from lightning_fl.engine.round_record import round_record
from lightning_fl.engine.server_side import ServerSide
from lightning_fl.engine.server_steps import take_steps
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.flat_module.module_buffers import check_counters
from lightning_fl.link.link import Link
from lightning_fl.link.messages import RoundObserver
from lightning_fl.outputs.losses import say_lost
from lightning_fl.processes import gather_by_client, gather_objects, mean, of_rank_zero, share_states
from lightning_fl.pruning import Plan
from lightning_fl.slots import (
    Draw,
    Message,
    PruningTurn,
    Result,
    RoundContext,
    ServerTurn,
    SetupTurn,
    Uploader,
)
from lightning_fl.state.outcome import IN_MEMORY, Outcome, Proposal, added_by_client, maximum
from lightning_fl.state.run_state import CODEC, EXCHANGE, SERVER, SETUP, Run
from lightning_fl.vectors.pieces import converted, narrowed


class Feature(Protocol):
    """Feature of a run, which stands around its rounds."""

    def around(self, roles: Roles, engine: Federation) -> Roles:
        """Return the roles of a round with this feature around them; called once a run, and once more for its dry rounds."""


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
        observer: is told of each upload and message.
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
    observer: RoundObserver = field(default_factory=RoundObserver)
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
        return self._around(self._train)

    @cached_property
    def _dry_roles(self) -> Roles:
        """Roles of a round in which nobody trains, with the features around them."""
        return self._around(partial(results_without_training, self.flat_module))

    def _around(self, train: Train) -> Roles:
        method = self.algorithm
        roles = Roles(
            self.population, self._broadcast, train, method.exchange.collect, lambda context: method.aggregator
        )
        return reduce(lambda inner, feature: feature.around(inner, self), self.features, roles)

    def train_round(self) -> dict[str, float]:
        """Train one round; returns its numbers by their column names in `metrics.csv`."""
        run, method, context, roles = self.run, self.algorithm, self.context, self.roles
        cohort, work = self.cohort, self.work
        server = self._server_side(context, f"Round {run.round + 1}")
        for observer in roles.observers:
            observer.begin_round(run, server)
        link, intake = self._open_link(cohort, context), self._intake(context)
        provided = self._take_uploads(roles.broadcast(link, cohort), cohort, link, intake)
        merged, outcome = intake.finish(cohort, link, run.params, self.prunings)
        averages = self._averages(cohort, outcome, intake)
        num_samples, stragglers = work.num_samples(cohort.answering), work.num_stragglers(cohort.answering)
        finished = Round(run, cohort, link, outcome, work, averages, intake.metrics)
        run.book(roles.costs(finished), link)
        if not intake.is_skipped:
            turn = roles.reveal(self._server_turn(context, server, outcome, merged, provided, intake.uploaders))
            del merged, provided  # so that steps may let go of what they have used
            # Steps may let the module draw, as FedDF's student with dropout does.
            self.flat_module.seed(run.torch_seeds(SERVER)[1])
            proposal = take_steps(method, roles, turn, run.server, self.flat_module.newly_frozen)
            finished = replace(finished, proposal=proposal)
            del turn, proposal
        columns = {name: value for observer in roles.observers for name, value in observer.end_round(finished).items()}
        self._commit(finished.proposal, outcome, intake)
        reported = intake.metrics | ({} if finished.proposal is None else finished.proposal.metrics)
        return round_record(run, cohort, outcome, self.network, averages, num_samples, stragglers, reported, columns)

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
        # Who is in time depends on the sizes of model and training, which callbacks may change.
        drawn_for: tuple[object, ...] = run.seed, run.round, self.schedule, self.network, id(run.unpruned)
        if self._drawn is None or self._drawn[0] != drawn_for:
            self._drawn = drawn_for, self.roles.sample.cohort(run)
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
            timed=list(dict.fromkeys([*cohort.selected, *cohort.answering])) if self.roles.counts_each else (),
            is_unchanged=run.is_unchanged,
        )

    def _broadcast(self, link: Link, cohort: Cohort) -> ClientJob:
        """Send the model, and the pruning mask, d bits, to clients that do not have it yet; returns the job of the clients."""
        run, method = self.run, self.algorithm
        recipients = method.exchange.recipients(cohort.selected, link.context)
        if run.mask is not None:
            charged = link.charged(recipients)
            link.send_mask([client for client in charged if client not in run.clients_with_mask], run.mask)
        received = link.broadcast(recipients, self._model_message() | method.share(run.server))
        received = {"buffers": run.buffers} | received
        schedule = self.work_of(self.schedule, run, link.context).schedule
        return ClientJob(method.rule, link.context, received, schedule, run, personal=method.personal, group=self.group)

    def _intake(self, context: RoundContext) -> Intake:
        """Return the intake of a round's uploads."""
        run, fabric = self.run, self.flat_module.fabric
        check = partial(check_counters, self.flat_module.module, run.counters)
        keep = (run.clients.ahead, run.client_memory.ahead) if fabric.world_size == 1 else IN_MEMORY
        aggregator = self.roles.aggregator(context)
        return Intake(aggregator, self.roles.accept, fabric, check, self.flat_module.logs, run.staging, keep)

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
        exchange, roles = self.algorithm.exchange, self.roles
        selected, answering = cohort.selected, cohort.answering
        job = replace(job, data=self.data, selected=selected, answering=answering, accepted=intake.outcome)
        # A client that sends twice in a round goes on from what it keeps of its first upload.
        link.client_memory = ChainMap(intake.outcome.memory, link.client_memory)  # type: ignore[arg-type]
        job, clients = exchange.before_training(job, cohort.mine, roles.train, link)
        if self.group is not None:  # only its first process has seen what the clients sent
            clients = self.group.gather(clients)[0]
        positions = count(1)
        for upload in roles.collect(roles.train(job, clients), link):
            intake.take(upload, link)
            show(self.flat_module, upload.result.trained)
            self.observer.on_upload(upload.result.client, next(positions), len(clients))
            del upload  # before the next client trains, as `enumerate` would not
        link.received = {}
        self.flat_module.release_gradient()
        for observer in roles.observers:
            observer.trained(job)
        return {name: job.received[name] for name in exchange.provides if name in job.received}

    def _averages(self, cohort: Cohort, outcome: Outcome, intake: Intake) -> dict[str, float]:
        """Return the averages of what the module has logged while accepted clients trained."""
        logs = self.flat_module.logs
        client_logs = [outcome.logs[k] for k in dict.fromkeys(cohort.answering) if k in outcome.logs]
        averages = logs.averages(client_logs, intake.known)
        self.logged_in_training.update(*({name, *logs.suffixed.get(name, ())} for name in averages))
        return averages

    def _server_turn(
        self,
        context: RoundContext,
        server: ServerSide,
        outcome: Outcome,
        merged: Message,
        provided: Message,
        uploaders: Sequence[Uploader],
    ) -> ServerTurn:
        """Return the turn that the first of the server's steps gets, in the memory of the merged message."""
        run = self.run
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
            server=replace(server, counters=maximum(run.counters, outcome.counters)),
            round=run.round,
            clients=sorted(outcome.logs),
            num_samples=outcome.num_samples,
            shared=self.algorithm.share(run.server),
            params=run.params,
            buffers=run.buffers,
            merged=message,
            proposal=run.params,
            proposed_buffers=run.buffers,
            mask=run.mask,
            uploaders=uploaders,
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
        return self.cohort.work(self.work_of(self.schedule, self.run, self.context))

    def work_of(self, schedule: LocalSchedule, run: Run, context: RoundContext) -> LocalWork:
        """Return the length of the clients' local training in the present round of a run, which has the context."""
        method, sizes = self.algorithm, self.data.client_sizes
        in_round = schedule.in_round(method.rule, context)
        return LocalWork(in_round, run, sizes, method.gradients_per_step, method.passes_at_received)

    def dry_round(self, selected: Sequence[int]) -> Link:
        """Return a link after a round in which the first of some clients trains nothing, which tells the bits of messages.

        In an exchange that chooses parts of the model, a client alone sends all that it might have to. Nothing changes the run.
        """
        run, method, roles = self.run, self.algorithm, self._dry_roles
        context = self.context
        link = Link(
            context,
            method.uplink,
            method.downlink,
            server_memory=run.server_memory,
            random=partial(run.random, EXCHANGE),
            mean=partial(mean_alone, method.aggregator, len(selected)),
            catch_up=run.ledger.catch_up,
            timed=selected,
            is_unchanged=run.is_unchanged,
        )
        first = list(selected[:1])
        job = roles.broadcast(link, Cohort(list(selected), first, first))
        job, clients = method.exchange.before_training(job, first, roles.train, link)
        for _ in roles.collect(roles.train(job, clients), link):
            """Let the client send its messages."""
        return link

    def planned_bits(self, selected: Sequence[int]) -> dict[int, tuple[int, int]]:
        """Return the bits that each selected client will send and those that it will receive; all processes must call it."""
        link = self.dry_round(selected)
        later = [link.bits_by_client[client] for client in selected[:1]]  # the same for all
        bits = added_by_client(link.broadcast_bits_by_client, dict.fromkeys(selected, *later))
        # Processes on accelerators of different kinds may find other sizes, where these depend on numbers.
        return dict(gather_objects(self.flat_module.fabric, bits)[0])

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
        run, cohort = self.run, self.roles.sample.select(self.run)
        link = Link(self.context, Dense(), Dense(), timed=cohort)
        self.algorithm.broadcast_pruning(PruningTurn(plan, link, self.context, cohort, run.params, run.buffers))
        run.ledger.add(link.ledger.round_bits, ahead=True)
        self._sent_between(link)

    def refresh_network(self) -> None:
        """Read layers and size of the module again, after a pruning."""
        self.network = Network.of(self.flat_module, self.data)

    def sources(self) -> list[Source]:
        """Return the holders of training samples, for callbacks that query them about the model; see `charge_queries`."""
        if not self.algorithm.exchange.uses_link:
            return self.data.sources()
        return [replace(source, on_answer=self._record_query) for source in self.data.sources()]

    def _record_query(self, client: int, count: int) -> None:
        for observer in self.roles.observers:
            observer.asked(client)
        self._queries.record(client, count, self._model_message())

    def charge_queries(self) -> None:
        """Charge the next round for the queries of callbacks to clients."""
        if self._queries.counts:
            context = self.context
            recipients = self.algorithm.exchange.recipients(self.roles.sample.select(self.run), context)
            charged = set(Link(context, Dense(), self.algorithm.downlink).charged(recipients))
            self._sent_between(self._queries.charge(self.run.ledger, context, charged))

    def _sent_between(self, link: Link) -> None:
        """Tell what stands around the rounds of messages between two of them."""
        for observer in self.roles.observers:
            observer.sent_between(link)

"""The engine of a run: its method, module, data, state and clients, and the roles of its rounds, with features around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from typing import Protocol
from weakref import ref

from torch import Tensor

from lightning_fl.algorithms import Algorithm
from lightning_fl.clients.choose_runner import Runner
from lightning_fl.clients.client_job import ClientJob
from lightning_fl.clients.device_group import DeviceGroup
from lightning_fl.clients.local_schedule import LocalSchedule
from lightning_fl.clients.serial import serial
from lightning_fl.clients.smaller_clients import train_by_network
from lightning_fl.data import FederatedDataModule
from lightning_fl.engine.callback_queries import CallbackQueries
from lightning_fl.engine.dry_round import mean_alone, results_without_training
from lightning_fl.engine.local_work import LocalWork
from lightning_fl.engine.network import Network
from lightning_fl.engine.population import Cohort, Population
from lightning_fl.engine.roles import Roles, Train
from lightning_fl.engine.server_side import ServerSide
from lightning_fl.engine.smaller_networks import NetworksOfClients, Smaller
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.link.link import Link
from lightning_fl.link.messages import RoundObserver
from lightning_fl.outputs.losses import say_lost
from lightning_fl.processes import gather_by_client, gather_objects, mean
from lightning_fl.slots import Draw, Message, Result, RoundContext
from lightning_fl.state.outcome import added_by_client
from lightning_fl.state.run_state import CODEC, EXCHANGE, Run


class Feature(Protocol):
    """Feature of a run, which stands around its rounds."""

    def around(self, roles: Roles, engine: Engine) -> Roles:
        """Return the roles of a round with this feature around them; called once a run, and once more for its dry rounds."""


@dataclass
class Engine:
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
        has_drifted: True once processes have begun a round with models that differ.
        queries: queries of callbacks to clients since the last round.
        level: returns the level of a client, if the exchange has `capacities`; else None.
        of_clients: why a column tells of a round's clients, by its name, as far as no part has declared that it does not: it is
            logged while they train, also with Lightning's suffixes, or a feature reports it.
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
    level: Callable[[int], float] | None = None
    setup_steps_left_out: int = field(default=0, init=False)
    of_clients: dict[str, str] = field(default_factory=dict, init=False)
    queries: CallbackQueries = field(default_factory=CallbackQueries, init=False, repr=False)
    _drawn: tuple[tuple[object, ...], ref[Tensor], Cohort] | None = field(default=None, init=False, repr=False)
    has_drifted: bool = field(default=False, init=False)
    _settled_in: int | None = field(default=None, init=False, repr=False)
    _says_dropped: bool = field(default=False, init=False, repr=False)

    @cached_property
    def roles(self) -> Roles:
        """Roles of a round, with the features around them."""
        train = self.algorithm.exchange.around_training(self._train, self.flat_module.module, self.data)
        return self._around(train)

    @cached_property
    def _dry_roles(self) -> Roles:
        """Roles of a round in which nobody trains, with the features around them."""
        return self._around(partial(results_without_training, self.flat_module))

    def _around(self, train: Train) -> Roles:
        method = self.algorithm
        train = partial(train_by_network, train, self.flat_module)
        roles = Roles(
            self.population, self._broadcast, train, method.exchange.collect, lambda context: method.aggregator
        )
        return reduce(lambda inner, feature: feature.around(inner, self), self.features, roles)

    @cached_property
    def networks(self) -> NetworksOfClients:
        """Networks that clients train, if the exchange cuts them."""
        return NetworksOfClients(self.algorithm.exchange, self.flat_module, self.data)

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
            level=self.level,
            is_replaced=run.is_replaced,
        )

    @property
    def cohort(self) -> Cohort:
        """Cohort of the present round, drawn once."""
        run = self.run
        # Who is in time depends on the sizes of model and training, and who trains on its numbers; callbacks may change them.
        drawn_for: tuple[object, ...] = run.seed, run.round, self.schedule, self.network, id(run.unpruned)
        if self._drawn is None or self._drawn[0] != drawn_for or self._drawn[1]() is not run.params:
            self._drawn = drawn_for, ref(run.params), self.roles.sample.cohort(run)
        return self._drawn[2]

    @property
    def work(self) -> LocalWork:
        """Length of the clients' local training in the present round."""
        return self.cohort.work(self.work_of(self.schedule, self.run, self.context))

    def work_of(self, schedule: LocalSchedule, run: Run, context: RoundContext) -> LocalWork:
        """Return the length of the clients' local training in the present round of a run, which has the context."""
        method, sizes = self.algorithm, self.data.client_sizes
        in_round = schedule.in_round(method.rule, context)
        gradients, passes, losses = method.gradients_per_step, method.passes_at_received, method.rule.num_losses
        work = LocalWork(in_round, run, sizes, gradients, passes, losses)
        if not method.exchange.cuts:
            return work
        return replace(work, share=partial(self.networks.share, context, self.network.macs))

    def server_side(self, context: RoundContext | None = None, when: str | None = None) -> ServerSide:
        """Return the server's own samples, and training on them.

        Args:
            context: facts about the run; None for those of the present round.
            when: time that a warning names; None for the present round.
        """
        when = when or f"Round {self.run.round + 1}"
        return ServerSide(
            self.flat_module,
            self.data,
            self.run,
            self.schedule,
            context or self.context,
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

    def open_link(self, cohort: Cohort, context: RoundContext) -> Link:
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
        message: Message = self.model_message() | method.share(run.server)
        smaller: Smaller = {}
        if method.exchange.cuts:
            received, smaller = self.networks.broadcast(link, recipients, {"buffers": run.buffers} | message)
        else:
            received = {"buffers": run.buffers} | link.broadcast(recipients, message)
        schedule = self.work_of(self.schedule, run, link.context).schedule
        return ClientJob(
            method.rule,
            link.context,
            received,
            schedule,
            run,
            personal=method.personal,
            group=self.group,
            smaller=smaller,
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

    def dry_round(self, selected: Sequence[int], context: RoundContext | None = None) -> Link:
        """Return a link after a round in which the first of some clients trains nothing, which tells the bits of messages.

        In an exchange that chooses parts of the model, a client alone sends all that it might have to. Nothing changes the run.

        Args:
            selected: clients that receive the broadcast.
            context: facts about the run; None for those of the present round.
        """
        method, roles, first = self.algorithm, self._dry_roles, list(selected[:1])
        link, job = self.dry_broadcast(selected, context)
        job, clients = method.exchange.before_training(job, first, roles.train, link)
        for _ in roles.collect(roles.train(job, clients), link):
            """Let the client send its messages."""
        return link

    def dry_broadcast(self, selected: Sequence[int], context: RoundContext | None = None) -> tuple[Link, ClientJob]:
        """Return a link of its own over which the broadcast of the present round went to some clients, and their job.

        They receive what they are going to receive in the round, bit for bit. Nothing changes the run.
        """
        run, method, first = self.run, self.algorithm, list(selected[:1])
        link = Link(
            context or self.context,
            method.uplink,
            method.downlink,
            server_memory=run.server_memory,
            random=partial(run.random, EXCHANGE),
            mean=partial(mean_alone, method.aggregator, len(selected)),
            catch_up=run.ledger.catch_up,
            timed=selected,
            is_unchanged=run.is_unchanged,
            stands_for=len(selected),
        )
        return link, self._dry_roles.broadcast(link, Cohort(list(selected), first, first))

    def planned_bits(self, selected: Sequence[int]) -> dict[int, tuple[int, int]]:
        """Return the bits that each selected client will send and those that it will receive; all processes must call it."""
        bits = self.bits_without_training(selected, self.context)
        # Processes on accelerators of different kinds may find other sizes, where these depend on numbers.
        return dict(gather_objects(self.flat_module.fabric, bits)[0])

    def bits_without_training(self, selected: Sequence[int], context: RoundContext) -> dict[int, tuple[int, int]]:
        """Return the bits that each selected client will send and those that it will receive, as this process finds them."""
        alike: dict[float, list[int]] = {}
        for client in selected:
            width = self.algorithm.exchange.width(client, context)
            alike.setdefault(1.0 if width is None else width.share, []).append(client)
        bits: dict[int, tuple[int, int]] = {}
        for clients in alike.values():
            link = self.dry_round(clients, context)
            later = [link.bits_by_client[client] for client in clients[:1]]  # the same for all
            bits |= added_by_client(link.broadcast_bits_by_client, dict.fromkeys(clients, *later))
        return {client: bits[client] for client in selected}

    def num_batches(self) -> int:
        """Batches of the next round, over all answering clients that this process trains, and their own models after them."""
        num_trainings = 1 + sum(len(part.rules()) for part in self.algorithm.personal)
        return self.work.num_batches(self.cohort.mine) * num_trainings

    def num_client_steps(self) -> int:
        """Optimiser steps of the next round, over all answering clients of all processes."""
        return self.work.num_steps(self.cohort.answering)

    def set_mask(self, mask: Tensor) -> None:
        """Prune all parameters outside a mask (d,), bools, in the model and in all states."""
        self.algorithm.check_mask("a callback")  # steps are checked when the algorithm is made
        self.run.set_mask(mask, self.algorithm.rule.unmasked_state)
        if self.run.keeps_files:
            self.flat_module.fabric.barrier()  # one process of a machine writes the files that the others read

    def settle_statistics(self) -> None:
        """Compute the statistics of batch normalisations of the server's model, if clients train smaller networks."""
        if self.algorithm.exchange.cuts and self._settled_in != self.run.round:
            self.networks.settle_statistics(self.run)
            self._settled_in = self.run.round

    def refresh_network(self) -> None:
        """Read layers and size of the module again, after a pruning."""
        self.network = Network.of(self.flat_module, self.data)

    def model_message(self) -> Message:
        buffers = {"buffers": self.run.buffers} if self.flat_module.buffer_layout.names else {}
        return {"model": self.run.params, **buffers}

"""The features of a run: who takes part in its rounds, its clock and its privacy, and what stands around the rounds."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_fl.clients.device_group import DeviceGroup
from lightning_fl.clients.local_schedule import LocalSchedule
from lightning_fl.data import FederatedDataModule
from lightning_fl.engine.engine import Engine, Feature
from lightning_fl.engine.local_work import LocalWork
from lightning_fl.engine.population import Population, num_to_select
from lightning_fl.features.asynchrony.without_barrier import WithoutBarrier
from lightning_fl.features.attacks.attackers import Attackers
from lightning_fl.features.clock import ClientClock
from lightning_fl.features.clock.availability import Availability
from lightning_fl.features.clock.client_devices import ClientDevices
from lightning_fl.features.clock.simulated_time import SimulatedTime
from lightning_fl.features.loss_guard import RoundGuard
from lightning_fl.features.privacy.central import CentralMechanism
from lightning_fl.features.privacy.client_privacy import ClientPrivacy
from lightning_fl.features.privacy.local_privacy import LocalMechanism, LocalPrivacy
from lightning_fl.features.privacy.mechanism import Mechanism
from lightning_fl.features.privacy.refusals import check_privacy
from lightning_fl.features.round_notes import RoundNotes
from lightning_fl.features.secure_aggregation import SumsOfClients
from lightning_fl.features.selection.refusals import check_selection
from lightning_fl.features.selection.selecting import Selecting
from lightning_fl.trainer.flags import cohort_size
from lightning_fl.trainer.lightning_interface import TrainerInterface


def cohort_sizes(trainer: TrainerInterface, data: FederatedDataModule) -> tuple[int, int, int]:
    """Return how many clients have samples, how many of a round are to send their update, and how many train in it.

    Raises:
        UserError: the selection does not fit the run.
    """
    sizes = trainer.data.client_indices.sizes if trainer.algorithm.pools_clients else data.client_sizes
    num_eligible = int((sizes > 0).sum())
    num_senders = cohort_size(trainer.clients_per_round, num_eligible)
    if trainer.selection is None:
        return num_eligible, num_senders, num_senders
    num_selected = num_to_select(num_senders, trainer.over_selection or 1.0, num_eligible)
    check_selection(trainer, trainer.selection, num_selected, num_eligible, data.reads_own_loaders)
    return num_eligible, num_senders, trainer.selection.num_training(num_senders)


def privacy_of(trainer: TrainerInterface, data: FederatedDataModule, cohort_size: int, owns: bool) -> Mechanism:
    """Return the privacy of a run.

    Args:
        trainer: trainer with its flags.
        data: data as the clients hold them.
        cohort_size: clients of a round, K.
        owns: True if clients own parts of the model, or models of their own.

    Raises:
        UserError: its guarantee would not hold.
    """
    flat_module = trainer.active_module
    schedulers, buffers = flat_module.optimizer.schedules.configs, flat_module.buffer_layout.names
    has_server_samples, holds_out = len(data.server_indices) > 0, data.val_fraction > 0
    check_privacy(trainer, trainer.algorithm, schedulers, buffers, has_server_samples, owns, holds_out)
    privacy = Mechanism()  # which changes nothing
    if isinstance(trainer.privacy, ClientPrivacy):
        privacy = CentralMechanism.of(trainer.privacy, data.client_sizes, cohort_size)
    elif isinstance(trainer.privacy, LocalPrivacy):
        privacy = LocalMechanism.of(trainer.privacy)
    flat_module.shared_by_clients.restores = flat_module.logs.computes_for_each_client = privacy.parts_clients
    return privacy


def population_of(
    trainer: TrainerInterface, data: FederatedDataModule, cohort_size: int, group: DeviceGroup | None
) -> Population:
    """Return the population of a run; where all samples are in one place, nobody is late, or away.

    Raises:
        UserError: the availability file is malformed, or too few clients are ever there.
    """
    place = (trainer.global_rank, trainer.world_size) if group is None else (group.index, group.num_groups)
    population = Population(data.client_sizes, cohort_size, trainer.dropout_rate, *place)
    if trainer.algorithm.pools_clients:
        flags = ("over_selection", "deadline", "availability")
        ignored = [name for name in flags if getattr(trainer, name) is not None]
        if ignored:
            rank_zero_info(
                f"{trainer.algorithm.name} has all samples in one place, where nobody is late: it ignores {', '.join(ignored)}."
            )
        return population
    waits = trainer.algorithm.pace is None
    population = replace(
        population,
        over_selection=trainer.over_selection or 1.0,
        if_too_few=(trainer.if_too_few or "wait") if waits else "fewer",
    )
    if trainer.availability is not None:
        eligible, period = population.eligible, trainer.availability_period
        availability = Availability.read(trainer.availability, data.num_clients, eligible, period)
        availability.check(population.num_needed)
        population = replace(population, availability=availability)
    return population


def time_of(trainer: TrainerInterface, engine: Engine, own_schedule: LocalSchedule) -> SimulatedTime:
    """Return the simulated time of a run.

    Args:
        trainer: trainer with its flags.
        engine: engine of the run.
        own_schedule: local training by the flags, on the clients' own samples.

    Raises:
        UserError: the clock's trace is malformed or lacks a client.
    """
    method, run, sizes = engine.algorithm, engine.run, trainer.data.client_sizes
    clock: Any = trainer.clock
    if method.pace is not None:  # clients are parallel, whatever the clock
        clock = ClientClock(**{field.name: getattr(clock, field.name) for field in fields(clock)})
    devices = ClientDevices(clock, run, sizes, differ=not method.pools_clients) if clock.is_of_clients else None
    deadline = None if method.pools_clients else trainer.deadline
    work = LocalWork(own_schedule, run, sizes)
    return SimulatedTime(trainer.clock, run, engine.data.client_sizes, work, devices, deadline)


def features_around(
    trainer: TrainerInterface,
    engine: Engine,
    time: SimulatedTime,
    privacy: Mechanism,
    cohort_size: int,
    num_senders: int,
) -> list[Feature]:
    """Return what stands around the rounds of a run, the innermost first.

    Args:
        trainer: trainer with its flags.
        engine: engine of the run.
        time: simulated time of the run.
        privacy: privacy of the run.
        cohort_size: clients of a round, K.
        num_senders: those of them that a selection lets send their update.

    Raises:
        UserError: the attack does not fit the method or the data.
    """
    method, run, guard = engine.algorithm, engine.run, trainer.loss_guard
    trains_own = bool(run.personal_layout.names) or any(part.continues for part in method.personal)
    # Before the clock, which says who of the selected clients is late.
    selection = trainer.selection
    features: list[Feature] = [] if selection is None else [Selecting(selection, num_senders, time.expected_seconds)]
    features += [] if method.pace is not None else [time]
    # Before privacy: they tell of a clip before it adapts.
    may_explode = guard.clients is not None
    keeps_buffers = getattr(trainer.privacy, "buffers", None) == "keep"
    notes = RoundNotes(
        engine.flat_module, method, may_explode, privacy.hides_clients, trains_own, keeps_buffers, privacy.clip
    )
    features.append(notes)
    # Before privacy: attackers clip what they have forged, and add noise to it, as all others do.
    if trainer.adversary is not None:
        weigh = partial(privacy.weights, method.aggregator)
        attackers = Attackers(trainer.adversary, engine.data, engine.flat_module.fabric, weigh, method.exchange)
        attackers.check(method, run, cohort_size)
        features.append(attackers)
    features += [RoundGuard(guard, run), privacy]
    if trainer.secure_aggregation is not None:
        features.append(SumsOfClients(trainer.secure_aggregation, privacy.hides_clients))
    # After all others: they stand around the training on each version.
    if method.pace is not None:
        features.append(WithoutBarrier(method.pace, time))
    return features

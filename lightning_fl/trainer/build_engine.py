"""Build the engine of a run from a trainer's flags, model, data and algorithm."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, Literal
from weakref import finalize

import torch
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_fl.algorithms import Algorithm
from lightning_fl.checks import is_a
from lightning_fl.checks.float32 import Float32
from lightning_fl.clients.choose_runner import Runner, agreed_runner, choose_runner, describe_runner
from lightning_fl.clients.client_job import ClientJob
from lightning_fl.clients.device_group import DeviceGroup
from lightning_fl.clients.local_schedule import LocalSchedule
from lightning_fl.clients.representations import representation_layer
from lightning_fl.clients.serial import serial
from lightning_fl.data import FederatedDataModule
from lightning_fl.data.split_checks import check_dropped
from lightning_fl.engine import follow_unfreezing
from lightning_fl.engine.engine import Engine, Feature
from lightning_fl.engine.follow_pruning import require_prunable
from lightning_fl.engine.local_work import LocalWork
from lightning_fl.engine.network import Network
from lightning_fl.engine.normalisation import check_single_samples
from lightning_fl.engine.population import Population, num_to_select
from lightning_fl.errors import UserError, require
from lightning_fl.evaluation.client_evaluation import ClientEvaluator
from lightning_fl.features.asynchrony.refusals import check_pace
from lightning_fl.features.asynchrony.without_barrier import WithoutBarrier
from lightning_fl.features.attacks.attackers import Attackers
from lightning_fl.features.clock import ClientClock
from lightning_fl.features.clock.availability import Availability
from lightning_fl.features.clock.client_capacities import client_capacities
from lightning_fl.features.clock.client_devices import ClientDevices
from lightning_fl.features.clock.simulated_time import SimulatedTime
from lightning_fl.features.loss_guard import RoundGuard
from lightning_fl.features.privacy.mechanism import Mechanism
from lightning_fl.features.privacy.mechanisms import mechanism_of
from lightning_fl.features.privacy.refusals import check_privacy
from lightning_fl.features.round_notes import RoundNotes
from lightning_fl.features.secure_aggregation import SumsOfClients, check_sums
from lightning_fl.features.selection import Reads
from lightning_fl.features.selection.refusals import check_selection
from lightning_fl.features.selection.selecting import Selecting
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.flat_module.hooks import changes_steps
from lightning_fl.link.messages import RoundObserver
from lightning_fl.outputs.run_folder import require_writable
from lightning_fl.processes import agree_on_model, gather_objects
from lightning_fl.slots import Draw, Gradients, Message, Personal, RoundContext, Rule, adapter, has_client_models
from lightning_fl.state.run_state import CODEC, Run
from lightning_fl.trainer.compiling import compile_steps, say_of_stacks
from lightning_fl.trainer.flags import cohort_size
from lightning_fl.trainer.lightning_interface import TrainerInterface
from lightning_fl.trainer.lightning_runner import LightningRunner, check_lightning_runner
from lightning_fl.trainer.threads import choose_threads, is_busy

MOST_ROUNDS_AHEAD = 10_000
"""Rounds whose numbers of local steps are drawn before the first round."""


def assemble(trainer: TrainerInterface) -> tuple[Engine, Mechanism]:
    """Set up the optimiser and `trainer.run`, check that all parts fit, choose a runner; return engine and privacy.

    Args:
        trainer: trainer in a session, with its model on the accelerator.

    Raises:
        UserError: a part of the algorithm, the model, the data or a flag does not fit.
    """
    flat_module, algorithm = trainer.active_module, trainer.algorithm
    agree_on_model(flat_module)
    data = algorithm.arrange_data(trainer.data)
    check_dropped(data)
    sizes = trainer.data.client_indices.sizes if algorithm.pools_clients else data.client_sizes
    num_eligible = int((sizes > 0).sum())
    num_clients = num_senders = cohort_size(trainer.clients_per_round, num_eligible)
    if trainer.selection is not None:
        num_selected = num_to_select(num_clients, trainer.over_selection or 1.0, num_eligible)
        check_selection(trainer, trainer.selection, num_selected, num_eligible, data.reads_own_loaders)
        num_clients = trainer.selection.num_training(num_clients)
    own_schedule = replace(_local_schedule(trainer, trainer.data), most_steps=None)  # of a whole local training
    schedule = _local_schedule(trainer, data, (num_clients, num_eligible))
    num_clients = 1 if algorithm.pools_clients else num_clients
    group = device_group(trainer, schedule)
    if trainer.by_lightning:
        _check_lightning(trainer)
    if trainer.compile:
        compile_steps(trainer)
    _configure_optimizer(trainer, adds_up=group is not None or flat_module.compiled is not None)
    network = Network.of(flat_module, data)
    _set_threads(trainer, _work_of_a_step(network, data))
    run = trainer.run = _initial_run(flat_module, algorithm, network)
    selected, trainer.num_rounds = num_clients, trainer.max_rounds
    if not algorithm.trains_in_rounds:
        selected, trainer.num_rounds = 0, min(1, trainer.max_rounds)
    _check_schedules(trainer, data)
    schedulers, buffers = flat_module.optimizer.schedules.configs, flat_module.buffer_layout.names
    owns = bool(flat_module.read_personal()) or has_client_models(algorithm.personal)
    check_privacy(trainer, algorithm, schedulers, buffers, len(data.server_indices) > 0, owns, data.val_fraction > 0)
    privacy = mechanism_of(trainer.privacy, data.client_sizes, selected)
    flat_module.shared_by_clients.restores = flat_module.logs.computes_for_each_client = privacy.parts_clients
    population = replace(_population(trainer, data, selected, group), sampling=privacy.sampling)
    if algorithm.pace is not None:
        check_pace(trainer)
    if trainer.secure_aggregation is not None:
        check_sums(trainer, trainer.secure_aggregation, population, len(data.server_indices) > 0)
    engine = Engine(
        algorithm=algorithm,
        flat_module=flat_module,
        data=data,
        run=run,
        population=population,
        group=group,
        network=network,
        schedule=schedule,
        num_rounds=trainer.max_rounds,
        accuracy=trainer.given_metric[0],
        observer=RoundObserver(
            partial(trainer.hooks.call, "on_client_upload"),
            partial(trainer.hooks.call, "on_client_prepared"),
            _hook(trainer, "on_client_message"),
            _hook(trainer, "on_server_message"),
        ),
    )
    algorithm.check(engine.context, engine.server, num_clients)
    if algorithm.exchange.cuts:
        _check_smaller(trainer, engine)
    time = SimulatedTime(
        trainer.clock,
        run,
        data.client_sizes,
        LocalWork(own_schedule, run, trainer.data.client_sizes),
        _client_devices(trainer),
        None if algorithm.pools_clients else trainer.deadline,
    )
    capacities = client_capacities(engine, time)
    if capacities is not None:
        engine.level = capacities.level
    engine.features = _features(trainer, engine, time, privacy, num_clients, num_senders)
    for callback in trainer.callbacks:
        if getattr(callback, "removes_filters", False):
            require_prunable(algorithm, type(callback).__name__)
        if getattr(callback, "sets_mask", False):
            algorithm.check_mask(type(callback).__name__)
    trainer.loss_guard.check(engine.server, algorithm.steps)
    if owns and privacy.hides_costs:
        rank_zero_info(
            f"privacy.side_channels drop leaves out values that clients of {algorithm.name} measure with their own parameters."
        )
    if not data.reads_own_loaders:
        check_single_samples(flat_module, data, schedule)
    if flat_module.fabric.device.type != "cpu":
        rank_zero_info(f"{str(Float32.now()).capitalize()}; trainer.float32_precision sets both.")
    wanted = "lightning" if trainer.by_lightning else trainer.runner
    wanted = "serial" if algorithm.exchange.differs_in_steps else wanted
    engine.runner = build_runner(engine, wanted, trainer.clients_at_once)
    if capacities is not None:
        rank_zero_info(capacities.described())
    say_of_stacks(trainer, engine.runner)
    flat_module.load_server_model(run)  # checks may have changed the model
    return engine, privacy


def _features(
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
    features.append(RoundNotes(engine.flat_module, may_explode, privacy.hides_clients, trains_own, privacy.clip))
    # Before privacy: attackers clip what they have forged, and add noise to it, as all others do.
    if trainer.adversary is not None:
        weigh = partial(privacy.weights, method.aggregator)
        attackers = Attackers(trainer.adversary, engine.data, engine.flat_module.fabric, weigh)
        attackers.check(method, run, cohort_size)
        features.append(attackers)
    features += [RoundGuard(guard, run), privacy]
    if trainer.secure_aggregation is not None:
        features.append(SumsOfClients(trainer.secure_aggregation, privacy.hides_clients))
    # After all others: they stand around the training on each version.
    if method.pace is not None:
        features.append(WithoutBarrier(method.pace, time))
    return features


def device_group(trainer: TrainerInterface, schedule: LocalSchedule) -> DeviceGroup | None:
    """Return the processes that train each client together with this one; None if each trains its clients alone.

    Raises:
        UserError: the flags or the module do not allow such groups.
    """
    size, processes, flag = trainer.devices_per_client, trainer.world_size, "trainer.devices_per_client"
    if size == 1:
        return None
    require(
        processes % size == 0,
        f"{flag} is {size}, which does not divide the run's processes, of which trainer.devices × trainer.num_nodes are "
        f"{processes}.",
    )
    require(
        schedule.batch_size >= size,
        f"{flag} is {size}, more than the {schedule.batch_size} of data.batch_size, the samples that a group would share.",
    )
    require(
        trainer.runner != "stacked",
        f"{flag} is {size}, and runner 'stacked' trains several clients on one device: use one.",
    )
    require(
        not trainer.active_module.is_manual,
        f"{flag} is {size}, but {type(trainer.lightning_module).__name__} makes its steps itself (automatic_optimization is "
        "False), so that its gradients cannot be added up.",
    )
    return DeviceGroup.of(trainer.fabric, size, least_rows=2 if trainer.active_module.skips_single_samples else 1)


def _check_smaller(trainer: TrainerInterface, engine: Engine) -> None:
    """Raise `UserError` if the module cannot be cut for single clients, or a flag does not allow it."""
    name, exchange = engine.algorithm.name, engine.algorithm.exchange
    require(
        not trainer.by_lightning,
        f"clients of {name} train smaller networks, which runner 'lightning' cannot: use runner 'auto', 'serial' or 'stacked'.",
    )
    require(
        trainer.devices_per_client == 1,
        f"clients of {name} train smaller networks, each on one device: leave out trainer.devices_per_client.",
    )
    require(
        trainer.runner != "stacked" or not exchange.differs_in_steps,
        f"clients of {name} draw another width in every step, which a stack of clients cannot: use runner 'auto' or 'serial'.",
    )
    exchange.check_module(engine.flat_module.module, engine.data, name)
    engine.networks.check()


def _check_lightning(trainer: TrainerInterface) -> None:
    """Raise `UserError` if the method or a flag does not leave the steps to Lightning's own loop; say if `auto` chose it."""
    method, module = trainer.algorithm, trainer.lightning_module
    owns = bool(trainer.active_module.read_personal()) or method.model_keeper is not None
    why = ""
    if trainer.runner == "auto" and trainer.data.reads_own_loaders:
        why = "clients read loaders of their own, which only runner 'lightning' does"
    elif trainer.runner == "auto":
        why = f"{type(module).__name__} overrides {' and '.join(changes_steps(module))}, which only runner 'lightning' calls"
    check_lightning_runner(method.name, module, [*method.rules(), *method.personal], owns, why)
    require(
        trainer.devices_per_client == 1 and method.pace is None,
        "runner 'lightning' trains each client on one device, and in rounds: leave out devices_per_client, and methods without "
        "rounds.",
    )
    if why:
        rank_zero_info(f"{why}, so Lightning's own loop trains the clients, one after the other.")


def _population(
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


def _client_devices(trainer: TrainerInterface) -> ClientDevices | None:
    """Return the devices of a clock of clients; None for another clock.

    Raises:
        UserError: the clock's trace is malformed or lacks a client.
    """
    clock: Any = trainer.clock
    if trainer.algorithm.pace is not None:  # clients are parallel, whatever the clock
        clock = ClientClock(**{field.name: getattr(clock, field.name) for field in fields(clock)})
    if not clock.is_of_clients:
        return None
    return ClientDevices(clock, trainer.run, trainer.data.client_sizes, differ=not trainer.algorithm.pools_clients)


def _check_schedules(trainer: TrainerInterface, data: FederatedDataModule) -> None:
    """Check the lengths of the module's schedules against the rounds of the run and the steps of a client in a round."""
    schedules, module = trainer.active_module.optimizer.schedules, type(trainer.lightning_module).__name__
    schedules.check_rounds(module, trainer.num_rounds)
    if trainer.algorithm.trains_in_rounds:
        largest = int(data.client_sizes.argmax())
        schedules.check_steps(module, largest, trainer.most_local_steps, trainer.accumulate_grad_batches)


def _hook(trainer: TrainerInterface, name: str) -> Callable[..., None] | None:
    """Return a function that calls a hook; None if nobody has it, so that nothing is computed for it."""
    return partial(trainer.hooks.call, name) if trainer.hooks.listeners(name) else None


def _set_threads(trainer: TrainerInterface, work: int | None) -> None:
    """Let torch compute with the number of threads that suits a step's multiply-accumulates, and say so; only on a CPU."""
    if trainer.fabric.device.type != "cpu":
        return
    present = torch.get_num_threads()
    num_processes = trainer.world_size // trainer.num_nodes
    chosen = trainer.fabric.broadcast(choose_threads(trainer.threads, work, num_processes))
    torch.set_num_threads(chosen)
    if trainer.threads is None and chosen > 1 and is_busy(chosen * num_processes):
        rank_zero_info(
            f"Computing with {chosen} threads while other programs keep the machine busy: trainer.threads 1 may be much faster."
        )
    elif trainer.threads is None and chosen != present:
        rank_zero_info(
            f"Computing with {chosen} of {present} threads, because a step is small ({(work or 0) / 1e6:.1f} million "
            "multiply-accumulates); trainer.threads sets another number."
        )


def client_evaluator(trainer: TrainerInterface, trains: bool) -> ClientEvaluator:
    """Return the evaluation of clients outside `fit`, with the session's loaded model and the states of its run.

    Args:
        trainer: trainer in a validation or test.
        trains: True if clients will be fine-tuned.

    Raises:
        UserError: clients are to be fine-tuned, but the module has not exactly one optimiser.
    """
    flat_module, saved, data = trainer.active_module, trainer.evaluated, trainer.algorithm.arrange_data(trainer.data)
    rates = trainer.learning_rates if saved.run is None and "run" in vars(trainer) else saved.learning_rates
    follow_unfreezing.rebuild(flat_module, rates or {})
    schedule, run = _local_schedule(trainer, data), _new_run(flat_module)
    if saved.run is not None:
        empty: dict[str, Any] = {"clients": {}, "client_memory": {}, "server": {}, "server_memory": {}}
        run.load_state_dict({**saved.run, **empty})
    elif "run" in vars(trainer):
        run.seed, run.round, run.mask, run.unpruned = (
            getattr(trainer.run, name) for name in ("seed", "round", "mask", "unpruned")
        )
    for client, state in saved.states.items():
        run.clients[client] = state
    if trains and not flat_module.has_optimizer:
        _configure_optimizer(trainer)
        follow_unfreezing.rebuild(flat_module, rates or {})  # the groups of its optimiser
        if rates is not None:
            flat_module.optimizer.schedules.load_state_dict(rates, run.round)
    num_clients = int((data.client_sizes > 0).sum())
    context = RoundContext(run.layout, run.buffer_layout, num_clients, round=run.round, unpruned=run.unpruned)
    shared = shared_outside(trainer)
    return ClientEvaluator(flat_module, data, run, context, schedule, trainer.algorithm.personal, shared)


def shared_outside(trainer: TrainerInterface) -> Message:
    """Return what the server's steps would send down with the model that a validation or test measures.

    Empty if no client adapts the model by it, or if no run has made it.
    """
    algorithm, saved = trainer.algorithm, trainer.evaluated.run
    if adapter(algorithm.personal) is None:
        return {}
    fits = "run" in vars(trainer) and trainer.run.layout == trainer.active_module.layout
    server = trainer.run.server if fits else {}
    if saved is not None:
        run = _new_run(trainer.active_module)
        run.load_state_dict({**saved, "clients": {}, "client_memory": {}, "server_memory": {}})
        server = run.server
    return algorithm.share(server) if server.keys() == {*algorithm.step_names()} else {}


def _initial_run(flat_module: FlatModule, algorithm: Algorithm, network: Network) -> Run:
    run, steps = _new_run(flat_module), zip(algorithm.step_names(), algorithm.steps, strict=True)
    run.server = {key: step.init(flat_module.params) for key, step in steps}
    run.macs_at_start = network.macs
    return run


def _new_run(flat_module: FlatModule) -> Run:
    """Return a run that begins with the model that the flat module holds."""
    return Run(
        seed=_seed(),
        layout=flat_module.layout,
        buffer_layout=flat_module.buffer_layout,
        params=flat_module.params.clone(),
        buffers=flat_module.buffers.clone(),
        counters=flat_module.read_counters(),
        personal_layout=flat_module.personal_layout,
        personal_buffer_layout=flat_module.personal_buffers.layout,
        personal=flat_module.read_personal(),
    )


def _seed() -> int:
    """Return the seed of a run."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def _local_schedule(
    trainer: TrainerInterface, data: FederatedDataModule, cohort: tuple[int, int] | None = None
) -> LocalSchedule:
    """Return the schedule of the flags, and let the trainer know its length, which `configure_optimizers` may read.

    Args:
        trainer: trainer with the flags.
        data: data as the clients hold them.
        cohort: clients of a round and clients with samples, for a method that pools them; None outside a fit.
    """
    limit = trainer.limits["limit_train_batches"]
    require(
        limit is None or limit > 0,
        f"limit_train_batches is {limit}, so no client would train: give at least 1 batch or a fraction above 0.",
    )
    schedule = LocalSchedule(
        batch_size=data.batch_size,
        epochs=trainer.local_epochs,
        steps=trainer.local_steps,
        limit_batches=1.0 if limit is None else limit,
        accumulate=trainer.accumulate_grad_batches,
        clip_value=trainer.gradient_clip_val,
        # Without a barrier a checkpoint keeps the schedule, and holds plain values only.
        clip_algorithm="value" if trainer.gradient_clip_algorithm == "value" else "norm",
        reports_last_loss=trainer.loss_guard.clients is not None or _reads_last_losses(trainer),
        straggler_rate=trainer.straggler_rate,
        drop_last=data.drop_last,
        in_order=trainer.overfit_batches > 0,
        skips_single_samples=trainer.active_module.skips_single_samples,
    )
    pooled = cohort if trainer.algorithm.pools_clients else None
    if pooled is not None and isinstance(limit, int):  # a limit of each client's pass
        schedule = replace(schedule, limit_batches=limit * pooled[1])
    batches_per_epoch = schedule.pass_batches(int(data.client_sizes.max()))
    if pooled is not None:
        schedule = schedule.with_cohort(*pooled, batches_per_epoch)
    schedule = replace(schedule, most_steps=None if trainer.max_steps == -1 else trainer.max_steps)
    repeats, drawn = trainer.algorithm.rule.repeats, _most_steps_of_rule(trainer)
    longest = schedule if drawn is None else replace(schedule, epochs=None, steps=drawn)
    trainer.most_local_steps = replace(longest, repeat=repeats).num_steps(batches_per_epoch)
    trainer.round_batches = batches_per_epoch * repeats
    return schedule


def _most_steps_of_rule(trainer: TrainerInterface) -> int | None:
    """Return the steps of a client in the longest round if the rule decides on them in each; None if the flags do."""
    flat_module, rule, rounds = trainer.active_module, trainer.algorithm.rule, trainer.max_rounds
    context = RoundContext(flat_module.layout, flat_module.buffer_layout, 1, num_rounds=rounds)
    if rule.steps_in_round(context) is None:
        return None
    seed = _seed()
    return max(
        rule.steps_in_round(replace(context, round=number, draw=Draw((seed, number, CODEC)))) or 0
        for number in range(min(max(1, rounds), MOST_ROUNDS_AHEAD))
    )


def _reads_last_losses(trainer: TrainerInterface) -> bool:
    """True if the selection of clients reads the losses of their last training."""
    return trainer.selection is not None and Reads.LAST_LOSSES in trainer.selection.reads


def _configure_optimizer(trainer: TrainerInterface, adds_up: bool = False) -> None:
    """Set up the optimiser for the method; with `adds_up` for gradients that several processes add up."""
    flat_module, algorithm = trainer.active_module, trainer.algorithm
    steppers: list[Rule | Personal] = [*algorithm.rules(), *algorithm.personal]
    flat_gradient = any(Gradients.MINIBATCH in part.reads for part in steppers)
    by_sgd = trainer.client_optimizer == "sgd"
    begins_frozen = any(is_a(callback, BaseFinetuning) for callback in trainer.callbacks)
    flat_module.configure_optimizer(flat_gradient or adds_up, by_sgd, trainer.by_lightning, begins_frozen)
    trainer.strategy.adopt(flat_module.optimizer)
    for rule in algorithm.rules():
        if Gradients.REPRESENTATIONS in rule.reads:
            representation_layer(flat_module.module, rule)
    stepper = next((part for part in steppers if part.own_step), None)
    if stepper is not None and not flat_module.optimizer.is_plain_sgd:
        flag = "set --model.momentum 0, or " if flat_module.module.hparams.get("momentum") else ""
        raise UserError(
            f"{algorithm.name} makes the clients' steps itself, in place of plain SGD, {stepper.plain_sgd_reason}; "
            f"{type(flat_module.module).__name__} has {flat_module.optimizer.description}: "
            f"{flag}let configure_optimizers return torch.optim.SGD with momentum 0, or set --trainer.client_optimizer sgd "
            "to have that at the module's learning rate."
        )


def build_runner(
    engine: Engine, wanted: Literal["auto", "serial", "stacked", "lightning"], clients_at_once: int | None
) -> Runner:
    """Choose the runner that the flags, the module and the cohort allow, and try it on a first broadcast."""
    if wanted == "lightning":
        return LightningRunner()
    algorithm, run = engine.algorithm, engine.run
    provided = {name: torch.zeros_like(run.params) for name in algorithm.exchange.provides & algorithm.rule.needs}
    received = {"model": run.params, "buffers": run.buffers, **algorithm.share(run.server), **provided}
    job = ClientJob(algorithm.rule, engine.context, received, engine.schedule, run, personal=algorithm.personal)
    share = ceil(engine.population.cohort_size / engine.population.num_ranks)
    work = _work_of_a_step(engine.network, engine.data)
    if engine.group is not None or algorithm.pace is not None:
        wanted = "serial"
    flat_module = engine.flat_module
    runner = choose_runner(wanted, clients_at_once, flat_module, job, engine.data, work, share)
    return agreed_runner(gather_objects(flat_module.fabric, describe_runner(runner)))


def try_runner_again(trainer: TrainerInterface, engine: Engine) -> None:
    """Let clients train one after the other from now on if they were stacked, and more parameters train than a stack can.

    Raises:
        UserError: the flag asks for the runner `stacked`.
    """
    runner = describe_runner(engine.runner)
    if runner["wanted"] != "stacked":
        return
    try:
        engine.runner = build_runner(engine, **runner)
    except UserError as error:
        if trainer.runner == "stacked":
            raise
        rank_zero_info(f"Clients train one after the other from now on: {error}")
        engine.runner = serial
    trainer.active_module.load_server_model(trainer.run)  # the trial may have changed the model


def _work_of_a_step(network: Network, data: FederatedDataModule) -> int | None:
    """Return the multiply-accumulates of the forward pass of the largest batch; None if they cannot be counted."""
    return None if network.macs is None else network.macs * min(data.batch_size, int(data.client_sizes.max()))


def keep_client_states(trainer: TrainerInterface) -> Callable[[], Any] | None:
    """Make the folder of client states on each machine, if the trainer stores them on disk; it is deleted with the run.

    Returns:
        What deletes it earlier; None in a process that has made none.
    """
    if trainer.client_states == "memory":
        return None
    run = trainer.run
    parent = trainer.default_root_dir if trainer.client_states == "disk" else trainer.client_states
    made, delete = None, None
    if trainer.local_rank == 0:
        require_writable(parent, flag="client_states" if trainer.client_states != "disk" else "default_root_dir")
        made = tempfile.mkdtemp(prefix="client-states-", dir=parent)
        delete = finalize(run, shutil.rmtree, made, ignore_errors=True)
    folder = gather_objects(trainer.fabric, made)[trainer.global_rank - trainer.local_rank]
    run.keep_clients_on_disk(Path(folder), writes=trainer.local_rank == 0)
    return delete

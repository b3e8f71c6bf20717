"""Build the engine of a run from a trainer's flags, model, data and algorithm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_fl.algorithms.compatibility import sets_mask
from lightning_fl.checks.float32 import Float32
from lightning_fl.data.split_checks import check_dropped
from lightning_fl.engine.engine import Engine
from lightning_fl.engine.follow_pruning import require_prunable
from lightning_fl.engine.network import Network
from lightning_fl.engine.normalisation import check_single_samples
from lightning_fl.errors import require
from lightning_fl.features.asynchrony.refusals import check_pace
from lightning_fl.features.clock.client_capacities import client_capacities
from lightning_fl.features.privacy.mechanism import Mechanism
from lightning_fl.features.secure_aggregation import check_sums
from lightning_fl.link.messages import RoundObserver
from lightning_fl.processes import agree_on_model
from lightning_fl.slots import has_client_models
from lightning_fl.trainer.build_runner import build_runner, check_lightning, device_group, work_of_a_step
from lightning_fl.trainer.client_optimizer import configure_optimizer
from lightning_fl.trainer.compiling import compile_steps, say_of_stacks
from lightning_fl.trainer.features_of_run import cohort_sizes, features_around, population_of, privacy_of, time_of
from lightning_fl.trainer.lightning_interface import TrainerInterface
from lightning_fl.trainer.local_schedules import check_estimate, check_schedules, local_schedule
from lightning_fl.trainer.new_run import initial_run
from lightning_fl.trainer.threads import set_threads


def assemble(trainer: TrainerInterface) -> tuple[Engine, Mechanism]:
    """Set up the optimiser and `trainer.run`, check that all parts fit, choose a runner; return engine and privacy.

    The order of the calls decides which sentence a user reads if several parts do not fit.

    Args:
        trainer: trainer in a session, with its model on the accelerator.

    Raises:
        UserError: a part of the algorithm, the model, the data or a flag does not fit.
    """
    flat_module, algorithm = trainer.active_module, trainer.algorithm
    agree_on_model(flat_module)
    data = algorithm.arrange_data(trainer.data)
    check_dropped(data)
    num_eligible, num_senders, num_clients = cohort_sizes(trainer, data)
    own_schedule = replace(local_schedule(trainer, trainer.data), most_steps=None)  # of a whole local training
    schedule = local_schedule(trainer, data, (num_clients, num_eligible))
    check_estimate(trainer)
    num_clients = 1 if algorithm.pools_clients else num_clients
    group = device_group(trainer, schedule)
    if trainer.by_lightning:
        check_lightning(trainer)
    if trainer.compile:
        compile_steps(trainer)
    configure_optimizer(trainer, adds_up=group is not None or flat_module.compiled is not None)
    network = Network.of(flat_module, data)
    set_threads(trainer, work_of_a_step(network, data))
    run = trainer.run = initial_run(flat_module, algorithm, network)
    trains = algorithm.trains_in_rounds
    trainer.num_rounds = trainer.max_rounds if trains else min(1, trainer.max_rounds)
    check_schedules(trainer, data)
    num_selected = num_clients if trains else 0
    owns = bool(flat_module.personal.read()) or has_client_models(algorithm.personal)
    privacy = privacy_of(trainer, data, num_selected, owns)
    population = replace(population_of(trainer, data, num_selected, group), sampling=privacy.sampling)
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
        observer=_observer(trainer),
    )
    algorithm.check(engine.context, engine.server_side(), num_clients)
    if algorithm.exchange.cuts:
        _check_smaller(trainer, engine)
    time = time_of(trainer, engine, own_schedule)
    capacities = client_capacities(engine, time)
    engine.level = None if capacities is None else capacities.level
    engine.features = features_around(trainer, engine, time, privacy, num_clients, num_senders)
    _check_callbacks(trainer)
    trainer.loss_guard.check(engine.server_side(), algorithm.steps)
    if owns and privacy.hides_costs:
        rank_zero_info(
            f"privacy.side_channels drop leaves out values that clients of {algorithm.name} measure with their own parameters."
        )
    if not data.reads_own_loaders:
        check_single_samples(flat_module, data, schedule)
    if flat_module.fabric.device.type != "cpu":
        rank_zero_info(f"{str(Float32.now()).capitalize()}; trainer.float32_precision sets both.")
    wanted = "lightning" if trainer.by_lightning else trainer.runner
    engine.runner = build_runner(engine, wanted, trainer.clients_at_once, may_end=wanted == "auto")
    if capacities is not None:
        rank_zero_info(capacities.described())
    say_of_stacks(trainer, engine.runner)
    flat_module.load_server_model(run)  # checks may have changed the model
    return engine, privacy


def _observer(trainer: TrainerInterface) -> RoundObserver:
    """Return what calls the hooks of uploads and messages."""
    return RoundObserver(
        partial(trainer.hooks.call, "on_client_upload"),
        partial(trainer.hooks.call, "on_client_prepared"),
        _hook(trainer, "on_client_message"),
        _hook(trainer, "on_server_message"),
    )


def _hook(trainer: TrainerInterface, name: str) -> Callable[..., None] | None:
    """Return a function that calls a hook; None if nobody has it, so that nothing is computed for it."""
    return partial(trainer.hooks.call, name) if trainer.hooks.listeners(name) else None


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


def _check_callbacks(trainer: TrainerInterface) -> None:
    """Raise `UserError` if the method does not allow what a callback prunes."""
    for callback in trainer.callbacks:
        if getattr(callback, "removes_filters", False):
            require_prunable(trainer.algorithm, type(callback).__name__)
        if sets_mask(callback):
            trainer.algorithm.check_mask(type(callback).__name__)
            require(
                not any(step.sets_mask for step in trainer.algorithm.chain),
                f"{type(callback).__name__} would replace the pruning mask that {trainer.algorithm.name} sets: leave the "
                "callback out, or use another method, such as FedAvg.",
            )

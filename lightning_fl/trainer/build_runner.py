"""The runner that trains the clients of a run: its choice, and the flags that it does not allow."""

from __future__ import annotations

from math import ceil
from typing import Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_fl.checks import is_a
from lightning_fl.clients.choose_runner import Runner, agreed_runner, choose_runner, describe_runner
from lightning_fl.clients.client_job import ClientJob
from lightning_fl.clients.device_group import DeviceGroup
from lightning_fl.clients.local_schedule import LocalSchedule
from lightning_fl.clients.serial import serial
from lightning_fl.data import FederatedDataModule
from lightning_fl.engine.engine import Engine
from lightning_fl.engine.network import Network
from lightning_fl.errors import UserError, require
from lightning_fl.flat_module.hooks import changes_steps
from lightning_fl.processes import gather_objects
from lightning_fl.slots import RoundContext
from lightning_fl.trainer.lightning_interface import TrainerInterface
from lightning_fl.trainer.lightning_parts import OF_STEPS
from lightning_fl.trainer.lightning_runner import check_module_of_runner, lightning
from lightning_fl.trainer.rules_in_steps import check_rules_in_steps


def build_runner(
    engine: Engine,
    wanted: Literal["auto", "serial", "stacked", "lightning"],
    clients_at_once: int | None,
    may_end: bool,
) -> Runner:
    """Choose the runner that the flags, the module and the cohort allow, and try it on a first broadcast.

    Stacks that `may_end` do so once the module turns out not to allow them.
    """
    algorithm, run = engine.algorithm, engine.run
    if engine.group is not None or algorithm.pace is not None or algorithm.exchange.differs_in_steps:
        wanted = "serial"
    if wanted == "lightning":
        return lightning
    provided = {name: torch.zeros_like(run.params) for name in algorithm.exchange.provides & algorithm.rule.needs}
    received = {"model": run.params, "buffers": run.buffers, **algorithm.share(run.server), **provided}
    job = ClientJob(algorithm.rule, engine.context, received, engine.schedule, run, personal=algorithm.personal)
    share = ceil(engine.population.cohort_size / engine.population.num_ranks)
    work = work_of_a_step(engine.network, engine.data)
    flat_module = engine.flat_module
    runner = choose_runner(wanted, clients_at_once, flat_module, job, engine.data, work, share)
    return agreed_runner(gather_objects(flat_module.fabric, describe_runner(runner)), may_end)


def try_runner_again(trainer: TrainerInterface, engine: Engine) -> None:
    """Let clients train one after the other from now on if they were stacked, and more parameters train than a stack can.

    Raises:
        UserError: the flag asks for the runner `stacked`.
    """
    runner = describe_runner(engine.runner)
    if runner["wanted"] != "stacked":
        return
    try:
        engine.runner = build_runner(engine, **runner, may_end=trainer.runner == "auto")
    except UserError as error:
        if trainer.runner == "stacked":
            raise
        rank_zero_info(f"Clients train one after the other from now on: {error}")
        engine.runner = serial
    trainer.active_module.load_server_model(trainer.run)  # the trial may have changed the model


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


def check_lightning(trainer: TrainerInterface) -> None:
    """Raise `UserError` if the method or a flag does not leave the steps to Lightning's own loop; say if `auto` chose it."""
    method, module = trainer.algorithm, trainer.lightning_module
    why = ""
    if trainer.runner == "auto" and trainer.data.reads_own_loaders:
        why = "clients read loaders of their own, which only runner 'lightning' does"
    elif trainer.runner == "auto" and (hooks := changes_steps(module)):
        why = f"{type(module).__name__} overrides {' and '.join(hooks)}, which only runner 'lightning' calls"
    elif trainer.runner == "auto":
        names = sorted({type(callback).__name__ for callback in trainer.callbacks if is_a(callback, *OF_STEPS)})
        why = f"{' and '.join(names)} {'needs' if len(names) == 1 else 'need'} runner 'lightning'"
    check_module_of_runner(module)
    flat_module = trainer.active_module
    context = RoundContext(flat_module.layout, flat_module.buffer_layout, 1, num_rounds=trainer.max_rounds)
    check_rules_in_steps(method, module, context, trainer.data.reads_own_loaders, why)
    require(
        trainer.devices_per_client == 1 and method.pace is None,
        "runner 'lightning' trains each client on one device, and in rounds: leave out devices_per_client, and methods without "
        "rounds.",
    )
    if why:
        rank_zero_info(f"{why}, so Lightning's own loop trains the clients, one after the other.")


def work_of_a_step(network: Network, data: FederatedDataModule) -> int | None:
    """Return the multiply-accumulates of the forward pass of the largest batch; None if they cannot be counted."""
    return None if network.macs is None else network.macs * min(data.batch_size, int(data.client_sizes.max()))

"""Times of rounds: serial clients, stacked clients and a bare loop; and stacks of more and more clients."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from peers import Work
from round_time import BareLoop

from gpu import Plan, Row, allow_tf32, in_federation, in_turns, kernels, now, sentence
from lightning_fl.clients.serial import serial
from lightning_fl.clients.stacked import Stacked
from lightning_fl.engine.engine import Engine
from lightning_fl.engine.round import train_round
from lightning_fl.errors import UserError

NETWORKS = ("lenet5", "cnn", "vgg11", "resnet18")
PRECISIONS = {"": "32-true", ", tf32": "32-true", ", bf16": "bf16-mixed"}


def rounds(plan: Plan) -> None:
    """Time rounds of serial and stacked clients and of the bare loop, in turns."""
    few, many = plan.sizes.cohorts
    cells = [(name, few, "") for name in NETWORKS]
    cells += [("resnet18", few, ", tf32"), ("resnet18", few, ", bf16")]
    cells += [(name, many, "") for name in NETWORKS]
    for index, (name, clients, precision) in enumerate(cells):
        allow_tf32(precision == ", tf32")
        seconds = plan.seconds_left / (len(cells) - index)
        label = Row("rounds", f"{name} × {clients}{precision}", "all ways")
        plan.attempt(label, partial(_cell, label, name, clients, PRECISIONS[precision], plan, seconds))
    allow_tf32(False)


def _cell(label: Row, name: str, clients: int, precision: str, plan: Plan, seconds: float) -> None:
    def measure(engine: Engine, work: Work) -> None:
        loop = BareLoop(work, Namespace(device=plan.device, precision=precision))
        ways = {"serial": our_round(engine, serial)}
        if engine.runner is not serial:
            ways["stacked"] = our_round(engine, engine.runner)
        ways["bare loop"] = loop.round
        for way, timed in in_turns(ways, plan.sizes.turns, seconds / 2).items():
            median = timed.ms[1]
            busy = busy_share(ways[way], median, plan, profiles=clients == plan.sizes.cohorts[0])
            per_second, turns = 1e3 * clients / median, {"turns": len(timed.seconds)}
            plan.add(Row("rounds", label.case, way, timed.ms, per_second, timed.peak_mb, busy, numbers=turns))

    try:
        in_federation(name, clients, plan, measure, precision)
    except UserError as error:  # torch maps some operations in 32 bits only
        if precision == "32-true":
            raise
        plan.add(replace(label, way="stacked", skipped=sentence(error)))
        in_federation(name, clients, plan, measure, precision, runner="serial")


def our_round(engine: Engine, runner: Callable[..., Any]) -> Callable[[], Any]:
    """Return a function that trains one round with this runner."""

    def train() -> None:
        engine.runner = runner
        train_round(engine)

    return train


def busy_share(way: Callable[[], Any], ms: float, plan: Plan, profiles: bool) -> float | None:
    """Return the share of time in which the GPU runs kernels during rounds of `ms` milliseconds, or None if it is unknown.

    NVML reports it after a second of rounds; without pynvml it is the kernel time of a profiled round ÷ `ms`, with `profiles`
    only, because profiling many clients takes too long.
    """
    if plan.device != "cuda":
        return None
    try:
        torch.cuda.utilization()
    except Exception:  # pynvml is not installed, or NVML does not answer
        return 1e3 * sum(kernels(way)[1].values()) / ms if profiles else None
    begun = now()
    while now() - begun < plan.sizes.busy_seconds:
        way()
    return torch.cuda.utilization() / 100


def at_once(plan: Plan) -> None:
    """Time rounds in stacks of 1, 4, 16 … clients."""
    allow_tf32(False)
    for name, clients in plan.sizes.at_once:
        label = Row("at-once", f"{name} × {clients}", "all stacks")
        plan.attempt(label, partial(_stacks, label, name, clients, plan))


def _stacks(label: Row, name: str, clients: int, plan: Plan) -> None:
    def measure_size(size: int, engine: Engine, row: Row) -> None:
        train = our_round(engine, Stacked(size))
        timed = in_turns({"": train}, min(3, plan.sizes.turns), seconds=2)[""]
        per_second = 1e3 * clients / timed.ms[1]
        plan.add(replace(row, ms=timed.ms, clients_per_second=per_second, peak_mb=timed.peak_mb))

    def measure(engine: Engine, work: Work) -> None:
        sizes = [4**power for power in range(10) if 4**power <= clients]
        for size in reversed(sizes):  # the fastest first
            row = replace(label, way=f"{size} at once")
            plan.attempt(row, partial(measure_size, size, engine, row))

    in_federation(name, clients, plan, measure)

"""One epoch of many clients with steps that torch compiles, on a GPU CUDA graphs, in turns with eager ones and with stacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from peers import Work

from gpu import Plan, Row, allow_tf32, in_federation, in_turns
from gpu.rounds import our_round
from lightning_fl.clients.serial import serial
from lightning_fl.clients.stacked import Stacked, even_size
from lightning_fl.engine.engine import Engine
from lightning_fl.flat_module import graph

NETWORK = "cnn"
STACKS = 10, 64


def compiled(plan: Plan) -> None:
    """Time a round of many clients, eager and compiled, one after the other and in stacks."""
    allow_tf32(False)
    if plan.device != "cuda":
        graph.BACKEND = "aot_eager"  # in small, without a C++ compiler
    clients = plan.sizes.cohorts[1]
    label = Row("compiled", f"{NETWORK} × {clients}", "all ways")
    plan.attempt(label, partial(_cell, label, clients, plan))


def _cell(label: Row, clients: int, plan: Plan) -> None:
    def measure(engine: Engine, work: Work) -> None:
        flat_module = engine.flat_module
        step = flat_module.compiled
        assert step is not None

        def way(runner: Callable[..., Any], compiles: bool) -> Callable[[], None]:
            train = our_round(engine, runner)

            def run() -> None:
                flat_module.compiled = step if compiles else None
                train()

            return run

        ways = {"serial, eager": way(serial, False), "serial, compiled": way(serial, True)}
        for size in STACKS:
            stacked = Stacked(even_size(clients, size))
            ways[f"stacks of up to {size}, eager"] = way(stacked, False)
            ways[f"stacks of up to {size}, compiled"] = way(stacked, True)
        for name, timed in in_turns(ways, plan.sizes.turns, plan.seconds_left / 2).items():
            row = replace(label, way=name, ms=timed.ms, peak_mb=timed.peak_mb)
            row = replace(row, clients_per_second=1e3 * clients / timed.ms[1])
            plan.add(replace(row, failed=step.why_not) if step.why_not and "compiled" in name else row)

    in_federation(NETWORK, clients, plan, measure, compiles=True)

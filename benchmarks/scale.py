"""Measure how time and memory grow with the number of clients, the cohort and the model.

    python benchmarks/scale.py                                   # see docs/explanation/speed.md
    python benchmarks/scale.py --clients 100 100000              # one table with your own points
    python benchmarks/scale.py --states memory disk --clients 1000 10000

Every point runs in its own process, so that peaks can be compared. The model is one linear layer of the given size on random
features. Each client has two samples and trains two steps; nothing is evaluated or saved. So the figures are the cost of the
federation itself.

- start: time from `fit` to the first round: splitting the data, setting up.
- select: time to draw the cohort and its drop-outs, per round.
- round: time of a whole round, median of those after the first.
- data, peak: resident memory before `fit`, and its maximum afterwards, in MB.
- vectors: the difference in model vectors of 32 bits.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from datetime import date
from itertools import pairwise
from typing import Any

GRIDS = {
    "clients": [100, 1_000, 10_000, 100_000],
    "cohort": [10, 100, 1_000],
    "parameters": [100_000, 1_000_000, 10_000_000],
}
OUTPUTS = 10
SAMPLES = 2


@dataclass(frozen=True)
class Point:
    """One configuration to measure.

    Attributes:
        clients: number of clients in the federation.
        cohort: number of clients in a round.
        parameters: number of parameters of the model, rounded down to whole features.
        states: place where each client keeps a vector as long as the model: nowhere (`none`), in `memory` or on `disk`.
        partition: partition of the data, a class of `lightning_fl.data`.
        rounds: number of rounds that count, after one to warm up.
        dropout_rate: the trainer's `dropout_rate`.
    """

    clients: int = 1_000
    cohort: int = 10
    parameters: int = 100_000
    states: str = "none"
    partition: str = "IID"
    rounds: int = 5
    dropout_rate: float = 0.0


def measure(point: Point) -> dict[str, float]:
    """Run a point in this process."""
    import lightning as L  # noqa: N812
    import torch

    from lightning_fl import FederatedTrainer, data
    from lightning_fl.algorithms import Algorithm
    from lightning_fl.engine.population import Population
    from lightning_fl.rules import LocalOptimizer
    from lightning_fl.slots import LocalTraining, Message, Rule

    class Keeping(Rule):
        """Keep the last delta of every client."""

        def finish(self, local: LocalTraining) -> Message:
            delta = local.params - local.received["model"]
            local.state = {"last": delta}
            return {"model": delta}

    class Classifier(L.LightningModule):
        def __init__(self, features: int) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(features, OUTPUTS, bias=False)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            rows, labels = batch
            # Repeat the few features of the data: a large model on data of any size.
            wide = rows.repeat(1, self.layer.in_features // rows.shape[1])
            return torch.nn.functional.cross_entropy(self.layer(wide), labels)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    selecting: list[float] = []
    select, answering = Population.select, Population.answering

    def timed(original: Any) -> Any:
        def call(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = original(*arguments)
            selecting.append(time.perf_counter() - started)
            return result

        return call

    Population.select, Population.answering = timed(select), timed(answering)  # type: ignore[method-assign]

    class Clock(L.Callback):
        seconds: list[float] = []  # noqa: RUF012

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            self.seconds.append(time.perf_counter())

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.seconds.append(time.perf_counter())

    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    num_samples = SAMPLES * point.clients
    rows, labels = torch.randn(num_samples, 10), torch.arange(num_samples) % OUTPUTS
    arrays = data.Arrays(
        train=(rows, labels),
        test=(rows[:10], labels[:10]),
        num_clients=point.clients,
        batch_size=1,
        partition=getattr(data, point.partition)(),
    )
    module = Classifier(point.parameters // (10 * OUTPUTS) * 10)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            max_rounds=point.rounds + 1,
            clients_per_round=point.cohort,
            dropout_rate=point.dropout_rate,
            client_states="disk" if point.states == "disk" else "memory",
            callbacks=clock,
            default_root_dir=folder,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        before = resident()
        started = time.perf_counter()
        rule = LocalOptimizer() if point.states == "none" else Keeping()
        trainer.fit(module, arrays, Algorithm(rule=rule), verbose=False)
        moments = clock.seconds
        lengths = [later - earlier for earlier, later in pairwise(moments)][1:]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return {
            "start": moments[0] - started,
            "select": sum(selecting) / (point.rounds + 1),
            "round": statistics.median(lengths),
            "data": before,
            "peak": peak,
            "vectors": (peak - before) * 2**20 / (4 * point.parameters),
        }


def resident() -> float:
    """Return the resident memory of this process in MB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


def in_own_process(point: Point) -> dict[str, float]:
    """Run `measure` in a fresh interpreter."""
    command = [sys.executable, __file__, "--point", json.dumps(asdict(point))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def table(points: list[Point]) -> None:
    """Measure and print points, one row each."""
    print(" clients  cohort  parameters  states   start s  select ms   round ms   data MB   peak MB  vectors")
    for point in points:
        m = in_own_process(point)
        print(
            f"{point.clients:>8,}{point.cohort:>8,}{point.parameters:>12,}  {point.states:<7}{m['start']:>9.2f}"
            f"{1e3 * m['select']:>11.2f}{1e3 * m['round']:>11.1f}{m['data']:>10.0f}{m['peak']:>10.0f}{m['vectors']:>9.1f}",
            flush=True,
        )


def main() -> None:
    """Parse the command line and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clients", type=int, nargs="+")
    parser.add_argument("--cohort", type=int, nargs="+")
    parser.add_argument("--parameters", type=int, nargs="+")
    parser.add_argument("--states", choices=("none", "memory", "disk"), nargs="+", default=["none"])
    parser.add_argument("--partition", default="IID")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dropout-rate", type=float, default=0.0)
    parser.add_argument("--point", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.point:
        print(json.dumps(measure(Point(**json.loads(options.point)))))
        return
    print(
        f"{date.today()}, {platform.processor() or platform.machine()}, one thread, medians of {options.rounds} rounds"
    )
    common = Point(partition=options.partition, rounds=options.rounds, dropout_rate=options.dropout_rate)
    given = {name: getattr(options, name) for name in GRIDS if getattr(options, name)}
    if not given:
        for name, values in GRIDS.items():
            table([replace(common, **{name: value}) for value in values])  # type: ignore[arg-type]
        return
    points = [replace(common, states=states) for states in options.states]
    for name, values in given.items():
        points = [replace(point, **{name: value}) for point in points for value in values]  # type: ignore[arg-type]
    table(points)


if __name__ == "__main__":
    main()

"""Time a round on different numbers of threads, on an idle and on a busy machine.

    python benchmarks/threads.py                                  # see docs/explanation/speed.md
    python benchmarks/threads.py --network cnn --threads 1 2 4 8  # one network on a larger machine

The thread numbers take turns within one process. On the busy machine every core also runs another program that never waits. The
last column is the number that the trainer would choose, and its time ÷ the best one's.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date

import lightning
import torch
from round_time import LEARNING_RATE, QUIET, federation_of, noise

from lightning_fl import FederatedTrainer
from lightning_fl.modules import ImageClassifier
from lightning_fl.trainer.threads import choose_threads

CLIENTS = 2


class TakeTurns(lightning.pytorch.Callback):
    """Give each round another number of threads, and time it."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers
        self.seconds: dict[int, list[float]] = {number: [] for number in numbers}
        self._started = 0.0

    def on_train_epoch_start(self, trainer: FederatedTrainer, pl_module: lightning.LightningModule) -> None:
        """Set the number of threads and read the clock."""
        torch.set_num_threads(self.numbers[trainer.current_epoch % len(self.numbers)])
        self._started = time.perf_counter()

    def on_train_epoch_end(self, trainer: FederatedTrainer, pl_module: lightning.LightningModule) -> None:
        """Time the round."""
        self.seconds[torch.get_num_threads()].append(time.perf_counter() - self._started)


def measure(network: str, batch_size: int, options: argparse.Namespace) -> tuple[dict[int, float], int]:
    """Return the median seconds of a round on each number of threads, and the number that the trainer would choose."""
    images, labels = noise(CLIENTS * batch_size * options.steps)
    if network == "cnn_mnist":
        images = images[:, :1, 2:30, 2:30]
    turns = TakeTurns(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            max_rounds=len(options.threads) * (options.turns + 1),
            clients_per_round=CLIENTS,
            runner="serial",
            threads=max(options.threads),
            accelerator="cpu",
            default_root_dir=folder,
            callbacks=[turns],
            **QUIET,
        )
        data = federation_of(images, labels, CLIENTS, batch_size)
        trainer.fit(ImageClassifier(network, learning_rate=LEARNING_RATE), data, verbose=False)
    torch.set_num_threads(max(options.threads))
    macs = trainer.run.macs_at_start
    chosen = choose_threads(None, None if macs is None else macs * batch_size, 1)
    return {number: statistics.median(seconds[1:]) for number, seconds in turns.seconds.items()}, chosen


@contextmanager
def busy(num_programs: int) -> Iterator[None]:
    """Run programs that compute without a pause."""
    programs = [multiprocessing.get_context("spawn").Process(target=_compute, daemon=True) for _ in range(num_programs)]
    for program in programs:
        program.start()
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.join()


def _compute() -> None:
    parent = os.getppid()
    while os.getppid() == parent:  # ends with the benchmark, even if that is killed
        pass


def main() -> None:
    """Parse the command line and print the table."""
    cores = os.cpu_count() or 1
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--network", nargs="+", default=["linear", "cnn_mnist", "lenet5", "cnn", "resnet32", "vgg11", "resnet18"]
    )
    parser.add_argument("--batch-size", type=int, nargs="+", default=[2, 10, 50])
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, 2, cores}))
    parser.add_argument("--steps", type=int, default=3, help="steps of each of the two clients")
    parser.add_argument("--turns", type=int, default=3, help="rounds that count for each number, after one to warm up")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    numbers = " ".join(f"{f'{number} thr.':>9}" for number in options.threads)
    print(
        f"{date.today()}, {platform.processor() or platform.machine()}, {cores} cores, torch {torch.__version__}, ms of a round"
    )
    print(f"{'network':<10} {'batch':>5} {'machine':<7} {numbers}   chosen, ÷ best")
    for network in options.network:
        for batch_size in options.batch_size:
            for machine, num_programs in (("idle", 0), ("busy", cores)):
                with busy(num_programs):
                    seconds, chosen = measure(network, batch_size, options)
                times = " ".join(f"{1e3 * value:>9.1f}" for value in seconds.values())
                ratio = f"{seconds[chosen] / min(seconds.values()):.2f}" if chosen in seconds else "not measured"
                print(f"{network:<10} {batch_size:>5} {machine:<7} {times}   {chosen}, {ratio}", flush=True)


if __name__ == "__main__":
    main()

"""Time stacks of clients against one client after the other on a CPU, by the size of a stack.

    python benchmarks/stacks.py                              # see docs/explanation/speed.md
    python benchmarks/stacks.py --network cnn --at-once 16   # one point

Every figure is the median round of a fit with that many clients at once ÷ the median round of the serial runner, in computing
time of the process, so that other programs disturb it little. One thread, 64 clients, three steps each.
"""

from __future__ import annotations

import argparse
import logging
import platform
import statistics
import tempfile
import time
from datetime import date
from typing import Any

import lightning
import torch
from round_time import LEARNING_RATE, QUIET, federation_of, noise

from lightning_fl import FederatedTrainer
from lightning_fl.modules import ImageClassifier


class Clock(lightning.pytorch.Callback):
    """Time each round."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._started = 0.0

    def on_train_epoch_start(self, trainer: FederatedTrainer, pl_module: lightning.LightningModule) -> None:
        """Read the clock."""
        self._started = time.process_time()

    def on_train_epoch_end(self, trainer: FederatedTrainer, pl_module: lightning.LightningModule) -> None:
        """Read the clock again."""
        self.seconds.append(time.process_time() - self._started)


def measure(network: str, batch_size: int, options: argparse.Namespace, **flags: Any) -> tuple[float, int | None]:
    """Return the median seconds of a round after the first, and the multiply-accumulates of a sample."""
    images, labels = noise(options.clients * batch_size * options.steps)
    if network == "cnn_mnist":
        images = images[:, :1, 2:30, 2:30]
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            max_rounds=options.turns + 1,
            clients_per_round=options.clients,
            threads=1,
            accelerator="cpu",
            default_root_dir=folder,
            callbacks=[clock],
            **QUIET,
            **flags,
        )
        data = federation_of(images, labels, options.clients, batch_size)
        trainer.fit(ImageClassifier(network, learning_rate=LEARNING_RATE), data, verbose=False)
    return statistics.median(clock.seconds[1:]), trainer.run.macs_at_start


def main() -> None:
    """Parse the command line and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--network", nargs="+", default=["linear", "cnn_mnist", "lenet5", "cnn"])
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 2, 5])
    parser.add_argument("--at-once", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--turns", type=int, default=3, help="rounds that count, after one to warm up")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    print(f"{date.today()}, {platform.processor() or platform.machine()}, torch {torch.__version__}, stacked ÷ serial")
    print("network    batch  million MACs  serial ms " + " ".join(f"{number:>6}" for number in options.at_once))
    for network in options.network:
        for batch_size in options.batch_size:
            serial, macs = measure(network, batch_size, options, runner="serial")
            ratios = [
                measure(network, batch_size, options, runner="stacked", clients_at_once=number)[0] / serial
                for number in options.at_once
            ]
            shown = " ".join(f"{ratio:>6.2f}" for ratio in ratios)
            print(
                f"{network:<10}{batch_size:>6}{(macs or 0) * batch_size / 1e6:>14.2f}{1e3 * serial:>11.0f} {shown}",
                flush=True,
            )


if __name__ == "__main__":
    main()

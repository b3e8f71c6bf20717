"""Time of a federated round against a bare PyTorch loop that does the same work.

    python benchmarks/round_time.py --network cnn --samples 400
    python benchmarks/round_time.py                       # the table of docs/benchmarks.md
    python benchmarks/round_time.py --device cuda --precision bf16-mixed --clients 100 --runner auto
    python benchmarks/round_time.py --ranks 2             # our round in two processes, the bare loops in one

Our round and two hand-written loops (NCHW and channels_last) take turns in one process, each on the same clients, batches and
epochs. The bare loop loads the global weights into one module, runs plain SGD with `torch.optim.SGD`, and adds the result to a
weighted average: what nobody can leave out. Nothing is evaluated or saved. The ratio is our time ÷ the bare loop's in the same
turn, so that a busy machine disturbs both alike; `best` is the faster of the two loops.

With `--device cuda` a clock is read when the device has done all it was given. The bare loops take the precision as well, by
`torch.autocast` or by a cast of the model. With `--ranks` Lightning starts this program once more for every further process;
all but the first wait while the bare loops run.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import statistics
import time
from datetime import date

import lightning
import torch
from torch import Tensor, nn

from lightning_fl import FederatedTrainer, algorithms
from lightning_fl.data import Arrays
from lightning_fl.modules import ImageClassifier, network

LEARNING_RATE = 0.01
TRUE_DTYPES = {"bf16-true": torch.bfloat16, "64-true": torch.float64}


class BareLoop:
    """FedAvg by hand: one module, one optimiser, a weighted average."""

    def __init__(
        self, net: nn.Module, clients: list[tuple[Tensor, Tensor]], options: argparse.Namespace, nhwc: bool
    ) -> None:
        memory_format = torch.channels_last if nhwc else torch.contiguous_format
        device, dtype = torch.device(options.device), TRUE_DTYPES.get(options.precision, torch.float32)
        self.net = net.to(device, dtype, memory_format=memory_format)  # type: ignore[call-overload]
        self.clients = [(x.to(device, dtype, memory_format=memory_format), y.to(device)) for x, y in clients]
        self.batch, self.epochs = options.batch_size, options.epochs
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=options.precision == "bf16-mixed")
        self.weights = [p.detach().clone() for p in self.net.parameters()]

    def round(self) -> None:
        """One round over all clients."""
        optimizer = torch.optim.SGD(self.net.parameters(), lr=LEARNING_RATE)
        total = [torch.zeros_like(w) for w in self.weights]
        samples = sum(len(y) for _, y in self.clients)
        self.net.train()
        for x, y in self.clients:
            with torch.no_grad():
                for parameter, weight in zip(self.net.parameters(), self.weights, strict=True):
                    parameter.copy_(weight)
            for _ in range(self.epochs):
                order = torch.randperm(len(y), device=y.device)
                for start in range(0, len(y), self.batch):
                    chosen = order[start : start + self.batch]
                    optimizer.zero_grad()
                    with self.autocast:
                        loss = nn.functional.cross_entropy(self.net(x[chosen]), y[chosen])
                    loss.backward()
                    optimizer.step()
            with torch.no_grad():
                for part, parameter in zip(total, self.net.parameters(), strict=True):
                    part.add_(parameter, alpha=len(y) / samples)
        self.weights = total


class Alternate(lightning.pytorch.Callback):
    """Times each round of a federation, and runs the bare loops after it."""

    def __init__(self, loops: dict[str, BareLoop]) -> None:
        self.loops = loops
        self.seconds: dict[str, list[float]] = {name: [] for name in ("ours", *loops)}
        self._started = 0.0

    def on_train_epoch_start(self, trainer: FederatedTrainer, pl_module: lightning.LightningModule) -> None:
        """The round begins, in all processes."""
        trainer.fabric.barrier()
        self._started = now()

    def on_train_epoch_end(self, trainer: FederatedTrainer, pl_module: lightning.LightningModule) -> None:
        """The round is over; there is no validation in it."""
        self.seconds["ours"].append(now() - self._started)
        for name, loop in self.loops.items() if trainer.is_global_zero else ():
            started = now()
            loop.round()
            self.seconds[name].append(now() - started)


def now() -> float:
    """The time in seconds at which all work given to the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(name: str, samples: int, options: argparse.Namespace) -> None:
    """Print one row: times of a round and their ratios."""
    torch.manual_seed(0)
    num_images = options.clients * samples
    images, labels = torch.rand(num_images, 3, 32, 32), torch.randint(0, 10, (num_images,))
    clients = list(zip(images.split(samples), labels.split(samples), strict=True))
    loops = {
        "nchw": BareLoop(network(name, 10), clients, options, nhwc=False),
        "nhwc": BareLoop(network(name, 10), clients, options, nhwc=True),
    }
    alternate = Alternate(loops)
    trainer = FederatedTrainer(
        max_rounds=options.turns + 1,
        clients_per_round=options.clients,
        local_epochs=options.epochs,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        runner=options.runner,
        precision=options.precision,
        accelerator=options.device,
        devices=options.ranks,
        callbacks=[alternate],
    )
    data = Arrays(
        train=(images, labels),
        test=(images[:10], labels[:10]),
        num_classes=10,
        num_clients=options.clients,
        batch_size=options.batch_size,
    )
    trainer.fit(ImageClassifier(name, learning_rate=LEARNING_RATE), data, getattr(algorithms, options.algorithm)())
    if not trainer.is_global_zero:
        return
    seconds = {key: values[1:] for key, values in alternate.seconds.items()}  # the first turn warms up
    best = [min(pair) for pair in zip(seconds["nchw"], seconds["nhwc"], strict=True)]
    row = [f"{name:<10}{samples:>8}", *(f"{1e3 * statistics.median(v):>10.1f}" for v in seconds.values())]
    for loop in (seconds["nchw"], best):
        ratios = sorted(ours / bare for ours, bare in zip(seconds["ours"], loop, strict=True))
        row.append(f"   {ratios[0]:.2f} {statistics.median(ratios):.2f} {ratios[-1]:.2f}")
    print(" ".join(row), flush=True)


def main() -> None:
    """Parse the command line and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--network", action="append", help="lenet5 and cnn if not given")
    parser.add_argument("--samples", type=int, action="append", help="per client; 2 and 400 if not given")
    parser.add_argument("--clients", type=int, default=10, help="clients of a round, which are all there are")
    parser.add_argument("--batch-size", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--turns", type=int, default=9, help="rounds that count, after one to warm up")
    parser.add_argument("--algorithm", default="FedAvg")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--runner", default="auto", help="as the trainer's")
    parser.add_argument("--ranks", type=int, default=1, help="processes that our round is spread over")
    parser.add_argument("--precision", choices=("32-true", "bf16-mixed", *TRUE_DTYPES), default="32-true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        machine = platform.processor() or platform.machine()
        if options.device == "cuda":
            machine = torch.cuda.get_device_name()
        print(
            f"{date.today()}, {machine}, {options.ranks} process(es) of {options.threads} thread(s), torch {torch.__version__}; "
            f"{options.algorithm}, {options.precision}, runner {options.runner}, {options.clients} clients, "
            f"batch {options.batch_size}, {options.epochs} epochs, median of {options.turns} turns in ms"
        )
        print(
            "network    samples       ours       nchw       nhwc   ours/nchw        ours/best of both (min median max)"
        )
    for name in options.network or ["lenet5", "cnn"]:
        for samples in options.samples or [2, 400]:
            measure(name, samples, options)


if __name__ == "__main__":
    main()

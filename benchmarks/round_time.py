"""Time a federated round against a bare PyTorch loop that does the same work.

    python benchmarks/round_time.py --network cnn --samples 400
    python benchmarks/round_time.py                       # see docs/explanation/speed.md
    python benchmarks/round_time.py --device cuda --precision bf16-mixed --clients 100 --runner auto
    python benchmarks/round_time.py --network wide --samples 20 --epochs 1  # copies of the model decide
    python benchmarks/round_time.py --network wide --samples 20 --epochs 1 --algorithm SCAFFOLD
    python benchmarks/round_time.py --ranks 2             # our round in two processes, the bare loops in one
    python benchmarks/round_time.py --ranks 2 --devices-per-client 2 --clients 1  # both train the one client together
    python benchmarks/round_time.py --epochs 1 --samples 2 --outputs  # one small step, with metrics.csv, bar and checkpoints
    python benchmarks/round_time.py --peer pfl --peer flower  # also other simulators, if they are installed

Our round and two hand-written loops (NCHW and channels_last) alternate in one process, each on the same clients, batches and
epochs. The bare loop does only the necessary work: it loads the global weights into one module, runs plain SGD with
`torch.optim.SGD`, and adds the result to a weighted average; with `--algorithm SCAFFOLD` it has control variates, too. Nothing
is evaluated. Our time is that from one round's start to the next; `--outputs` adds what a run writes after every round. The
ratio is our time ÷ the bare loop's in the same turn, so that a busy machine affects both alike; `best` is the faster of the two
loops.

With `--device cuda` the clock is read after the device has finished all work. The bare loops use the same precision, by
`torch.autocast` or by a cast of the model. With `--ranks` Lightning starts this program once more for every further process;
all except the first wait while the bare loops run.

`--peer` adds other simulators to the turns (`benchmarks/peers/`), after checking that a round of each gives the bare loop's
model. If other programs keep the machine busy, `--clock cpu` counts only the computing time of this process.
"""

from __future__ import annotations

import argparse
import copy
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from datetime import date
from typing import Any

import lightning
import peers
import torch
from peers import Peer, Work
from torch import Tensor, nn

from lightning_fl import FederatedTrainer
from lightning_fl.data import Arrays
from lightning_fl.errors import UserError
from lightning_fl.modules import ImageClassifier, network

LEARNING_RATE = 0.01
TRUE_DTYPES = {"bf16-true": torch.bfloat16, "64-true": torch.float64}
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
WIDE = "wide"
"""One linear layer of 9.8 million parameters, so that copies of the model decide how long a round takes."""
QUIET: dict[str, Any] = {
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Flags of a trainer that only trains."""
OUTPUTS: dict[str, Any] = {"logger": None, "enable_checkpointing": True, "enable_progress_bar": True}
"""Flags of one that also writes what a run writes by default."""


class BareLoop:
    """FedAvg by hand: one module, one optimiser, a weighted average."""

    def __init__(self, work: Work, options: argparse.Namespace, nhwc: bool = False) -> None:
        memory_format = torch.channels_last if nhwc else torch.contiguous_format
        device, dtype = torch.device(options.device), TRUE_DTYPES.get(options.precision, torch.float32)
        self.work = work
        self.net = copy.deepcopy(work.net).to(device, dtype, memory_format=memory_format)  # type: ignore[call-overload]
        self.clients = [(x.to(device, dtype, memory_format=memory_format), y.to(device)) for x, y in work.clients]
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=options.precision == "bf16-mixed")
        self.weights = [p.detach().clone() for p in self.net.parameters()]

    def round(self) -> None:
        """Run one round over all clients."""
        optimizer = torch.optim.SGD(self.net.parameters(), lr=self.work.learning_rate)
        total = [torch.zeros_like(w) for w in self.weights]
        samples = sum(len(y) for _, y in self.clients)
        self.net.train()
        for x, y in self.clients:
            with torch.no_grad():
                for parameter, weight in zip(self.net.parameters(), self.weights, strict=True):
                    parameter.copy_(weight)
            for _ in range(self.work.epochs):
                for inputs, labels in self.work.batches(x, y):
                    optimizer.zero_grad()
                    with self.autocast:
                        loss = nn.functional.cross_entropy(self.net(inputs), labels)
                    loss.backward()
                    optimizer.step()
            with torch.no_grad():
                for part, parameter in zip(total, self.net.parameters(), strict=True):
                    part.add_(parameter, alpha=len(y) / samples)
        self.weights = total


class BareScaffold(BareLoop):
    """SCAFFOLD by hand (Karimireddy et al., 2020, option II): FedAvg's loop with a correction of every step."""

    def __init__(self, work: Work, options: argparse.Namespace, nhwc: bool = False) -> None:
        super().__init__(work, options, nhwc)
        self.control = [torch.zeros_like(w) for w in self.weights]
        self.client_controls = [[torch.zeros_like(w) for w in self.weights] for _ in self.clients]

    def round(self) -> None:
        """Run one round over all clients, all of which take part."""
        rate = self.work.learning_rate
        optimizer = torch.optim.SGD(self.net.parameters(), lr=rate)
        total, control = ([torch.zeros_like(w) for w in self.weights] for _ in range(2))
        samples = sum(len(y) for _, y in self.clients)
        parameters = list(self.net.parameters())
        self.net.train()
        for (x, y), own in zip(self.clients, self.client_controls, strict=True):
            with torch.no_grad():
                corrections = [c - c_k for c, c_k in zip(self.control, own, strict=True)]
                for parameter, weight in zip(parameters, self.weights, strict=True):
                    parameter.copy_(weight)
            steps = 0
            for _ in range(self.work.epochs):
                for inputs, labels in self.work.batches(x, y):
                    optimizer.zero_grad()
                    with self.autocast:
                        loss = nn.functional.cross_entropy(self.net(inputs), labels)
                    loss.backward()
                    for parameter, correction in zip(parameters, corrections, strict=True):
                        assert parameter.grad is not None
                        parameter.grad.add_(correction)
                    optimizer.step()
                    steps += 1
            with torch.no_grad():
                for i, parameter in enumerate(parameters):
                    total[i].add_(parameter, alpha=len(y) / samples)
                    change = torch.sub(self.weights[i], parameter).mul_(1 / (steps * rate)).sub_(self.control[i])
                    own[i].add_(change)
                    control[i].add_(change, alpha=1 / len(self.clients))
        self.weights = total
        self.control = [c + change for c, change in zip(self.control, control, strict=True)]


class Alternate(lightning.pytorch.Callback):
    """Time each round of a federation, all that the trainer does after it included, and then one round of every loop and peer."""

    def __init__(self, loops: dict[str, BareLoop | Peer], clock: Callable[[], float]) -> None:
        self.loops, self.clock = loops, clock
        self.seconds: dict[str, list[float]] = {name: [] for name in ("ours", *loops)}
        self._started: float | None = None

    def on_train_epoch_start(self, trainer: FederatedTrainer, pl_module: lightning.LightningModule) -> None:
        """Time the round before this one; read the clock when the round begins in all processes."""
        self.take_turns(trainer)
        trainer.fabric.barrier()
        self._started = self.now()

    def on_train_end(self, trainer: FederatedTrainer, pl_module: lightning.LightningModule) -> None:
        """Time the last round."""
        self.take_turns(trainer)

    def take_turns(self, trainer: FederatedTrainer) -> None:
        """Time the round that began last, and one round of each loop."""
        if self._started is None:
            return
        self.seconds["ours"].append(self.now() - self._started)
        for name, loop in self.loops.items() if trainer.is_global_zero else ():
            started = self.now()
            loop.round()
            self.seconds[name].append(self.now() - started)

    def now(self) -> float:
        """Return the time in seconds after the device has finished all work."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return self.clock()


def measure(name: str, samples: int, options: argparse.Namespace) -> None:
    """Print one row for us and one for each peer: times of a round and their ratios."""
    torch.manual_seed(0)
    num_images = options.clients * samples
    images, labels = noise(num_images)
    clients = list(zip(images.split(samples), labels.split(samples), strict=True))
    net = nn.Sequential(nn.Flatten(), nn.Linear(3072, 3200)) if name == WIDE else network(name, 10)
    work = Work(net, clients, options.batch_size, options.epochs, LEARNING_RATE)
    data = federation_of(images, labels, options.clients, options.batch_size)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        loop = BareScaffold if options.algorithm == "SCAFFOLD" else BareLoop
        bare = {"nchw": loop(work, options), "nhwc": loop(work, options, nhwc=True)}
        asked = {peer: stack.enter_context(closing(peers.load(peer)(work))) for peer in options.peer}
        alternate = Alternate({**bare, **asked}, CLOCKS[options.clock])
        trainer = FederatedTrainer(
            max_rounds=options.turns + 1,
            clients_per_round=options.clients,
            local_epochs=options.epochs,
            default_root_dir=folder,
            runner=options.runner,
            compile=options.compile,
            precision=options.precision,
            accelerator=options.device,
            devices=options.ranks,
            devices_per_client=options.devices_per_client,
            callbacks=[alternate],
            **QUIET | (OUTPUTS if options.outputs else {}),
        )
        module = ImageClassifier(copy.deepcopy(net) if name == WIDE else name, learning_rate=LEARNING_RATE)
        trainer.fit(module, data, options.algorithm, verbose=False)
    if not trainer.is_global_zero:
        return
    seconds = {key: values[1:] for key, values in alternate.seconds.items()}  # the first turn warms up
    nchw, nhwc = seconds["nchw"], seconds["nhwc"]
    best = [min(pair) for pair in zip(nchw, nhwc, strict=True)]
    for who in ("ours", *asked):
        row = [
            f"{name:<10}{samples:>8}  {who:<6}",
            *(f"{1e3 * statistics.median(v):>10.1f}" for v in (seconds[who], nchw, nhwc)),
        ]
        for loop in (nchw, best):
            ratios = sorted(theirs / bare for theirs, bare in zip(seconds[who], loop, strict=True))
            row.append(f"   {ratios[0]:.2f} {statistics.median(ratios):.2f} {ratios[-1]:.2f}")
        print(" ".join(row), flush=True)


def noise(num_images: int) -> tuple[Tensor, Tensor]:
    """Return random images of CIFAR-10's shape (num_images, 3, 32, 32) and labels (num_images,)."""
    return torch.rand(num_images, 3, 32, 32), torch.randint(0, 10, (num_images,))


def federation_of(images: Tensor, labels: Tensor, num_clients: int, batch_size: int) -> Arrays:
    """Return images (num_images, C, H, W) with labels (num_images,) of ten classes, divided evenly over clients."""
    return Arrays(
        train=(images, labels),
        test=(images[:10], labels[:10]),
        num_classes=10,
        num_clients=num_clients,
        batch_size=batch_size,
    )


def check(name: str, options: argparse.Namespace) -> None:
    """Check that a peer's round gives the bare loop's model, with unequal clients and partial batches, without shuffling."""
    torch.manual_seed(0)
    b = options.batch_size
    clients = [noise(samples) for samples in (2 * b + (b + 1) // 2, b, b + 1)]
    work = Work(network("lenet5", 10), clients, b, options.epochs, LEARNING_RATE, shuffle=False)
    loop = BareLoop(work, options)
    loop.round()
    with closing(peers.load(name)(work)) as peer:
        peers.require_same(name, peer, work, loop.weights)


def main() -> None:
    """Parse the command line and print the table; an error in it ends with one sentence and exit code 2."""
    try:
        run(arguments())
    except UserError as error:
        print(f"round_time.py: {error}", file=sys.stderr)
        sys.exit(2)


def arguments() -> argparse.Namespace:
    """Parse the command line.

    Raises:
        UserError: a peer is unknown or not installed, or an option works only with our round.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--network", action="append", help=f"default: lenet5 and cnn; {WIDE}: one layer of ten million")
    parser.add_argument("--samples", type=int, action="append", help="samples per client; default: 2 and 400")
    parser.add_argument("--clients", type=int, default=10, help="clients, all of which train in every round")
    parser.add_argument("--batch-size", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--turns", type=int, default=9, help="rounds that count, after one to warm up")
    parser.add_argument("--algorithm", default="FedAvg")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process")
    parser.add_argument("--runner", default="auto", help="the trainer's runner")
    parser.add_argument(
        "--outputs", action="store_true", help="with metrics.csv, progress bar and a checkpoint each round"
    )
    parser.add_argument("--compile", action="store_true", help="let torch compile our steps")
    parser.add_argument("--ranks", type=int, default=1, help="processes of our round")
    parser.add_argument("--devices-per-client", type=int, default=1, help="processes that train each client together")
    parser.add_argument("--precision", choices=("32-true", "bf16-mixed", *TRUE_DTYPES), default="32-true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall", help="cpu: computing time of this process")
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME", help=f"simulator to time: {', '.join(peers.PACKAGES)}"
    )
    options = parser.parse_args()
    alone = ("device", "precision", "ranks", "algorithm")
    changed = [
        f"--{name} {getattr(options, name)}" for name in alone if getattr(options, name) != parser.get_default(name)
    ]
    if options.peer and changed:
        raise UserError(
            f"--peer compares FedAvg in 32 bits in one process on the CPU; it does not work with {', '.join(changed)}."
        )
    if options.clock == "cpu" and (options.device != "cpu" or options.ranks > 1 or "flower" in options.peer):
        raise UserError(
            "--clock cpu counts the computing time of one process; it does not work with --device cuda, --ranks or --peer flower."
        )
    for name in options.peer:
        peers.load(name)
    options.peer = list(dict.fromkeys(options.peer))
    return options


def run(options: argparse.Namespace) -> None:
    """Measure and print the table."""
    torch.set_num_threads(options.threads)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        machine = platform.processor() or platform.machine()
        if options.device == "cuda":
            machine = torch.cuda.get_device_name()
        print(
            f"{date.today()}, {machine}, {options.ranks} process(es) of {options.threads} thread(s), torch {torch.__version__}; "
            f"{options.algorithm}, {options.precision}, runner {options.runner}, {options.clients} clients, "
            f"batch {options.batch_size}, {options.epochs} epochs, median of {options.turns} turns in ms of {options.clock} time"
        )
        for name in options.peer:
            check(name, options)
            print(f"{peers.version(name)}: one round gives the model of the bare loop")
        print(
            "network    samples  round           ms       nchw       nhwc   ÷ nchw           ÷ best of both (min median max)"
        )
    for name in options.network or ["lenet5", "cnn"]:
        for samples in options.samples or [2, 400]:
            measure(name, samples, options)


if __name__ == "__main__":
    main()

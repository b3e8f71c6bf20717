"""Measure on a GPU what no CPU can show: numerics, the choice of the runner, modules, repeats, waits, two GPUs, codecs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from itertools import count
from pathlib import Path
from typing import Any

import torch
from peers import TOLERANCE
from round_time import LEARNING_RATE, federation_of, noise
from torch import Tensor, nn

from gpu import Plan, Row, in_turns, quiet_trainer, sentence
from gpu.methods import Outcome, differences, numbers_of, two_rounds
from gpu.rounds import NETWORKS
from lightning_fl import FederatedTrainer
from lightning_fl.algorithms import SCAFFOLD, FedAvg
from lightning_fl.checks.float32 import UNSET, Float32
from lightning_fl.clients.choose_runner import describe_runner
from lightning_fl.data import Arrays
from lightning_fl.errors import UserError
from lightning_fl.modules import ImageClassifier
from lightning_fl.slots import Draw, Message, RoundContext
from lightning_fl.vectors.layout import NO_LAYOUT

_SPEC = spec_from_file_location("codec_times", Path(__file__).parents[1] / "codecs.py")
assert _SPEC is not None
assert _SPEC.loader is not None
codec_times = module_from_spec(_SPEC)  # `import codecs` would find Python's own module
_SPEC.loader.exec_module(codec_times)

TF32_TOLERANCE = 0.05
"""Distance of two models, one trained in TF32, that is no surprise after two rounds."""


def numerics(plan: Plan) -> None:
    """Compare two rounds with torch's own precision of float32 with the CPU."""
    before = Float32.now()
    UNSET.set()
    try:
        for name in ("FedAvg", "SCAFFOLD", "FedDU"):
            label = Row("numerics", name, "torch's own")
            plan.attempt(label, partial(_compare, label, plan, partial(two_rounds, name, "serial"), TF32_TOLERANCE))
    finally:
        before.set()


def _compare(label: Row, plan: Plan, run: Callable[[str], Outcome], tolerance: float) -> None:
    """Add the distance of a run on the device from the same on the CPU."""
    deviation, _ = differences(run(plan.device), run("cpu"))
    _judge(label, plan, "distance of the models", deviation, tolerance)


def _judge(label: Row, plan: Plan, words: str, deviation: float, tolerance: float = TOLERANCE) -> None:
    """Add a distance as a result, or as a failure if it is above the tolerance."""
    verdict = "result" if deviation <= tolerance else "failed"
    plan.add(replace(label, **{verdict: f"{words} {deviation:.1e}", "numbers": {"deviation": deviation}}))


def choice(plan: Plan) -> None:
    """Let `auto` choose, and train a round of many clients; running out of memory is a failure."""
    for name in NETWORKS if plan.device == "cuda" else ("lenet5",):
        label = Row("choice", f"{name} × {plan.sizes.cohorts[1]}", "auto")
        plan.attempt(label, partial(_choose, label, name, plan))


def _choose(label: Row, name: str, plan: Plan) -> None:
    clients, samples = plan.sizes.cohorts[1], plan.sizes.local_steps * plan.sizes.batch_size
    data = federation_of(*noise(clients * samples), clients, plan.sizes.batch_size)
    trainer = quiet_trainer(plan.device, max_rounds=2, clients_per_round=clients, local_epochs=1, limit_val_batches=0)
    try:
        trainer.fit(ImageClassifier(name, learning_rate=LEARNING_RATE), data, FedAvg(), verbose=False)
    except (torch.OutOfMemoryError, UserError) as error:
        plan.add(replace(label, failed=sentence(error)))
        return
    how = describe_runner(trainer.fit_loop.engine.runner)
    ms = 1e3 * float(trainer.fit_loop.rows[-1]["time/round_seconds"])
    text = f"{how['wanted']}, {how['clients_at_once'] or 1} at once"
    plan.add(replace(label, ms=(ms,), clients_per_second=1e3 * clients / ms, result=text, numbers=how))


class Sequences(ImageClassifier):
    """Classifier of sequences (B, 12, 8) by a layer of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__(_Reader(kind), num_classes=4, learning_rate=0.05)


class _Reader(nn.Module):
    """Reads images (B, 1, 12, 8) as sequences, by an LSTM, attention, dropout or batch normalisation."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        layers: dict[str, Callable[[], nn.Module]] = {
            "LSTM": lambda: nn.LSTM(8, 8, batch_first=True),
            "attention": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
            "dropout": lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)),
            "batch normalisation": lambda: nn.Sequential(
                nn.Unflatten(1, (1, 12)), nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
            ),
        }
        self.layer = layers[kind]()
        self.head = nn.LazyLinear(4)
        with torch.no_grad():
            self(torch.zeros(2, 1, 12, 8))

    def forward(self, images: Tensor) -> Tensor:
        """Return logits."""
        if isinstance(self.layer, nn.LSTM):
            self.layer.flatten_parameters()
        read: Any = self.layer(images.squeeze(1))
        read = read[0] if isinstance(read, tuple) else read
        logits: Tensor = self.head(read.flatten(1))
        return logits


def modules(plan: Plan) -> None:
    """Compare modules that GPUs treat in their own way with the CPU; with dropout, a run with its repetition."""
    for kind in ("LSTM", "attention", "batch normalisation", "dropout"):
        for runner in ("serial", "stacked"):
            label = Row("modules", kind, runner)
            plan.attempt(label, partial(_module, label, kind, runner, plan))


def _module(label: Row, kind: str, runner: str, plan: Plan) -> None:
    def run(device: str) -> Outcome:
        return small_run(device, partial(Sequences, kind), runner=runner if device == plan.device else "serial")

    try:
        if kind != "dropout":
            _compare(label, plan, run, TOLERANCE)
            return
        first, second = run(plan.device), run(plan.device)
    except UserError as error:  # it cannot be stacked
        plan.add(replace(label, skipped=sentence(error)))
        return
    _judge(label, plan, "distance of two runs", differences(second, first)[0])


def small_run(device: str, make: Callable[[], ImageClassifier], algorithm: Any = None, **flags: Any) -> Outcome:
    """Run two rounds of six clients with images (1, 12, 8); the flags may give files, more rounds or a checkpoint."""
    torch.manual_seed(0)
    module, generator = make(), torch.Generator().manual_seed(1)
    images, labels = torch.randn(96, 1, 12, 8, generator=generator), torch.randint(0, 4, (96,), generator=generator)
    data = Arrays(train=(images, labels), test=(images[:8], labels[:8]), num_clients=6, batch_size=8)
    path = flags.pop("ckpt_path", None)
    flags = {"max_rounds": 2, "clients_per_round": 3, "local_epochs": 2, "limit_val_batches": 0, **flags}
    trainer: FederatedTrainer = quiet_trainer(device, **flags)
    start = numbers_of(module)
    trainer.fit(module, data, algorithm or FedAvg(), ckpt_path=path, verbose=False)
    return Outcome(start, numbers_of(module), {})


def repeats(plan: Plan) -> None:
    """Repeat a run, and resume one, with and without `deterministic`; only with it they have to be equal."""
    for deterministic in (False, True):
        for way in ("repeated", "resumed"):
            label = Row("repeats", "deterministic" if deterministic else "torch's own", way)
            plan.attempt(label, partial(_repeat, label, way, deterministic, plan))


def _repeat(label: Row, way: str, deterministic: bool, plan: Plan) -> None:
    run = partial(small_run, plan.device, _convolutions, SCAFFOLD(), deterministic=deterministic)
    first = run()
    if way == "repeated":
        second = run()
    else:
        with tempfile.TemporaryDirectory() as folder:
            kept = {"default_root_dir": folder, "enable_checkpointing": True}
            run(max_rounds=1, **kept)
            second = run(ckpt_path="last", **kept)
    deviation, _ = differences(second, first)
    text = "equal, bit for bit" if torch.equal(first.end, second.end) else f"distance {deviation:.1e}"
    verdict = "failed" if deviation and (deterministic or plan.device == "cpu") else "result"
    plan.add(replace(label, **{verdict: text, "numbers": {"deviation": deviation}}))


def _convolutions() -> ImageClassifier:
    layers = (nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(60, 4))
    return ImageClassifier(nn.Sequential(*layers), num_classes=4, learning_rate=0.05)


def waits(plan: Plan) -> None:
    """Count how often the host waits for the GPU in a run of two rounds, with few and with many steps."""
    for runner in ("serial", "stacked"):
        label = Row("waits", "FedAvg", runner)
        if plan.device != "cuda":
            plan.add(replace(label, skipped="needs a GPU"))
            continue
        plan.attempt(label, partial(_waits, label, runner, plan))


def _waits(label: Row, runner: str, plan: Plan) -> None:
    counts = []
    for epochs in (1, 4):
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                small_run(plan.device, _convolutions, runner=runner, local_epochs=epochs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        counts.append(sum("synchronizing" in str(one.message) for one in caught))
    steps = 2 * 3 * 2 * 3  # batches of 3 more passes of 3 clients in 2 rounds
    text = f"{counts[0]} in a run, {(counts[1] - counts[0]) / steps:.2f} more for each further step of a client"
    plan.add(replace(label, result=text, numbers={"waits": counts}))


def two_gpus(plan: Plan) -> None:
    """Compare a run on two GPUs with that on one."""
    label = Row("two-gpus", "SCAFFOLD", "NCCL" if plan.device == "cuda" else "gloo")
    if plan.device == "cuda" and torch.cuda.device_count() < 2:
        plan.add(replace(label, skipped="needs two GPUs"))
        return
    plan.attempt(label, partial(_two, label, plan))


def _two(label: Row, plan: Plan) -> None:
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__]
        path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
        done = subprocess.run(
            [*words, folder, plan.device],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=max(
                30.0, min(plan.seconds_left, 3600.0)
            ),  # a plan without an end has infinity, which no wait takes
            check=False,
        )
        if done.returncode:
            plan.add(replace(label, failed=(done.stderr.strip().splitlines() or ["no output"])[-1]))
            return
        ends = torch.load(Path(folder) / "end.pt")
    one = small_run(plan.device, _convolutions, SCAFFOLD())
    _judge(label, plan, "distance from one", float((ends - one.end).norm() / (one.end - one.start).norm()))


def codecs(plan: Plan) -> None:
    """Time encoding and decoding of a vector by every codec on the device, and compare what arrives with the CPU."""
    size = 1_000_000 if plan.device == "cuda" else 5_000
    for name, codec in codec_times.cases():
        label = Row("codecs", name, f"{size:,} numbers")
        plan.attempt(label, partial(_codec, label, name, codec, size, plan))


def _codec(label: Row, name: str, codec: Any, size: int, plan: Plan) -> None:
    layout = codec_times.normal_vector(size)
    context = RoundContext(layout, NO_LAYOUT, num_clients=1)
    generator = torch.Generator().manual_seed(0)
    vectors = [torch.randn(layout.numel, generator=generator) for _ in range(3)]
    arrived, timed = {}, None
    for device in dict.fromkeys((plan.device, "cpu")):
        message = codec_times.message_of(name, codec, [vector.to(device) for vector in vectors])
        carrier = "model" if codec.change_entry() is None else (*message,)[-1]
        arrived[device] = codec_times.both_ways(codec, message, {}, context)[carrier].cpu()
        if device == plan.device:
            timed = in_turns({"": partial(_of_next, count(), codec, message, context)}, 3, seconds=1)[""]
    there, here = arrived[plan.device], arrived["cpu"]
    differing, most = int((there != here).sum()), float((there - here).abs().max() / here.abs().max())
    assert timed is not None
    text = "as on the CPU"
    if differing:
        text = f"{differing:,} of {layout.numel:,} numbers differ from the CPU's, by at most {most:.1e} of the largest"
    plan.add(replace(label, ms=timed.ms, result=text, numbers={"differing": differing, "difference": most}))


def _of_next(parties: Iterator[int], codec: Any, message: Message, context: RoundContext) -> None:
    """Encode and decode the message of another party, with draws of its own."""
    codec_times.both_ways(codec, message, {}, context.drawing(Draw(party=next(parties))))


def _in_a_process(folder: str, device: str) -> None:
    """Train in one of two processes, and let the first write the numbers of the model."""
    found = small_run(device, _convolutions, SCAFFOLD(), devices=2)
    if torch.distributed.get_rank() == 0:
        torch.save(found.end, Path(folder) / "end.pt")


if __name__ == "__main__":
    _in_a_process(*sys.argv[1:3])

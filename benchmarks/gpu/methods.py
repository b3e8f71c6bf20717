"""Two rounds of every method on the device, with both runners, against the CPU."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from peers import TOLERANCE
from torch import Tensor, nn

from gpu import Plan, Row, allow_tf32, quiet_trainer
from lightning_fl import algorithms
from lightning_fl.data import Arrays, Dirichlet
from lightning_fl.modules import ImageClassifier
from lightning_fl.slots import Gradients

RUNNERS = ("serial", "stacked")
NEED_TORCH_PRUNING = ("FedAP", "FedDUAP", "FedDUMAP", "HRank", "FederatedDropout", "FjORD", "HeteroFL")
NEED_ALL_CLIENTS = ("Scaffnew",)
SHORT = {"epsilon": 0.01}  # with Adam's usual ε, the first steps magnify the rounding of gradients near 0
ARGUMENTS: dict[str, dict[str, Any]] = {
    "DeviceM-mime": {"variant": "mime"},
    "DeviceM-mime-lite": {"variant": "mime_lite"},
    "EfficientAdam": SHORT,
    "FairnessTop": SHORT | {"alpha": 0.3},
    "FedADP": {"keep": 0.5},
    "FedAP": {"prune_round": 1, "max_sources": 2},
    "FedAdam": SHORT,
    "FedBuff": {"buffer_size": 2},
    "FedAdamSSM": SHORT | {"alpha": 0.3},
    "FedAdamTop": SHORT | {"alpha": 0.3},
    "FedDF": {"max_steps": 5, "batch_size": 16},
    "FedDP-threshold": {"variant": "threshold"},
    "FedRep": {"head_epochs": 0},
    "FedDUAP": {"prune_round": 1, "rate_mode": "fixed", "rate": 0.5},
    "FedDUM-two-stage": {"two_stage": True},
    "FedDUMAP": {"prune_round": 1, "rate_mode": "fixed", "rate": 0.3},
    "FedKT": {"t": 2, "epochs": 2, "batch_size": 16},
    "FedLDF": {"n": 1},
    "FedOpt-adam": {"server_optimizer": partial(torch.optim.Adam, lr=0.02, eps=0.01)},
    "HDFL": {"n": 2},
    "HRank": {"prune_round": 1},
    "IMC": {"prune_round": 1, "rate": 0.4},
    "OneBitAdam": SHORT | {"warmup": 1},
    "PruneFL": {"interval": 1, "initial_passes": 2, "max_density": 0.6},
    "RandomLayers": {"n": 1},
    "ServerM-yogi": {"variant": "yogi", "server_learning_rate": 0.02},
}
"""Arguments for two rounds on a tiny network; a name with a hyphen is a further variant of a method."""
METHODS = [name for name in algorithms.__all__ if name != "Algorithm"] + [name for name in ARGUMENTS if "-" in name]


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run: the model's numbers before and after it, in float64 on the CPU, and the metrics of the last round."""

    start: Tensor
    end: Tensor
    metrics: dict[str, float]


def methods(plan: Plan) -> None:
    """Compare two rounds of every method, with both runners on the device, with the serial runner on the CPU."""
    allow_tf32(False)
    for name in METHODS:
        expected: list[Outcome] = []
        for runner in RUNNERS:
            label = Row("methods", name, runner)
            if name in NEED_TORCH_PRUNING and find_spec("torch_pruning") is None:
                plan.add(replace(label, skipped="torch-pruning is not installed"))
            elif runner == "stacked" and (reason := why_serial(name)):
                plan.add(replace(label, skipped=f"clients {reason} train one after the other"))
            else:
                plan.attempt(label, partial(compare, label, plan, expected))


def why_serial(name: str) -> str:
    """Say which clients of a method no stack can train; "" if one can."""
    method = made(name)
    if method.model_keeper or method.pace:
        return "with models of their own, or of other rounds,"
    if method.rule.num_losses:
        return "that measure losses of whole models"
    if Gradients.REPRESENTATIONS in method.rule.reads:
        return "that compare representations"
    return "that draw a width in each step" if method.exchange.differs_in_steps else ""


def compare(label: Row, plan: Plan, on_cpu: list[Outcome]) -> None:
    """Add the comparison of a method and a runner; the first call for a method stores its outcome on the CPU in `on_cpu`."""
    name, runner = label.case, label.way
    if not on_cpu:
        on_cpu.append(two_rounds(name, "serial", "cpu"))
    deviation, differing = differences(two_rounds(name, runner, plan.device), on_cpu[0])
    text = f"distance of the models {deviation:.1e}" + (f"; differing: {', '.join(differing)}" if differing else "")
    verdict = "failed" if differing or not deviation <= TOLERANCE else "result"
    plan.add(replace(label, numbers={"deviation": deviation, "differing": differing}, **{verdict: text}))


def differences(found: Outcome, expected: Outcome) -> tuple[float, list[str]]:
    """Return the distance of two final models, and the metrics that differ; counts of bits and bytes must be equal.

    The distance is divided by the length of the whole update, or of the model if filters were removed; it is infinite if the
    models have different sizes.
    """
    names = found.metrics.keys() | expected.metrics.keys()
    pairs = {name: (found.metrics.get(name, math.nan), expected.metrics.get(name, math.nan)) for name in names}
    differing = [
        name
        for name, (ours, theirs) in pairs.items()
        if not math.isclose(ours, theirs, rel_tol=0 if "comm/" in name else TOLERANCE, abs_tol=TOLERANCE**2)
    ]
    if found.end.shape != expected.end.shape:
        return math.inf, sorted(differing)
    update = expected.end - expected.start if expected.end.shape == expected.start.shape else expected.end
    distance, length = (found.end - expected.end).norm(), update.norm()
    shown = distance / length if distance > 0 else distance  # some methods leave the model as it is
    return float(shown), sorted(differing)


def made(name: str) -> algorithms.Algorithm:
    """Return a method with the arguments of its case."""
    method: algorithms.Algorithm = getattr(algorithms, name.partition("-")[0])(**ARGUMENTS.get(name, {}))
    return method


def two_rounds(name: str, runner: str, device: str) -> Outcome:
    """Run two rounds of a method with a tiny convolutional network, six unequal clients and samples on the server."""
    torch.manual_seed(0)
    layers = OrderedDict(conv1=nn.Conv2d(1, 4, 3), relu1=nn.ReLU(), conv2=nn.Conv2d(4, 6, 3), relu2=nn.ReLU())
    layers |= OrderedDict(pool=nn.MaxPool2d(2), flatten=nn.Flatten(), fc=nn.Linear(24, 4))
    module = ImageClassifier(nn.Sequential(layers), num_classes=4, in_channels=1, image_size=8, learning_rate=0.05)
    images, labels = torch.randn(120, 1, 8, 8), torch.randint(0, 4, (120,))
    images[torch.arange(120), 0, labels, labels] += 3  # so that there is something to learn
    data = Arrays(
        train=(images, labels),
        test=(images[:20], labels[:20]),
        num_clients=6,
        batch_size=4,
        client_fraction=0.8,
        server_fraction=0.2,
        partition=Dirichlet(1.0, skip_full_clients=False, min_samples=6),
    )
    clients = data.num_clients if name in NEED_ALL_CLIENTS else 3
    trainer = quiet_trainer(device, max_rounds=2, clients_per_round=clients, local_epochs=1, runner=runner)
    start = numbers_of(module)
    trainer.fit(module, data, made(name), verbose=False)
    if trainer.run.params.device.type != device:
        raise RuntimeError(f"the model was trained on {trainer.run.params.device}, not on {device}")
    return Outcome(start, numbers_of(module), {key: float(value) for key, value in trainer.callback_metrics.items()})


def numbers_of(module: nn.Module) -> Tensor:
    """Return the parameters and buffers of a module as one vector, in float64 on the CPU."""
    return torch.cat([value.detach().cpu().double().flatten() for value in module.state_dict().values()])

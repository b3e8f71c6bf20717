"""Public classes that a configuration may name, with arguments for what they need."""

from collections.abc import Iterator
from importlib.util import find_spec
from inspect import isabstract
from types import ModuleType
from typing import Any

import lightning as L  # noqa: N812
import torch
from torch.utils.data import TensorDataset

from lightning_fl import FederatedTrainer, aggregators, algorithms, codecs, exchanges, rules, steps
from lightning_fl import callbacks as all_callbacks
from lightning_fl import data as all_data
from lightning_fl.aggregators import CoordinateMedian, WeightedMean
from lightning_fl.codecs import Dense
from lightning_fl.exchanges import OneShot
from lightning_fl.features import attacks, selection
from lightning_fl.features.clock import ClientClock, SimulatedClock
from lightning_fl.features.loss_guard import LossGuard
from lightning_fl.features.secure_aggregation import SecureAggregation
from lightning_fl.modules import ImageClassifier
from lightning_fl.rules import LocalOptimizer, SquaredGradients
from lightning_fl.steps import Apply, Momentum

DATA = TensorDataset(torch.zeros(8, 1), torch.zeros(8, dtype=torch.long))
GIVEN: dict[str, dict[str, Any]] = {
    **{name: {"deadline": 1.0, "rates": [0.0, 0.5]} for name in ("DrawnUnits", "FederatedDropout")},
    "Differences": {"codec": Dense()},
    "ErrorFeedback": {"codec": Dense()},
    "Followed": {"codec": Dense()},
    "Compress": {"codec": Dense()},
    "WarmedUpMoments": {"codec": Dense()},
    "KeepUploads": {"inner": WeightedMean()},
    "ExtrapolatedMean": {"inner": WeightedMean()},
    "Bucketing": {"inner": CoordinateMedian()},
    "GradientTurn": {"inner": OneShot()},
    "Thresholded": {"inner": LocalOptimizer()},
    "Reconfiguration": {"rule": SquaredGradients(interval=1)},
    "ServerOptimizer": {"optimizer": torch.optim.SGD},
    "MomentumInStages": {"stages": (Apply(),), "momentum": Momentum()},
    "DatasetSamples": {"dataset": DATA},
    "Federated": {"datamodule": L.LightningDataModule.from_datasets(DATA), "num_clients": 2},
    "CelebA": {"root": ".", "num_clients": 2, "partition": all_data.IID()},
    "ImageFolder": {"root": "."},
    "HuggingFace": {"path": "."},
    "Leaf": {"train": ".", "test": ".", "num_clients": 2, "partition": all_data.IID()},
    "Arrays": {"train": DATA.tensors, "test": DATA.tensors},
    "TargetReached": {"target": 0.5},
    **{name: {"candidates": 5} for name in ("ByNorm", "Fastest", "PowerOfChoice")},
    "Adversary": {"attack": attacks.SignFlip()},
    "ImageClassifier": {"network": "linear", "in_channels": 1, "image_size": 8},
}
"""Parameters without a default."""


def classes() -> Iterator[type]:
    """Yield the classes of the package, without base classes."""
    packages: list[ModuleType] = [
        rules,
        codecs,
        exchanges,
        aggregators,
        steps,
        attacks,
        selection,
        algorithms,
        all_callbacks,
        all_data,
    ]
    for package in packages:
        for name in package.__all__:
            found = getattr(package, name)
            left_out = (
                "SampleLoader",
                "Source",
                "Honest",
                "AttackContext",
                "Reads",
                "SelectionTurn",
                *([] if find_spec("datasets") else ["HuggingFace"]),
            )
            if isinstance(found, type) and not isabstract(found) and name not in left_out:
                yield found
    yield from (SimulatedClock, ClientClock, LossGuard, SecureAggregation, ImageClassifier, FederatedTrainer)

"""Test that two values of an argument are two settings: in the settings of a run from Python, and in a checkpoint."""

from collections.abc import Iterator, Sequence
from inspect import Parameter
from itertools import combinations
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Literal, Union, get_args, get_origin
from unittest.mock import Mock

import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
from all_classes import DATA, GIVEN, classes
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn

from lightning_fl import UserError
from lightning_fl.aggregators import MaskedMean, WeightedMean
from lightning_fl.algorithms import Algorithm, FedAvg, FedProx
from lightning_fl.checks import parameters_of
from lightning_fl.codecs import QSGD, Cast, Dense, RandomK, TopK
from lightning_fl.data import ByGroup, Dirichlet, LogNormalSizes, Partition, Rotation, Shards, Shift, Sizes
from lightning_fl.exchanges import LayerDivergence, OneShot
from lightning_fl.features.attacks import SignFlip
from lightning_fl.outputs.run_folder import UNKNOWN
from lightning_fl.rules import LocalOptimizer, Proximal, SquaredGradients
from lightning_fl.settings.settings import RunSettings
from lightning_fl.settings.written_settings import _flat
from lightning_fl.slots import Aggregator, Codec, Exchange, Rule, Step
from lightning_fl.steps import Apply, Momentum

NO_SETTINGS = ("ClientIndices", "DatasetSamples", "Groups", "Normalize", "Pool", "TensorSamples", "FederatedTrainer")
"""Classes whose objects hold samples, and the trainer, whose flags are settings by themselves."""
PARTS: dict[type, Sequence[Any]] = {
    Algorithm: [FedProx(0.1), FedProx(0.2), FedAvg()],
    Aggregator: [WeightedMean(), WeightedMean("uniform")],
    Codec: [TopK(0.5), TopK(0.25), Cast("float16"), Dense()],
    Exchange: [OneShot(), LayerDivergence(2), LayerDivergence(3)],
    Partition: [Shards(2), Shards(3), Dirichlet(0.5), Dirichlet(0.7)],
    Rule: [Proximal(0.1), Proximal(0.2), LocalOptimizer()],
    Shift: [Rotation((0, 90)), Rotation((0, 180))],
    Sizes: [LogNormalSizes(0.5), LogNormalSizes(0.7)],
    Step: [Momentum(0.5), Momentum(0.6), Apply(), Apply(0.5)],
}
"""Values of arguments that are parts."""
VALUES: dict[str, Sequence[Any]] = {
    "angles": [(0, 90), (0, 180)],
    "attack": [SignFlip(), SignFlip(2.0)],
    "assign": ["merge", "one"],
    "broadcast": ["selected", "all"],
    "choose": ["most", "least"],
    "datamodule": [L.LightningDataModule.from_datasets(DATA, batch_size=size) for size in (1, 2)],
    "codec": [RandomK(), QSGD()],
    "class_of": ["y", "z", len, [0, 1], [1, 0]],
    "groups": ["layer", "tensor", {"one": ["a"]}, {"one": ["b"]}, np.zeros(8), np.ones(8)],
    "head_epochs": [1, 2],
    "kind": ["femnist", "shakespeare"],
    "kinds": [("blur",), ("noise",)],
    "network": ["linear", "lenet5", nn.Linear(2, 2), nn.Bilinear(1, 1, 3)],
    "levels": [{1.0: 1.0}, {1.0: 0.5, 0.5: 0.5}],
    "n": [1, 2],
    "num_samples": [(1, 2), (3, 4)],
    "network_options": [{"dropout": 0.25}, {"dropout": 0.5}],
    "optimizer": [torch.optim.SGD, torch.optim.Adam],
    "print_groups": [True, False],
    "profile": ["lte", "wifi"],
    "rates": [(0.0, 0.5), (0.5,)],
    "rule": [Proximal(0.1), Proximal(0.2), SquaredGradients(interval=1), SquaredGradients(interval=2)],
    "server_optimizer": [torch.optim.SGD, torch.optim.Adam, lambda parameters: torch.optim.SGD(parameters, lr=0.5)],
    "stages": [(Apply(),), (Apply(0.5),)],
    "steps": [(Apply(),), (Apply(), Momentum(0.5)), (Apply(), Momentum(0.6)), [Momentum(0.5)], [Momentum(0.6)]],
    "vocabulary": ["some.json", "others.json"],
}
"""Values of arguments by their names."""
WITH: dict[str, dict[str, Any]] = {
    "exchange": {"aggregator": MaskedMean()},
    "groups": {"partition": ByGroup()},
    "deadline": {"rates": (0.0, 0.5)},
    "distilled": {"ordered": True, "scaled": False},
    "finetune_lr": {"finetune_epochs": 1},
    "levels": {"bits": 4},
    "max_sources": {"rate_source": "all"},
    "num_samples": {"client_loaders": abs},
    "network_options": {"network": "vgg11", "in_channels": 3, "image_size": 32},
    "pruning_threshold": {"variant": "threshold"},
    "rate": {"rate_mode": "fixed"},
    "rates": {"deadline": 1.0},
    "source": {"target": 7},
    "target": {"source": 7},
    "vocabulary": {"kind": "sent140"},
}
"""Arguments with which alone another one has a meaning."""


UNTRIED = {
    ("Reconfiguration", "rule"),  # only one rule fits
    ("HeteroFL", "personal"),  # refused with smaller networks
    ("FjORD", "personal"),
    ("FederatedDropout", "personal"),
    ("FirstUnits", "ordered"),  # not with `scaled`, the default
    ("EfficientAdam", "steps"),  # no step fits after its own
    ("OneBitAdam", "steps"),
    ("FedDP", "rule"),  # its base method fills it
    ("GivenIndices", "leave_out"),  # needs lists
    "lists",  # of a split, which the digest of the samples tells apart
    "path",  # of files that must exist
    "test",
    "train",
}
"""Arguments of which two values cannot be made here."""


def values(name: str, parameter: Parameter) -> list[Any]:
    """Return values of a parameter, of which some may not be allowed."""

    def of(hint: Any) -> Iterator[Any]:
        origin = get_origin(hint)
        if origin in (Union, UnionType):
            for part in get_args(hint):
                yield from of(part)
        elif origin is Literal:
            yield from get_args(hint)
        elif hint is bool:
            yield from (True, False)
        elif hint is NoneType:
            yield None
        elif hint in (int, float):
            yield from map(hint, (1, 2, 3, 0, 0.5, 0.25, 0.9, 4, 10, 100))
        elif hint is str:
            yield from ("a", "b")
        elif hint in PARTS:
            yield from PARTS[hint]
        elif isinstance(origin, type) and issubclass(origin, Sequence):
            inner = list(of(get_args(hint)[0]))
            yield from ([one] for one in inner[:3])
        elif origin is not None and "Callable" in str(origin):
            yield from (abs, torch.sum, lambda x: x)

    given = [] if parameter.default is Parameter.empty else [parameter.default]
    return [*given, *(VALUES["steps"] if name == "steps" else (*VALUES.get(name, ()), *of(parameter.annotation)))]


def objects(found: type, name: str, parameter: Parameter) -> list[tuple[Any, Any]]:
    """Return at most four values of a parameter, and the objects of the class that have them."""
    made: list[tuple[Any, Any]] = []
    for value in values(name, parameter):
        if len(made) < 4 and not any(same(value, earlier) for earlier, _ in made):
            for more in (WITH.get(name, {}), {}):
                try:
                    made.append((value, found(**{**GIVEN.get(found.__name__, {}), **more, name: value})))
                    break
                except (UserError, ValueError, TypeError):
                    continue
    return made


def same(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return list(map(repr, one)) == list(map(repr, other))
    return one is other or (isinstance(one, type(other)) and repr(one) == repr(other))


def written(value: Any) -> dict[str, str]:
    """Return the settings of a run from Python, as reports compare them."""
    return {key: str(plain) for key, plain in _flat("it", value).items()}


def kept(value: Any) -> RunSettings:
    """Return the settings in a checkpoint."""
    settings = RunSettings()
    settings.add("it", value, False)
    return settings


CLASSES = [found for found in classes() if found.__name__ not in NO_SETTINGS]


@pytest.mark.long
@pytest.mark.parametrize("found", CLASSES, ids=lambda found: found.__name__)
def test_two_values_of_an_argument_are_two_settings(found: type) -> None:
    """Test every argument: reports and resumed runs see both, or the report says that it is unknown."""
    for name, parameter in parameters_of(found).items():
        made = objects(found, name, parameter)
        if (found.__name__, name) in UNTRIED or name in UNTRIED:
            continue
        assert len(made) > 1, f"{name}: add values to VALUES, or what they need to WITH"
        for (value, one), (other, another) in combinations(made, 2):
            what = f"{name}={value!r} and {other!r}"
            assert written(one) != written(another) or UNKNOWN in written(one).values(), what
            if not isinstance(one, L.LightningDataModule | L.LightningModule) and None not in (value, other):
                settings = kept(another)
                changed = {change.key for change in settings.changes_since(kept(one).values)}
                assert changed, what
                assert name not in getattr(found, "changeable", ()) or changed <= settings.changeable, what


class Forgetful(L.Callback):
    """Callback that keeps an argument under a name of its own."""

    def __init__(self, rate: float, depth: int) -> None:
        self.speed, self._depth = rate, depth


def test_an_argument_that_a_callback_does_not_keep_is_unknown() -> None:
    assert written(Forgetful(0.1, 2)) == {"it": "Forgetful", "it.rate": UNKNOWN, "it.depth": "2"}
    assert kept(Forgetful(0.1, 2)).values == {"it": "Forgetful"}
    written_once = written(EarlyStopping("val/loss", patience=5))
    assert UNKNOWN not in written_once.values(), "its arguments that are unknown train nothing else"
    assert written_once["it.patience"] == "5"


def test_networks_of_one_size_are_distinguished_by_their_layers() -> None:
    one, other, again = (nn.Sequential(nn.Linear(2, 2), act) for act in (nn.ReLU(), nn.Tanh(), nn.ReLU()))
    assert written(one)["it"] == written(other)["it"]
    assert written(one) != written(other)
    assert written(one) == written(again)


def test_an_object_with_attributes_of_every_name_is_described() -> None:
    """Test what Lightning's own tests give as a callback."""
    mock, settings = Mock(spec=Callback, model=Callback()), RunSettings()
    settings.add("trainer.callbacks", [mock], True)
    assert settings.values["trainer.callbacks"] == ["Mock"]
    assert _flat("trainer.callbacks.0", mock)["trainer.callbacks.0"] == "Mock"


def test_an_object_with_dimensions_that_is_no_tensor_is_described() -> None:
    """Test what environments of reinforcement learning and batches in dictionaries have, as hyper-parameters of a module."""
    settings = RunSettings()
    settings.add("model.env", SimpleNamespace(ndim=0), True)
    settings.add("model.rate", torch.tensor(0.5), True)
    assert settings.values == {"model.env": "SimpleNamespace", "model.rate": 0.5}

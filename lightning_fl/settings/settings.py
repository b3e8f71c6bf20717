"""Settings of a run, which a checkpoint keeps: a resumed run may change some of them, and must keep the others.

A part names in `changeable` the settings that a resumed run may change. All others would give clients other samples, or the
states in the checkpoint another meaning.
"""

from __future__ import annotations

import reprlib
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from numbers import Integral, Real
from os import PathLike, fspath
from typing import Any, TypeAlias

import numpy as np
from lightning.pytorch import Callback
from torch import Tensor

from lightning_fl.algorithms import Algorithm
from lightning_fl.checks import is_a, parameters_of
from lightning_fl.data import FederatedDataModule
from lightning_fl.outputs.run_folder import UNKNOWN
from lightning_fl.slots import Part
from lightning_fl.steps.torch_optimizer import OptimizerMaker

SAMPLES = "data.samples"
"""Key of the digest of the clients' samples, which differs if a setting that nobody declares gives them others."""
SLOTS = tuple(parameters_of(Algorithm))
DEEPEST = 10
"""Number of dots in the key of the innermost setting: objects may contain each other."""
UNKEPT = object()
"""Stands for an argument that its object does not keep."""
ABSENT: dict[str, tuple[Any, Any]] = {
    "gradient_clip_algorithm": (None, "norm"),
    "max_steps": (-1, None),
    "overfit_batches": (0.0, None),
    "reload_dataloaders_every_n_epochs": (0, None),
}
"""Values of the trainer's attributes, as in Lightning, whose flags are not given, and the defaults of these flags."""
Inside: TypeAlias = Callable[[Any, bool], tuple[Any, list[tuple[str, Any, bool]]]]


@dataclass(frozen=True)
class Change:
    """A setting that differs between a checkpoint and the run that resumes it."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key} {_shown(self.old)} → {_shown(self.new)}"


@dataclass
class RunSettings:
    """Settings of a run by their dotted keys, which are those of a configuration where it has them.

    Attributes:
        values: plain values; of a part its class's name.
        changeable: keys of the settings that a resumed run may change.
    """

    values: dict[str, Any] = field(default_factory=dict)
    changeable: set[str] = field(default_factory=set)

    def add(self, key: str, value: Any, changeable: bool) -> None:
        """Add a setting; of a part or a sequence of parts, its classes and all its own settings."""
        for name, plain, may_change in walk(key, value, changeable, _as_settings):
            self.values[name] = plain
            if may_change:
                self.changeable.add(name)

    def changes_since(self, earlier: Mapping[str, Any]) -> list[Change]:
        """Return the settings that differ; of a part whose class differs, only the class."""
        changes: list[Change] = []
        for key, new in self.values.items():
            old = earlier.get(key, new)
            # As clients_per_round, which is changeable, 1 is a count and 1.0 a fraction.
            differs = old != new or (key in self.changeable and type(old) is not type(new))
            if differs and not any(key.startswith(f"{change.key}.") for change in changes):
                changes.append(Change(key, old, new))
        return changes


def settings_of(trainer: Any, data: FederatedDataModule) -> RunSettings:
    """Return the settings of a run that begins or goes on.

    Args:
        trainer: trainer with its flags and algorithm.
        data: data as the clients hold them.
    """
    settings = RunSettings()
    for name, flag in trainer.flags.items():
        if flag.resume is not None:
            settings.add(f"trainer.{name}", flag_value(trainer, name), flag.resume == "may change")
    settings.add("data", data, False)
    settings.add(SAMPLES, _digest(data), False)
    for name, value in _settings_in(trainer.algorithm):
        settings.add(f"algorithm.{name}", value, name in trainer.algorithm.changeable)
    return settings


def flag_value(trainer: Any, name: str) -> Any:
    """Return the value of a flag, also where Lightning's attribute of that name has another if the flag is not given."""
    if name == "callbacks":  # a fit adds others
        return list(trainer.given_callbacks)
    value = getattr(trainer, name)
    absent, default = ABSENT.get(name, (UNKEPT, None))
    return default if value == absent else value


def walk(key: str, value: Any, changeable: bool, inside: Inside) -> Iterator[tuple[str, Any, bool]]:
    """Yield the key, the plain value and the category of a setting and of all settings in it.

    Args:
        key: dotted key of the setting.
        value: its value.
        changeable: a resumed run may change it.
        inside: takes a value that is not plain, and its category, and returns what stands for the value, `UNKEPT` for nothing,
            and the settings in it, each with its name, value and category.
    """
    try:
        yield key, plain(value), changeable
        return
    except TypeError:
        pass
    if key.count(".") > DEEPEST:
        yield key, UNKNOWN, changeable
        return
    shown, settings = inside(value, changeable)
    if shown is not UNKEPT:
        yield key, shown, changeable
    for name, inner, may_change in settings:
        yield from walk(f"{key}.{name}", inner, may_change, inside)


def _as_settings(value: Any, changeable: bool) -> tuple[Any, list[tuple[str, Any, bool]]]:
    """Return what stands for an object or a sequence, and its settings as they are now."""
    if isinstance(value, OptimizerMaker):
        return value.name, [(name, option, name in value.changeable) for name, option in value.options.items()]
    if isinstance(value, (list, tuple)):
        # The classes stand together under the key of the sequence.
        settings = [
            (f"{position}.{name}", inner, may_change)
            for position, item in enumerate(value)
            for name, inner, may_change in _as_settings(item, changeable)[1]
        ]
        return [type(item).__name__ for item in value], settings
    declared = getattr(value, "changeable", None)
    settings = [
        (name, inner, name in declared if isinstance(declared, Collection) else changeable)
        for name, inner in _settings_in(value)
    ]
    return type(value).__name__, settings


def _settings_in(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of an object's own settings: the parameters of its class that it keeps."""
    if isinstance(value, Algorithm):
        names = dict.fromkeys((*SLOTS, *parameters_of(type(value))))
        yield from ((name, getattr(value, name)) for name in names if hasattr(value, name))
        yield from ((type(callback).__name__, callback) for callback in value.configure_callbacks())
    elif is_a(value, Callback):
        yield from ((name, argument) for name, argument in kept_arguments(value).items() if argument is not UNKEPT)
    elif isinstance(value, Part | FederatedDataModule) or is_dataclass(value):
        yield from ((name, getattr(value, name)) for name in parameters_of(type(value)) if hasattr(value, name))
    else:  # a LightningDataModule under `Federated`
        yield from hyper_parameters(value).items()


def hyper_parameters(value: Any) -> Mapping[str, Any]:
    """Return the hyper-parameters of a LightningModule or LightningDataModule; {} of another object."""
    hparams = getattr(value, "hparams", None)
    return hparams if isinstance(hparams, Mapping) else {}  # a mock has an attribute of every name


def kept_arguments(callback: Callback) -> dict[str, Any]:
    """Return the arguments of a callback's constructor by name, as it keeps them under these names; `UNKEPT` for others."""

    def argument(name: str) -> Any:
        try:
            return getattr(callback, name)
        except Exception:  # a property may need a trainer
            return UNKEPT

    return {name: argument(name) for name in parameters_of(type(callback))}


def plain(value: Any) -> Any:
    """Return a value as plain Python, which `torch.load(weights_only=True)` reads.

    Raises:
        TypeError: the value is neither plain nor a container of plain values.

    >>> plain({"sizes": (np.int64(3), 0.5), 1: None})
    {'sizes': [3, 0.5], '1': None}
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, PathLike):
        return str(fspath(value))
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Mapping):
        return {str(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, (Tensor, np.ndarray, np.generic)) and value.ndim == 0:  # a learning rate may be a tensor
        return plain(value.item())
    raise TypeError(f"{type(value).__name__} is not plain")


def _digest(data: FederatedDataModule) -> str:
    """Return a checksum of the indices of the clients' and the server's samples, and of all labels."""
    clients, held_out, server = data.client_indices, data.client_val_indices, data.server_indices
    sizes = np.concatenate([[len(data.train)], clients.sizes, held_out.sizes, [len(server)]])
    arrays = [sizes, np.concatenate([clients.joined, held_out.joined, server]).astype(np.int64)]
    if data.train.labels is not None:
        arrays.append(np.asarray(data.train.labels))
    checksum = 0
    for array in arrays:
        checksum = zlib.crc32(np.ascontiguousarray(array).data, checksum)
    return f"{checksum:08x}"


def _shown(value: Any) -> str:
    return reprlib.repr(value).strip("'")

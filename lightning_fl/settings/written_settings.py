"""Settings of a run from Python under the keys of a configuration, so that a report compares it with any other run.

Arguments are shown as they were given: FedProx(mu=0.1) is `algorithm: FedProx` and `algorithm.mu: 0.1`, as in a configuration.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from types import FunctionType
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelSummary, ProgressBar, Timer
from torch import nn

from lightning_fl.algorithms import Algorithm
from lightning_fl.checks import Remembering, is_a, parameters_of
from lightning_fl.data import FederatedDataModule
from lightning_fl.outputs.run_folder import UNKNOWN
from lightning_fl.settings.settings import UNKEPT, flag_value, hyper_parameters, kept_arguments, walk
from lightning_fl.slots import Part
from lightning_fl.steps.torch_optimizer import OptimizerMaker

BARE = (LightningModule, LightningDataModule)
ONLOOKERS = (Checkpoint, EarlyStopping, ModelSummary, ProgressBar, Timer)
"""Lightning's callbacks whose arguments under other names than their own, such as when to look, train nothing else."""
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
FROM_DATA = ("num_classes", "in_channels", "image_size")
"""Parameters of a model that a configuration leaves out if they are those of the data."""
DEFAULTS = {"precision": "32-true"}
"""Values of the trainer's attributes whose flags were not given."""


def written_settings(
    trainer: Any, model: LightningModule, data: FederatedDataModule, algorithm: Algorithm, seed: int
) -> dict[str, Any]:
    """Return the settings that decide the results of a run, by dotted keys, as plain values.

    Args:
        trainer: trainer of the run.
        model: the user's module.
        data: the user's data module.
        algorithm: the federated method.
        seed: seed of the run.
    """
    decisive = [name for name, flag in trainer.flags.items() if flag.resume is not None or flag.decides == "results"]
    flag_values = {
        name: trainer.limits[name] if name in trainer.limits else flag_value(trainer, name)
        for name in (*decisive, "log_every_n_rounds")  # the last tells how many rows there should be
        if name != "callbacks"  # which a configuration lists with their arguments, as below
    }
    settings: dict[str, Any] = {"seed_everything": seed}
    for name, value in flag_values.items():
        flag_settings = _flat(f"trainer.{name}", None if value == DEFAULTS.get(name) else value)
        if (
            is_dataclass(value) and name != "privacy"
        ):  # the class of such a flag cannot be chosen: no configuration names it
            del flag_settings[f"trainer.{name}"]
        settings |= flag_settings
    for position, callback in enumerate(trainer.given_callbacks):
        settings |= _flat(f"trainer.callbacks.{position}", callback)
    model_settings = _flat("model", model)
    for name in FROM_DATA:
        if model_settings.get(f"model.{name}") == getattr(data, name, None):
            model_settings.pop(f"model.{name}", None)
    return settings | model_settings | _flat("data", data) | _flat("algorithm", algorithm)


def _flat(key: str, value: Any) -> dict[str, Any]:
    """Return the plain values of a setting and of all in it by their keys."""
    return {name: plain_value for name, plain_value, _ in walk(key, value, True, _given_to)}


def _given_to(value: Any, changeable: bool) -> tuple[Any, list[tuple[str, Any, bool]]]:
    """Return what stands for a value, for an object its class's name, and all arguments of its constructor."""
    shown: Any = UNKEPT
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, OptimizerMaker):
        shown, inner = value.name, value.options.items()
    elif isinstance(value, (list, tuple)):
        inner = enumerate(value)
    elif isinstance(value, Mapping):
        inner = value.items()
    elif isinstance(value, type | FunctionType) and "<" not in value.__qualname__:
        shown = value.__qualname__
    elif isinstance(value, nn.Module) and not is_a(value, LightningModule):
        shown = f"{type(value).__name__} of {sum(p.numel() for p in value.parameters()):,} parameters"
        inner = [("layers", f"{zlib.crc32(ADDRESS.sub('', repr(value)).encode()):08x}")]
    else:
        shown, inner = type(value).__name__, _arguments(value).items()
    return shown, [(str(name), item, changeable) for name, item in inner]


def _arguments(value: Any) -> dict[str, Any]:
    """Return the arguments of an object's constructor by name, as far as the object keeps them; `UNKNOWN` for others."""
    if isinstance(value, Remembering):
        return dict(value.given_arguments)
    try:
        parameters = parameters_of(type(value))
    except (TypeError, ValueError):  # of a class written in C
        return {"settings": UNKNOWN}
    arguments = dict(hyper_parameters(value))
    attributes = getattr(value, "__dict__", {})
    attributes = attributes | attributes.get("_modules", {})
    if is_a(value, Callback):
        arguments = kept_arguments(value)
        attributes = {
            name: vars(value).get(f"_{name}", UNKNOWN) for name in arguments if not isinstance(value, ONLOOKERS)
        }
        return {name: attributes.get(name) if argument is UNKEPT else argument for name, argument in arguments.items()}
    if isinstance(value, Part) or is_dataclass(value):
        return {name: getattr(value, name) for name in parameters if hasattr(value, name)}
    for name in parameters:
        attribute = attributes.get(name, UNKNOWN)
        # ImageClassifier's hyper-parameter is None if its network is an object.
        if name not in arguments or (arguments[name] is None and isinstance(attribute, nn.Module)):
            arguments[name] = attribute
    # `LightningDataModule.from_datasets` and classes of other packages keep nothing of what they were given.
    describes = arguments or (is_a(value, LightningModule, LightningDataModule) and type(value) not in BARE)
    return arguments if describes else {"settings": UNKNOWN}

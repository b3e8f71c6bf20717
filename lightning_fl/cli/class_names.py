"""Names for the command line: commands, and the classes that a key of the configuration may name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch import loggers as lightning_loggers

from lightning_fl import aggregators, algorithms, callbacks, codecs, data, exchanges, modules, rules, steps
from lightning_fl.cli.type_descriptions import shown
from lightning_fl.errors import nearest
from lightning_fl.slots import Aggregator, Codec, Exchange, Rule, Step
from lightning_fl.trainer.lightning_parts import REFUSED_CALLBACKS

COMMANDS = ("fit", "validate", "test", "predict", "list", "report")
CLASS_PACKAGES: dict[str, tuple[list[Any], type]] = {
    "algorithm": ([algorithms], algorithms.Algorithm),
    "base": ([algorithms], algorithms.Algorithm),
    "rule": ([rules], Rule),
    "uplink": ([codecs], Codec),
    "downlink": ([codecs], Codec),
    "codec": ([codecs], Codec),
    "exchange": ([exchanges], Exchange),
    "aggregator": ([aggregators], Aggregator),
    "inner": ([aggregators], Aggregator),
    "steps": ([steps], Step),
    "stages": ([steps], Step),
    "data": ([data], data.FederatedDataModule),
    "partition": ([data], data.Partition),
    "model": ([modules], LightningModule),
    "callbacks": ([callbacks, lightning_callbacks], lightning_callbacks.Callback),
    "logger": ([lightning_loggers], lightning_loggers.Logger),
}
"""Packages with the classes for a key, and their base class, by the last part of the key."""
LISTS = ("callbacks", "logger", "stages", "steps")
"""Keys that may name several classes."""
BASES = (
    lightning_callbacks.BasePredictionWriter,
    lightning_callbacks.Callback,
    lightning_callbacks.Checkpoint,
    lightning_callbacks.ProgressBar,
    *REFUSED_CALLBACKS,
)
"""Classes that a configuration may not name: base classes, and callbacks that a federation does not support."""


def classes_under(key: str) -> dict[str, type]:
    """Return by name the classes of lightning_fl and Lightning that `key` may name; empty if it names no class.

    >>> sorted(classes_under("data.partition"))
    ['Dirichlet', 'IID', 'Shards']
    """
    folders, base = CLASS_PACKAGES.get(key.rpartition(".")[2], ([], object))
    found = [getattr(folder, name) for folder in folders for name in getattr(folder, "__all__", [])]
    named = [c for c in found if isinstance(c, type) and issubclass(c, base) and not _is_base(c)]
    return {c.__name__: c for c in sorted(named, key=lambda c: c.__name__)}


def _is_base(found: type) -> bool:
    return inspect.isabstract(found) or found in BASES


def class_misfit(given: Any, key: str, shown_key: str) -> str | None:
    """Return what is wrong with a class that is given by name, by a mapping with class_path, or in a list of these.

    Args:
        given: value of the key.
        key: key of the configuration that names classes.
        shown_key: name of the key in the sentence.

    Returns:
        Error sentence; None if the class exists and is of the right kind.
    """
    leaf = key.rpartition(".")[2]
    base = CLASS_PACKAGES[leaf][1]
    if isinstance(given, list):
        inner = next((misfit for one in given if (misfit := class_misfit(one, key, shown_key))), None)
        return inner or (
            None if leaf in LISTS else f"{shown_key} must be one class of kind {base.__name__}, got {shown(given)}."
        )
    if isinstance(given, Mapping) and "class_path" not in given:
        return f"{shown_key} needs the key class_path with the name of a class, got {', '.join(map(str, given))}."
    name = given["class_path"] if isinstance(given, Mapping) else given
    if not isinstance(name, str):
        allowed = f"the name of a class of kind {base.__name__}, or a mapping with class_path and init_args"
        return f"{shown_key} must be {allowed}, got {shown(name)}."
    known = classes_under(key)
    module, _, last = name.rpartition(".")
    if not module or not name.replace(".", "").isidentifier():
        network = (
            f"it is a network: use --{key}.network {name}; " if leaf == "model" and name in modules.NETWORKS else ""
        )
        begins = name.partition("(")[0]
        return None if name in known else f"{shown_key} {name!r} is unknown; {network}{nearest(begins, known)}."
    try:
        found = import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            return f"{shown_key} {name!r} is unknown: there is no module {error.name!r}; {nearest(last, known)}."
        return f"{shown_key} {name!r}: importing {module} failed ({type(error).__name__}: {error})."
    if not hasattr(found, last):
        own = [n for n, x in vars(found).items() if isinstance(x, type) and x.__module__ == module]
        of_ours = module.partition(".")[0] == "lightning_fl"
        others = nearest(last, known) if of_ours else nearest(last, own) if own else "and no other class"
        return f"{shown_key} {name!r} is unknown: the module {module!r} has no {last!r}, {others}."
    member = getattr(found, last)
    if not (isinstance(member, type) and issubclass(member, base)):
        return f"{shown_key} {name!r} is not a subclass of {base.__name__}; {nearest(last, known)}."
    return None

"""Names of the classes that a key of the configuration may name."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch import loggers as lightning_loggers

from lightning_fl import aggregators, algorithms, callbacks, codecs, data, exchanges, modules, personal, rules, steps
from lightning_fl.checks import is_lightnings
from lightning_fl.checks.other_names import unknown_class
from lightning_fl.cli import catalogue
from lightning_fl.cli.type_descriptions import shown
from lightning_fl.errors import nearest
from lightning_fl.features import attacks, privacy, selection
from lightning_fl.features.privacy.mechanism import Privacy
from lightning_fl.slots import Aggregator, Codec, Exchange, Personal, Rule, Step
from lightning_fl.trainer.lightning_parts import REFUSED_CALLBACKS

CLASS_PACKAGES: dict[str, tuple[list[Any], type]] = {
    **dict.fromkeys(("algorithm", "base"), ([algorithms], algorithms.Algorithm)),
    "rule": ([rules], Rule),
    **dict.fromkeys(("uplink", "downlink", "codec", "values"), ([codecs], Codec)),
    "exchange": ([exchanges], Exchange),
    **dict.fromkeys(("aggregator", "inner"), ([aggregators], Aggregator)),
    **dict.fromkeys(("steps", "stages"), ([steps], Step)),
    "personal": ([personal], Personal),
    "data": ([data], data.FederatedDataModule),
    "partition": ([data], data.Partition),
    "sizes": ([data], data.Sizes),
    "shift": ([data], data.Shift),
    "attack": ([attacks], attacks.Attack),
    "model": ([modules], LightningModule),
    "privacy": ([privacy], Privacy),
    "selection": ([selection], selection.ClientSelection),
    "callbacks": ([callbacks, lightning_callbacks], lightning_callbacks.Callback),
    "logger": ([lightning_loggers], lightning_loggers.Logger),
    **dict.fromkeys(("optimizer", "server_optimizer"), ([torch.optim], torch.optim.Optimizer)),
    "lr_scheduler": ([torch.optim.lr_scheduler], torch.optim.lr_scheduler.LRScheduler),
}
"""Packages with the classes for a key, and their base class, by the last part of the key."""
KEYS = ("class_path", "init_args", "dict_kwargs")
"""Keys of a mapping that stands for a class."""
BESIDE = "the parameters of a class belong under its key init_args, not beside class_path"
"""Remedy for `{class_path: FedProx, mu: 0.1}`."""
LISTS = ("callbacks", "logger", "personal", "stages", "steps")
"""Keys that may name several classes."""
BASES = {"BaseFinetuning", "BasePredictionWriter", "Callback", "Checkpoint", "LRScheduler", "Optimizer", "ProgressBar"}
OF_SCHEDULERS = {"ChainedScheduler", "SequentialLR"}
"""Schedulers that take other schedulers, built with an optimiser, which a configuration cannot give."""
HIDDEN = {*BASES, *OF_SCHEDULERS, "LBFGS", *(c.__name__ for c in REFUSED_CALLBACKS)}
"""Classes that a configuration may not name: base classes, and classes that a federation does not support."""


def classes_under(key: str) -> dict[str, type]:
    """Return by name the classes of lightning_fl and Lightning that `key` may name; empty if it names no class.

    >>> sorted(classes_under("data.partition"))
    ['ByGroup', 'ClassPriors', 'Classes', 'Dirichlet', 'GivenIndices', 'IID', 'LogNormalSizes', 'QuantitySkew', 'Shards']
    """
    folders, base = CLASS_PACKAGES.get(key.rpartition(".")[2], ([], object))
    named = {name: getattr(folder, name) for folder in folders for name in getattr(folder, "__all__", [])}
    classes = {name: c for name, c in sorted(named.items()) if isinstance(c, type) and issubclass(c, base)}
    return {name: c for name, c in classes.items() if not inspect.isabstract(c) and name not in HIDDEN}


def class_misfit(value: Any, key: str, shown_key: str) -> str | None:
    """Return the error of a class that is given by name, by a mapping with class_path, or in a list of these.

    Args:
        value: value of the key.
        key: key of the configuration that names classes.
        shown_key: name of the key in the sentence.

    Returns:
        Error sentence; None if the class exists and is of the right kind.
    """
    leaf = key.rpartition(".")[2]
    base, known_classes = CLASS_PACKAGES[leaf][1], classes_under(key)
    if isinstance(value, list) and leaf in LISTS:
        classes = [one for one in value if leaf != "personal" or not isinstance(one, str)]  # others name layers
        return next((misfit for one in classes if (misfit := class_misfit(one, key, shown_key))), None)
    if leaf == "personal" and isinstance(value, str) and value not in known_classes:
        return f"{shown_key} is a list of parts, or of names of layers, got {value!r}: give [{value}]."
    if isinstance(value, Mapping) and "class_path" not in value:
        return f"{shown_key} needs the key class_path with the name of a class, got {', '.join(map(str, value))}."
    if isinstance(value, Mapping) and (beside := [str(name) for name in value if name not in KEYS]):
        return f"{shown_key}: {BESIDE}, got {', '.join(beside)}."
    name = value["class_path"] if isinstance(value, Mapping) else value
    if not isinstance(name, str):
        kind = f"{'a' if leaf in LISTS else 'one'} class of kind {base.__name__}"
        return f"{shown_key} must be the name of {kind}, or a mapping with class_path and init_args, got {shown(name)}."
    module, _, last = name.rpartition(".")
    if not module or not name.replace(".", "").isidentifier():
        if name in known_classes:
            return None
        begins = name.partition("(")[0]
        flag = next((one.flag for one in catalogue.entries() if one.name == begins), None)
        if flag is None or begins in known_classes:
            return f"{shown_key} {name!r} is unknown; {unknown_class(begins, known_classes)}."
        whole = f"--model ImageClassifier {flag}" if flag == "--model.network" else flag
        return f"{shown_key} {name!r} is unknown; it belongs to {flag}: use {whole} {begins}."
    if misfit := path_misfit(name, shown_key, known_classes):
        return misfit
    named_object = getattr(import_module(module), last)
    if not (isinstance(named_object, type) and issubclass(named_object, base)):
        if isinstance(named_object, type) and any(
            is_lightnings(named_object, kind) and not issubclass(named_object, kind)
            for kind in (LightningModule, LightningDataModule)
        ):
            return (
                f"{shown_key} {name!r} is a class of pytorch_lightning, which FederatedTrainer accepts in Python, but the "
                "command line does not: call FederatedTrainer(…).fit(…), or define the class with lightning.pytorch instead."
            )
        if leaf == "data" and isinstance(named_object, type) and issubclass(named_object, LightningDataModule):
            return (
                f"{shown_key} {name!r} does not divide its samples over clients, but Federated does it (parameters of {last} "
                f"become --data.datamodule.NAME): use --data Federated --data.datamodule {name} --data.num_clients 100."
            )
        return f"{shown_key} {name!r} is not a subclass of {base.__name__}; {nearest(last, known_classes)}."
    return None


def path_misfit(name: str, shown_key: str, known_classes: Collection[str] = ()) -> str | None:
    """Return the error of a dotted path that names nothing; None if it can be imported.

    Args:
        name: the path, such as `my_project.Net`.
        shown_key: name of the key in the sentence.
        known_classes: names of this package's classes for the key.
    """
    module, _, last = name.rpartition(".")
    is_ours = last in known_classes or module.partition(".")[0] == "lightning_fl"
    try:
        if hasattr(import_module(module), last):
            return None
    except Exception as error:
        if not isinstance(error, ModuleNotFoundError) or not f"{module}.".startswith(f"{error.name}."):
            return f"{shown_key} {name!r}: importing {module} failed ({type(error).__name__}: {error})."
        found = f"there is no module {error.name!r}"
        remedy = f"; {unknown_class(name, known_classes)}" if is_ours else " in the current folder or installed"
    else:
        own = [n for n, x in vars(sys.modules[module]).items() if isinstance(x, type) and x.__module__ == module]
        found = f"the module {module!r} has no {last!r}"
        remedy = f"; {unknown_class(name, known_classes) if is_ours else nearest(last, own)}"
    return f"{shown_key} {name!r} is unknown: {_hidden(module) or found + remedy}."


def _hidden(module: str) -> str | None:
    """Return the error if an installed package of the same name hides a module of the current folder; None otherwise."""
    first = module.partition(".")[0]
    file = next((path for path in (Path(f"{first}.py"), Path(first)) if path.exists()), None)
    taken = getattr(sys.modules.get(first), "__file__", None)
    if file is None or taken is None or Path(taken).is_relative_to(Path.cwd()):
        return None
    return f"{file} in the current folder has the name of the installed package {taken}, which Python finds first: rename it"

"""Settings behind the published numbers, and how a run's settings differ from them.

`papers.yaml` contains the published ones of FedDUMAP (Liu et al., ACM TIST 2024) and FedAdam-SSM (Deng et al., 2024). A setting
that neither the paper nor its authors' code states, such as the minibatches of FedAdam-SSM, is not compared. Any other setting
counts as different unless it has its default, as in the shipped configurations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.resources import files
from math import isclose
from typing import Any

import yaml

from lightning_fl.outputs.run_folder import UNKNOWN
from lightning_fl.outputs.units import counted
from lightning_fl.report import catalogue
from lightning_fl.report.labels import experiment_settings, setting, shown
from lightning_fl.report.records import SOURCES, Record, flatten

Settings = dict[str, Any]
"""Values by the keys of `PHRASES`, the most important first."""


@cache
def papers() -> dict[str, Any]:
    """Return the content of `papers.yaml`: names in the papers, and the settings behind their numbers."""
    return yaml.safe_load(files("lightning_fl.report").joinpath("papers.yaml").read_text())


# Options that the setting of a row may contain.
OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "p": ("p", lambda value: float(value.rstrip("%")) / 100),
    "server_noniid_degree": ("server classes", lambda value: papers()["degrees"][float(value)]),
    "tau_eff": ("tau_eff", lambda value: float(value) if value.isdigit() else "full"),
    "C": ("C", float),
    "f'": ("f", lambda value: "one_minus" if value == "1-acc" else "inverse"),
}
# Flag whose value is compared unchanged, or None, and the text for a value that differs.
PHRASES: dict[str, tuple[str | None, Callable[[Any], str]]] = {
    "data": (None, str),
    "partition": (None, str),
    "model": (None, str),
    "options": (
        None,
        lambda value: shown([f"{name}={shown(value[name])}" for name in value]) if value else "no network_options",
    ),
    "p": ("data.server_fraction", lambda value: f"p={100 * value:g}%"),
    "server classes": (None, lambda value: f"server classes: {shown(value)}"),
    "tau_eff": ("algorithm.tau_eff", lambda value: f"tau_eff={shown(value)}"),
    "C": ("algorithm.C", "C={:g}".format),
    "f": ("algorithm.f", "f={}".format),
    "alpha": ("algorithm.alpha", "alpha={:g}".format),
    "beta": ("algorithm.beta", "beta={:g}".format),
    "local beta": ("algorithm.local_beta", "local_beta={:g}".format),
    "prune round": ("algorithm.prune_round", "prune_round={}".format),
    "sources": (None, "{} sources".format),
    "interval": ("algorithm.interval", "interval={}".format),
    "cap": ("algorithm.cap", "cap={:g}".format),
    "weights": ("algorithm.weighting", "weighted by {}".format),
    "beta1": ("algorithm.beta1", "beta1={:g}".format),
    "beta2": ("algorithm.beta2", "beta2={:g}".format),
    "epsilon": ("algorithm.epsilon", "epsilon={:g}".format),
    "clients": ("data.num_clients", "{} clients".format),
    "cohort": (None, "{} a round".format),
    "work": (None, str),
    "rounds": (None, "{} rounds".format),
    "batch": ("data.batch_size", "batch {}".format),
    "learning rate": ("model.learning_rate", "learning rate {:g}".format),
    "decay": ("model.lr_decay", "lr_decay {:g}".format),
    "share": ("data.client_fraction", "client_fraction {:g}".format),
    "augment": ("data.augment", lambda value: "augmented" if value else "not augmented"),
    "computation": (None, "computation: {}".format),
}
# Flags that `settings_of` reads, or that do not change the results of training.
READ_OR_HARMLESS = (
    "algorithm algorithm.mask algorithm.max_sources data data.eval_batch_size data.partition data.partition.alpha "
    "data.partition.shards_per_client data.partition.skip_full_clients data.server_classes data.server_degree model "
    "model.network trainer.clients_per_round trainer.clock.computation_seconds trainer.local_epochs "
    "trainer.local_steps trainer.max_rounds trainer.val_every_n_rounds"
)
OPTIONS_FLAG = "model.network_options."
MAX_PHRASES = 5


def published_settings(paper: str, dataset: str, network: str, algorithm: str, setting: str) -> Settings:
    """Return the settings behind a row of a table.

    Args:
        paper: name of the paper for `--paper`.
        dataset: name of the data set in the paper.
        network: name of the network.
        algorithm: name of the method in this package.
        setting: options that the row states, separated by `; `.

    >>> published_settings("fedadam-ssm", "SVHN", "resnet18", "FedAdam", "Dirichlet(0.1)")["partition"]
    'Dirichlet(0.1)'
    """
    published = papers()
    method_settings = published["methods"].get(algorithm, {})
    partition = setting if paper == "fedadam-ssm" else f"Shards({published['shards'][dataset]})"
    wanted: Settings = {"data": dataset.replace("-", ""), "partition": partition}
    wanted |= {"model": "ImageClassifier", "options": published["options"][paper].get(network, {})}
    if network in published["computation"][paper]:
        wanted["computation"] = f"{published['computation'][paper][network]:g} s"
    wanted |= published["settings"][paper] | method_settings
    if "p" in method_settings:
        wanted["server classes"] = published["server_classes"][dataset]
        options = dict(part.split("=", 1) for part in setting.split("; ") if "=" in part)
        wanted |= {OPTIONS[name][0]: OPTIONS[name][1](value) for name, value in options.items()}
    return wanted


def settings_of(record: Record) -> Settings:
    """Return a run's settings under the same names, without unknown ones except the data and the partition."""
    settings = {key: value for key, value in record.settings.items() if value != UNKNOWN}
    named = Settings()
    data = str(settings.get("data", "unknown data"))
    source = settings.get(SOURCES.get(data, ""))
    named["data"] = data if source is None else f"{data} of {shown(source)}"
    named["partition"] = _partition(settings)
    if settings.get("trainer.local_steps"):
        named["work"] = counted(settings["trainer.local_steps"], "step")
    elif "trainer.local_steps" in settings:
        named["work"] = counted(settings.get("trainer.local_epochs") or 1, "epoch")
    cohort = settings.get("trainer.clients_per_round")
    if isinstance(cohort, float) and settings.get("data.num_clients"):
        cohort = max(1, round(cohort * settings["data.num_clients"]))
    named |= {"cohort": cohort, "rounds": record.num_rounds}
    if "algorithm.prune_round" in settings:
        named["sources"] = settings.get("algorithm.max_sources") or "all"
    degree = settings.get("data.server_degree")
    named["server classes"] = settings.get("data.server_classes") or "all"
    for published_degree, num_classes in papers()["degrees"].items():
        if degree is not None and isclose(published_degree, degree, abs_tol=5e-3):
            named["server classes"] = num_classes
    named["model"] = settings.get("model", "ImageClassifier")
    named["options"] = {
        flag.removeprefix(OPTIONS_FLAG): value for flag, value in settings.items() if flag.startswith(OPTIONS_FLAG)
    }
    seconds = settings.get("trainer.clock.computation_seconds")
    named["computation"] = "estimated" if seconds is None else f"{seconds:g} s"
    named |= {name: settings.get(flag) for name, (flag, _) in PHRASES.items() if flag}
    if settings.get("optimizer") is not None:  # the command line replaces the module's own
        named["learning rate"] = settings.get("optimizer.lr")
    return {name: value for name, value in named.items() if value is not None}


def differences(wanted: Settings, record: Record) -> list[str]:
    """Return a run's values of the settings that differ from the published ones, the most important first."""
    run_settings = settings_of(record)
    named = [
        _phrase(name, run_settings[name])
        for name in PHRASES
        if name in wanted and name in run_settings and not _equal(wanted[name], run_settings[name])
    ]
    unknown = [
        f"{name} unknown"
        for name, (flag, _) in PHRASES.items()
        if name in wanted and record.settings.get(flag or "") == UNKNOWN
    ]
    return [*named, *unknown, *(setting(record, flag) for flag in _others(record))]


def _phrase(name: str, value: Any) -> str:
    """Return a setting's value as a phrase; unchanged if it should be a number and is not."""
    try:
        return PHRASES[name][1](value)
    except (TypeError, ValueError):
        return f"{name} {shown(value)}"


def _others(record: Record) -> list[str]:
    """Return the flags that no row names and that do not have their default."""
    left_out = {*READ_OR_HARMLESS.split(), *SOURCES.values(), *(flag for flag, _ in PHRASES.values())}
    flags = []
    for flag, value in experiment_settings(record.settings).items():
        part, _, name = flag.partition(".")
        if flag in left_out or flag.startswith(OPTIONS_FLAG) or value == UNKNOWN:
            continue
        owner = catalogue.TRAINER if part == "trainer" else str(record.settings.get(part))
        defaults = _defaults().get(owner, {})
        # Skip an unknown flag of a class or of its default part. No paper has a flag without a class, such as --optimizer.
        default = defaults.get(name, defaults.get(name.partition(".")[0], value) and value) if name else None
        if not _equal(default, value):
            flags.append(flag)
    return flags


@cache
def _defaults() -> dict[str, Settings]:
    """Return the default values of the flags of every class that a configuration may name, and of the trainer's, by class."""
    return {
        name: flatten({flag: one["default"] for flag, one in of.items() if "default" in one})
        for name, of in catalogue.parameters().items()
    }


def in_short(differing: list[str]) -> str:
    """Return the differences as a table cell.

    >>> in_short([]), in_short(["Digits", "IID"])
    ('as published', 'Digits, IID')
    """
    more = len(differing) - MAX_PHRASES
    return ", ".join(differing[:MAX_PHRASES] + [f"{more} more"] * (more > 0)) or "as published"


def _partition(settings: Settings) -> str:
    """Return the partition's class and parameter, such as `Shards(2)`."""
    name = str(settings.get("data.partition", "unknown partition"))
    option = {"Shards": "shards_per_client", "Dirichlet": "alpha"}.get(name)
    number = settings.get(f"data.partition.{option}")
    plain = settings.get("data.partition.skip_full_clients") is False
    skipping = ", full clients not skipped" if name == "Dirichlet" and plain else ""
    return name if number is None else f"{name}({shown(number)}{skipping})"


def _equal(wanted: Any, value: Any) -> bool:
    wanted, value = (list(each) if isinstance(each, tuple) else each for each in (wanted, value))
    numbers = isinstance(wanted, (int, float)) and isinstance(value, (int, float))
    return isclose(wanted, value, rel_tol=1e-6) if numbers else str(wanted) == str(value)

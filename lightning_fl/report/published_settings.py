"""Settings behind the published numbers, and how a run's settings differ from them.

`papers.yaml` contains the published ones of FedDUMAP (Liu et al., ACM TIST 2024) and FedAdam-SSM (Deng et al., 2024). A setting
that neither the paper nor its authors' code states, such as the minibatches of FedAdam-SSM, is not compared.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.resources import files
from math import isclose
from typing import Any

import yaml

from lightning_fl.outputs.run_folder import UNKNOWN
from lightning_fl.report.labels import counted, shown
from lightning_fl.report.records import SOURCES, Record

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
# Flag of a run that has the value, if one does as it is, and text for a value that differs.
PHRASES: dict[str, tuple[str | None, Callable[[Any], str]]] = {
    "data": (None, str),
    "partition": (None, str),
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
}
MAX_PHRASES = 5


def published_settings(paper: str, dataset: str, algorithm: str, setting: str) -> Settings:
    """Return the settings behind a row of a table.

    Args:
        paper: name of the paper for `--paper`.
        dataset: name of the data set in the paper.
        algorithm: name of the method in this package.
        setting: options that the row states, separated by `; `.

    >>> published_settings("fedadam-ssm", "SVHN", "FedAdam", "Dirichlet(0.1)")["partition"]
    'Dirichlet(0.1)'
    """
    known = papers()
    of_method = known["methods"].get(algorithm, {})
    partition = setting if paper == "fedadam-ssm" else f"Shards({known['shards'][dataset]})"
    wanted: Settings = {"data": dataset.replace("-", ""), "partition": partition}
    wanted |= known["settings"][paper] | of_method
    if "p" in of_method:
        wanted["server classes"] = known["server_classes"][dataset]
        options = dict(part.split("=", 1) for part in setting.split("; ") if "=" in part)
        wanted |= {OPTIONS[name][0]: OPTIONS[name][1](value) for name, value in options.items()}
    return wanted


def settings_of(record: Record) -> Settings:
    """Return a run's settings under the same names, without unknown ones except the data and the partition."""
    given = {key: value for key, value in record.settings.items() if value != UNKNOWN}
    found = Settings()
    data = str(given.get("data", "unknown data"))
    source = given.get(SOURCES.get(data, ""))
    found["data"] = data if source is None else f"{data} of {shown(source)}"
    found["partition"] = _partition(given)
    if given.get("trainer.local_steps"):
        found["work"] = counted(given["trainer.local_steps"], "step")
    elif "trainer.local_steps" in given:
        found["work"] = counted(given.get("trainer.local_epochs") or 1, "epoch")
    cohort = given.get("trainer.clients_per_round")
    if isinstance(cohort, float) and given.get("data.num_clients"):
        cohort = max(1, round(cohort * given["data.num_clients"]))
    found |= {"cohort": cohort, "rounds": record.num_rounds}
    if "algorithm.prune_round" in given:
        found["sources"] = given.get("algorithm.max_sources") or "all"
    degree = given.get("data.server_degree")
    found["server classes"] = given.get("data.server_classes", "all")
    for known, num_classes in papers()["degrees"].items():
        if degree is not None and isclose(known, degree, abs_tol=5e-3):
            found["server classes"] = num_classes
    found |= {name: given.get(flag) for name, (flag, _) in PHRASES.items() if flag}
    return {name: value for name, value in found.items() if value is not None}


def differences(wanted: Settings, record: Record) -> list[str]:
    """Return a run's values of the settings that differ from the published ones, the most important first."""
    own = settings_of(record)
    return [
        phrase(own[name])
        for name, (_, phrase) in PHRASES.items()
        if name in wanted and name in own and not _equal(wanted[name], own[name])
    ]


def in_short(differing: list[str]) -> str:
    """Return the differences as a table cell.

    >>> in_short([]), in_short(["Digits", "IID"])
    ('as published', 'Digits, IID')
    """
    more = len(differing) - MAX_PHRASES
    return ", ".join(differing[:MAX_PHRASES] + [f"{more} more"] * (more > 0)) or "as published"


def _partition(given: Settings) -> str:
    """Return the partition's class and parameter, such as `Shards(2)`."""
    name = given.get("data.partition", "unknown partition")
    option = {"Shards": "shards_per_client", "Dirichlet": "alpha"}.get(name)
    number = given.get(f"data.partition.{option}")
    plain = given.get("data.partition.skip_full_clients") is False
    skipping = ", full clients not skipped" if name == "Dirichlet" and plain else ""
    return str(name) if number is None else f"{name}({shown(number)}{skipping})"


def _equal(wanted: Any, own: Any) -> bool:
    numbers = isinstance(wanted, (int, float)) and isinstance(own, (int, float))
    return isclose(wanted, own, rel_tol=1e-6) if numbers else str(wanted) == str(own)

"""Settings behind the published numbers, and how a run's settings differ from them.

The settings come from the papers, or from the authors' code where a paper does not state them: FedDUMAP (Liu et al., ACM TIST
2024), FedAdam-SSM (2024). A setting that neither states, such as the minibatches of FedAdam-SSM, is not compared.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isclose
from typing import Any

from lightning_fl.report.labels import shown
from lightning_fl.report.records import SOURCES, Record

Settings = dict[str, Any]
"""Values by the keys of `PHRASES`, the most important first."""

DATASETS = {"CIFAR-10": "CIFAR10", "CIFAR-100": "CIFAR100", "Fashion-MNIST": "FashionMNIST", "SVHN": "SVHN"}
COMMON: dict[str, Settings] = {
    "feddumap": {
        "clients": 100,
        "cohort": 10,
        "work": "5 epochs",
        "rounds": 500,
        "batch": 10,
        "learning rate": 0.1,
        "decay": 0.99,
        "share": 0.8,
        "augment": True,
    },
    "fedadam-ssm": {"clients": 20, "cohort": 20, "work": "30 steps", "learning rate": 0.001},
}
# Shards of each client, and classes of the server's samples.
SHARDS = {"CIFAR-10": (2, 5), "CIFAR-100": (20, 50)}
DEGREES = {0.61: 2, 0.31: 5, 9.0e-6: 10}
TRAIN_ON_THE_SERVER = {"DataSharing", "FedDF", "FedDU", "FedDUAP", "FedDUM", "FedDUMAP", "FedDUS", "FedKT", "HybridFL"}
DYNAMIC = {"FedDU", "FedDUAP", "FedDUM", "FedDUMAP"}
SPARSE = {"FedAdamSSM", "FedAdamTop", "FairnessTop"}
# Options that the setting of a row may contain.
OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "p": ("p", lambda value: float(value.rstrip("%")) / 100),
    "server_noniid_degree": ("server classes", lambda value: DEGREES[float(value)]),
    "tau_eff": ("tau_eff", lambda value: float(value) if value.isdigit() else "full"),
    "C": ("C", float),
    "f'": ("f", lambda value: "one_minus" if value == "1-acc" else "inverse"),
}
# Text for a value that differs.
PHRASES: dict[str, Callable[[Any], str]] = {
    "data": str,
    "partition": str,
    "p": lambda value: f"p={100 * value:g}%",
    "server classes": lambda value: f"server classes: {shown(value)}",
    "tau_eff": lambda value: f"tau_eff={shown(value)}",
    "C": lambda value: f"C={value:g}",
    "f": lambda value: f"f={value}",
    "alpha": lambda value: f"alpha={value:g}",
    "clients": lambda value: f"{value} clients",
    "cohort": lambda value: f"{value} a round",
    "work": str,
    "rounds": lambda value: f"{value} rounds",
    "batch": lambda value: f"batch {value}",
    "learning rate": lambda value: f"learning rate {value:g}",
    "decay": lambda value: f"lr_decay {value:g}",
    "share": lambda value: f"client_fraction {value:g}",
    "augment": lambda value: "augmented" if value else "not augmented",
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
    wanted: Settings = {"data": DATASETS[dataset]}
    if paper == "fedadam-ssm":
        wanted["partition"] = setting
    else:
        shards, classes = SHARDS[dataset]
        wanted["partition"] = f"Shards({shards})"
        if algorithm in TRAIN_ON_THE_SERVER:
            wanted |= {"p": 0.1, "server classes": classes} | (
                {"C": 1.0, "f": "one_minus"} if algorithm in DYNAMIC else {}
            )
            options = dict(part.split("=", 1) for part in setting.split("; ") if "=" in part)
            wanted |= {OPTIONS[name][0]: OPTIONS[name][1](value) for name, value in options.items()}
    if algorithm in SPARSE:
        wanted["alpha"] = 0.05
    return wanted | COMMON[paper]


def settings_of(record: Record) -> Settings:
    """Return a run's settings under the same names, without unknown ones except the data and the partition."""
    given, found = record.settings, Settings()
    data = str(given.get("data", "unknown data"))
    source = given.get(SOURCES.get(data, ""))
    found["data"] = data if source is None else f"{data} of {shown(source)}"
    found["partition"] = _partition(given)
    if given.get("trainer.local_steps"):
        found["work"] = _counted(given["trainer.local_steps"], "step")
    elif "trainer.local_steps" in given:
        found["work"] = _counted(given.get("trainer.local_epochs") or 1, "epoch")
    cohort = given.get("trainer.clients_per_round")
    if isinstance(cohort, float) and "data.num_clients" in given:
        cohort = max(1, round(cohort * given["data.num_clients"]))
    found |= {"cohort": cohort, "rounds": record.num_rounds}
    degree = given.get("data.server_degree")
    near = [
        classes for known, classes in DEGREES.items() if degree is not None and isclose(known, degree, abs_tol=5e-3)
    ]
    found["server classes"] = near[0] if near else given.get("data.server_classes", "all")
    flags = {
        "p": "data.server_fraction",
        "tau_eff": "algorithm.tau_eff",
        "C": "algorithm.C",
        "f": "algorithm.f",
        "alpha": "algorithm.alpha",
        "clients": "data.num_clients",
        "batch": "data.batch_size",
        "learning rate": "model.learning_rate",
        "decay": "model.lr_decay",
        "share": "data.client_fraction",
        "augment": "data.augment",
    }
    found |= {name: given.get(flag) for name, flag in flags.items()}
    return {name: value for name, value in found.items() if value is not None}


def differences(wanted: Settings, record: Record) -> list[str]:
    """Return a run's values of the settings that differ from the published ones, the most important first."""
    own = settings_of(record)
    return [
        PHRASES[name](own[name])
        for name in PHRASES
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
    uneven = ", not balanced" if name == "Dirichlet" and given.get("data.partition.balanced") is False else ""
    return str(name) if number is None else f"{name}({shown(number)}{uneven})"


def _counted(count: Any, thing: str) -> str:
    return f"{count} {thing}{'s' * (count != 1)}"


def _equal(wanted: Any, own: Any) -> bool:
    numbers = isinstance(wanted, (int, float)) and isinstance(own, (int, float))
    return isclose(wanted, own, rel_tol=1e-6) if numbers else str(wanted) == str(own)

"""Numbers that the methods' papers print, to be put beside one's own.

`published.csv` has a line for each: those of tables 2 to 13 of FedDUMAP (Liu et al., Efficient Federated Learning Using
Dynamic Update and Adaptive Pruning with Momentum on Shared Server Data, ACM TIST 2024) and of table I of FedAdam-SSM (2024).
Times are the paper's simulated ones. Times of methods whose own final accuracy misses the target are left out.
`rounds` are not printed: they are those times divided by the seconds that a round takes on the paper's clock, where that is a
whole number. The megabits of FedAdam-SSM are those of one client, in units that no parameter count explains: look at ratios.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from importlib.resources import files

from lightning_fl.errors import UserError, nearest
from lightning_fl.report.comparison import Group, Metric, mean_and_spread
from lightning_fl.report.published_settings import differences, published_settings

PAPERS = {
    "feddumap": "FedDUMAP (Liu et al., ACM TIST 2024)",
    "fedadam-ssm": "FedAdam-SSM (2024)",
}
# What the papers call the methods that have another name here, and which of their settings that means.
METHODS: dict[str, tuple[str, dict[str, str]]] = {
    "Data-sharing": ("DataSharing", {}),
    "Hybrid-FL": ("HybridFL", {}),
    "FedDU-S": ("FedDUS", {}),
    "FedAdam-SSM": ("FedAdamSSM", {"mask": "parameters"}),
    "FedAdam-SSM_M": ("FedAdamSSM", {"mask": "first_moment"}),
    "FedAdam-SSM_V": ("FedAdamSSM", {"mask": "second_moment"}),
    "FedAdam-Top": ("FedAdamTop", {}),
    "Fairness-Top": ("FairnessTop", {}),
    "1-bit Adam": ("OneBitAdam", {}),
    "Efficient Adam": ("EfficientAdam", {}),
}


@dataclass(frozen=True)
class PublishedRow:
    """One method in one setting of a table.

    Attributes:
        paper: as `--paper` names it.
        dataset: as the paper calls it.
        network: as `ImageClassifier` calls it.
        method: as the paper calls it.
        setting: what else the paper says of it.
        target: the accuracy that `simulated_seconds`, `rounds` and `uplink_mbit_per_client` are for.
        numbers: by metric; infinity where the target is never reached.
    """

    paper: str
    dataset: str
    network: str
    method: str
    setting: str
    target: float | None
    numbers: dict[str, float]

    @property
    def algorithm(self) -> str:
        """What the method is called here."""
        return METHODS.get(self.method, (self.method, {}))[0]

    def is_of(self, group: Group) -> bool:
        """Whether a group's runs are of this method and network."""
        options = METHODS.get(self.method, ("", {}))[1]
        fits = all(group.settings.get(f"algorithm.{key}", "parameters") == value for key, value in options.items())
        return group.algorithm == self.algorithm and fits and group.settings.get("model.network") == self.network

    def differences(self, group: Group) -> list[str]:
        """What a group's runs have in place of the settings behind this row; empty if they are the same."""
        wanted = published_settings(self.paper, self.dataset, self.algorithm, self.setting)
        return list(dict.fromkeys(said for curve in group.curves for said in differences(wanted, curve.record)))


@dataclass(frozen=True)
class PublishedTable:
    """A table of a paper.

    Attributes:
        title: paper and number.
        rows: its rows.
    """

    title: str
    rows: tuple[PublishedRow, ...]

    def nearest_rows(self, group: Group) -> list[PublishedRow]:
        """The rows of a group's method and network from whose settings its own differ least."""
        found = [(len(row.differences(group)), row) for row in self.rows if row.is_of(group)]
        least = min((count for count, _ in found), default=0)
        return [row for count, row in found if count == least]

    def missing(self, group: Group) -> str | None:
        """Why no row is of a group's method and network; None if one is."""
        if any(row.is_of(group) for row in self.rows):
            return None
        if all(row.algorithm != group.algorithm for row in self.rows):
            return f"no row is of {group.algorithm}"
        network = group.settings.get("model.network")
        return (
            "nothing says which network it is" if network is None else f"no row of its method has the network {network}"
        )


def read_published(name: str) -> PublishedTable:
    """The table that `paper:table` names.

    Raises:
        UserError: there is none of that name.

    >>> read_published("feddumap:10").title
    'FedDUMAP (Liu et al., ACM TIST 2024), table 10'
    """
    text = files("lightning_fl.report").joinpath("published.csv").read_text()
    lines = list(csv.DictReader(text.splitlines()))
    tables = dict.fromkeys(f"{line['paper']}:{line['table']}" for line in lines)
    wanted = {table.lower(): table for table in tables}.get(name.lower())
    if wanted is None:
        raise UserError(f"there is no published table {name!r}; {nearest(name, tables)}.")
    paper, _, number = wanted.partition(":")
    rows: dict[tuple[str, str, str, str], dict[str, float]] = {}
    targets: dict[tuple[str, str, str, str], float] = {}
    for line in lines:
        if (line["paper"], line["table"]) == (paper, number):
            key = (line["dataset"], line["network"], line["method"], line["setting"])
            rows.setdefault(key, {})[line["metric"]] = float(line["value"])
            if line["target"]:
                targets[key] = float(line["target"])
    found = tuple(PublishedRow(paper, *key, targets.get(key), numbers) for key, numbers in rows.items())
    return PublishedTable(f"{PAPERS[paper]}, table {number}", found)


def measured(row: PublishedRow, group: Group) -> dict[str, tuple[float | None, float | None, int]]:
    """What a group has of the numbers in a published row, as mean, spread and count: at the row's own target."""
    found: dict[str, list[float | None]] = {name: [] for name in row.numbers}
    for curve in group.curves:
        own: dict[str, float | None] = {
            "final_accuracy": curve.numbers["final"],
            "mflops": curve.numbers["mflops"],
        }
        if row.target is not None:
            price = curve.price(Metric(target=row.target))
            own |= {name: price[name] for name in ("simulated_seconds", "rounds")}
            cohort = curve.record.column("clients/selected")[-1]
            if price["uplink"] is not None:
                own["uplink_mbit_per_client"] = price["uplink"] * 8 / 1e6 / cohort
        for name, values in found.items():
            values.append(own.get(name))
    return {name: mean_and_spread(values) for name, values in found.items()}

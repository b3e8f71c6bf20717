"""Numbers printed in the methods' papers, to compare with your own.

`published.csv` has one line for each number of tables 2 to 13 of FedDUMAP (Liu et al., Efficient Federated Learning Using
Dynamic Update and Adaptive Pruning with Momentum on Shared Server Data, ACM TIST 2024) and of table I of FedAdam-SSM (2024).
The final accuracy of FedDUMAP is the maximum of a smoothed curve (`lightning_fl.report.smoothing`), here `best (smoothed)`.
Times are the paper's simulated times. Times of methods whose final accuracy misses the target are left out.
The rows that tables 10 to 13 call ServerM, DeviceM and FedDA are FedDU-SM, FedDU-DM and FedDU-DA, as section 4.2.2 says.
The papers do not print `rounds`: they are these times divided by the seconds of a round on the paper's clock, where that is a
whole number. The megabits of FedAdam-SSM count one client; except for the CNN's, no parameter count explains them: compare
only ratios.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from importlib.resources import files

from lightning_fl.errors import UserError, nearest
from lightning_fl.report.comparison import Group, Metric, mean_and_spread
from lightning_fl.report.published_settings import differences, papers, published_settings


@dataclass(frozen=True)
class PublishedRow:
    """Row of a published table: one method in one setting.

    Attributes:
        paper: name of the paper for `--paper`.
        dataset: name of the data set in the paper.
        network: name of the network for `ImageClassifier`.
        method: name of the method in the paper.
        setting: other settings that the table states.
        target: accuracy at which `simulated_seconds`, `rounds` and `uplink_mbit_per_client` are measured; None without.
        numbers: values by metric; infinity if the target is never reached.
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
        """Name of the method in this package."""
        return papers()["names"].get(self.method, self.method.replace("-", ""))

    def is_of(self, group: Group) -> bool:
        """True if a group's runs use this method and network."""
        fits = papers()["masks"].get(self.method) in (None, group.settings.get("algorithm.mask", "parameters"))
        return group.algorithm == self.algorithm and fits and group.settings.get("model.network") == self.network

    def differences(self, group: Group) -> list[str]:
        """Return a group's values of the settings that differ from this row's; empty if none differ."""
        wanted = published_settings(self.paper, self.dataset, self.network, self.algorithm, self.setting)
        return list(dict.fromkeys(phrase for curve in group.curves for phrase in differences(wanted, curve.record)))


@dataclass(frozen=True)
class PublishedTable:
    """Table of a paper.

    Attributes:
        title: name of the paper and number of the table.
        rows: rows of the table.
    """

    title: str
    rows: tuple[PublishedRow, ...]

    def nearest_rows(self, group: Group) -> list[PublishedRow]:
        """Return the rows of a group's method and network whose settings are nearest to the group's."""
        counted_rows = [(len(row.differences(group)), row) for row in self.rows if row.is_of(group)]
        least = min((count for count, _ in counted_rows), default=0)
        return [row for count, row in counted_rows if count == least]

    def missing(self, group: Group) -> str | None:
        """Return why no row has a group's method and network; None if a row has them."""
        if any(row.is_of(group) for row in self.rows):
            return None
        if all(row.algorithm != group.algorithm for row in self.rows):
            return f"it has no row for {group.algorithm}"
        network = group.settings.get("model.network")
        if network is None:
            return "its network is unknown"
        return f"it has no row for {group.algorithm} with the network {network}"


def read_published(name: str) -> PublishedTable:
    """Return the table that `paper:table` names.

    Raises:
        UserError: no table has that name.

    >>> read_published("feddumap:10").title
    'FedDUMAP (Liu et al., ACM TIST 2024), table 10'
    """
    tables: dict[str, list[dict[str, str]]] = {}
    for line in csv.DictReader(files("lightning_fl.report").joinpath("published.csv").read_text().splitlines()):
        tables.setdefault(f"{line['paper']}:{line['table']}", []).append(line)
    wanted = {table.lower(): table for table in tables}.get(name.lower())
    if wanted is None:
        raise UserError(f"there is no published table {name!r}; {nearest(name, tables)}.")
    paper, _, number = wanted.partition(":")
    rows: dict[tuple[str, str, str, str], list[dict[str, str]]] = {}
    for line in tables[wanted]:
        rows.setdefault((line["dataset"], line["network"], line["method"], line["setting"]), []).append(line)
    published_rows = []
    for key, lines in rows.items():
        target = next((float(line["target"]) for line in lines if line["target"]), None)
        published_rows.append(
            PublishedRow(paper, *key, target, {line["metric"]: float(line["value"]) for line in lines})
        )
    return PublishedTable(f"{papers()['titles'][paper]}, table {number}", tuple(published_rows))


def measured(row: PublishedRow, group: Group) -> dict[str, tuple[float | None, float | None, int]]:
    """Return a group's numbers for the metrics of a published row, as mean, spread and count, at the row's target."""
    measurements = []
    for curve in group.curves:
        numbers = {"final_accuracy": curve.numbers["best"], "mflops": curve.numbers["mflops"]}
        if row.target is not None:
            numbers |= curve.price(Metric(target=row.target))
            cohort_size = curve.record.column("clients/selected").mean()  # which a private run draws, and may hide
            if numbers["uplink"] is not None and cohort_size > 0:
                numbers["uplink_mbit_per_client"] = numbers["uplink"] * 8 / 1e6 / cohort_size
        measurements.append(numbers)
    return {name: mean_and_spread([numbers.get(name) for numbers in measurements]) for name in row.numbers}

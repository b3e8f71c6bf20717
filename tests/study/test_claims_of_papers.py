"""Test the papers' figures of the shipped studies against the published tables."""

import re
from math import inf, isclose
from pathlib import Path

import pytest

from lightning_fl.report.published import PublishedRow, read_published
from lightning_fl.study.claims import NEVER, Claim
from lightning_fl.study.study_file import read_study

STUDIES = sorted((Path(__file__).parents[2] / "configs" / "studies").glob("fed[ad]*.yaml"))
PAPERS = {"feddumap": "feddumap", "fedadam": "fedadam-ssm"}
COSTS = {
    "mflops": "mflops",
    "target_simulated_seconds": "simulated_seconds",
    "target_uplink": "uplink_mbit_per_client",
    NEVER: "uplink_mbit_per_client",
}


def letters(text: str) -> str:
    return re.sub(r"[\W_]", "", text).lower().replace("onebit", "1bit")


def is_printed(claim: Claim, ours: PublishedRow, theirs: PublishedRow) -> bool:
    """True if two rows have the figure of a claim, for a target that its source names."""
    metric = COSTS.get(claim.number, "final_accuracy")
    if claim.number == NEVER:  # FedDUMAP's tables have no time then
        return theirs.numbers.get(metric, inf) == inf and "simulated_seconds" not in theirs.numbers
    if metric not in ours.numbers or metric not in theirs.numbers:
        return False
    assert claim.paper is not None
    if not claim.is_ratio:
        return isclose(ours.numbers[metric] - theirs.numbers[metric], claim.paper, abs_tol=1e-6)
    is_of_target = claim.target is None or claim.source.endswith(f" to {ours.target:g}")
    return is_of_target and isclose(ours.numbers[metric] / theirs.numbers[metric], claim.paper, rel_tol=0.005)


@pytest.mark.parametrize(
    "path", [path for path in STUDIES if path.stem.startswith(tuple(PAPERS))], ids=lambda path: path.stem
)
def test_the_figures_of_claims_are_those_of_the_published_tables(path: Path) -> None:
    """Check differences, ratios and their targets, and what is never reached; of a row's several settings one has to fit."""
    file = read_study(path)
    assert file.regime is not None
    network, dataset, *_ = file.regime.paper.split(", ")
    methods = {cell.name: [letters(Path(word).stem) for word in cell.arguments] for cell in file.cells}
    (paper,) = (PAPERS[name] for name in PAPERS if path.stem.startswith(name))
    num_checked = 0
    for claim in file.claims:
        tables = re.match(r"tables? (\w+)(?: and (\w+))?, ", claim.source)
        if tables is None or (claim.paper is None and claim.number != NEVER):
            continue
        rows = [row for number in tables.groups() if number for row in read_published(f"{paper}:{number}").rows]
        rows = [row for row in rows if row.dataset == dataset and row.network.startswith(letters(network))]
        ours, theirs = (
            [row for row in rows if letters(row.method) in methods[name]] for name in (claim.better, claim.than)
        )
        assert any(is_printed(claim, row, other) for row in ours for other in theirs), claim
        num_checked += 1
    assert num_checked or path.stem == "fedadam_ssm_clients"

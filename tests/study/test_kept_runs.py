"""Test that docs/results.md says what the kept runs of the studies show."""

import tarfile
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest

from lightning_fl.cli.planned_fit import resolve
from lightning_fl.report.clients import clients_table
from lightning_fl.report.comparison import Curve, Group, Metric
from lightning_fl.report.records import read_run
from lightning_fl.study.budget import efficiency_table
from lightning_fl.study.command import curves_of, verdicts_of
from lightning_fl.study.study_file import PlannedRun, read_study

pytestmark = pytest.mark.usefixtures("types_of_a_new_process")

ROOT = Path(__file__).parents[2]
KEPT = sorted((ROOT / "docs" / "results" / "runs").glob("*.tar.xz"))
PAGE = (ROOT / "docs" / "results.md").read_text()


def kept_runs(archive: Path, folder: Path) -> list[PlannedRun]:
    """Unpack the runs of a study, whatever the digests of their settings were then."""
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    study = folder / archive.name.partition(".")[0]
    paths = sorted(path.parent for path in study.glob("*/seed-*/metrics.csv"))
    return [PlannedRun(path.parent.name, int(path.name.split("-")[1]), path, (), 0) for path in paths]


def test_runs_are_kept() -> None:
    assert KEPT


@pytest.mark.parametrize("archive", KEPT, ids=lambda path: path.name.partition(".")[0])
def test_the_verdicts_are_those_of_the_kept_runs(archive: Path, tmp_path: Path) -> None:
    file = read_study(ROOT / "configs" / "studies" / f"{archive.name.partition('.')[0]}.yaml")
    runs = kept_runs(archive, tmp_path)
    assert {run.cell for run in runs} <= {cell.name for cell in file.cells}
    for claim, verdict in zip(file.claims, verdicts_of(file, curves_of(file, runs)), strict=True):
        interval = (
            "" if verdict.num_seeds < 2 or verdict.mean is None else f" ({verdict.low:.3g} to {verdict.high:.3g})"
        )
        here = "" if verdict.mean is None else f"{verdict.mean:.3g}{interval}"
        paper = "" if claim.paper is None else f"{claim.paper:.3g}"
        assert f"| {claim.text} | {paper} | {here} | {verdict.outcome} |" in PAGE


@pytest.mark.parametrize("name", ["fedadam_ssm", "feddp", "feddumap", "fedldf"])
def test_the_tables_of_the_papers_pages_are_those_of_the_kept_runs(name: str, tmp_path: Path) -> None:
    """Check mean and spread of the final and best accuracies, and of the rounds to the target where these are tens."""
    file = read_study(ROOT / "configs" / "studies" / f"{name}_small.yaml")
    runs = kept_runs(ROOT / "docs" / "results" / "runs" / f"{name}_small.tar.xz", tmp_path)
    text = (ROOT / "docs" / "results" / f"{name}.md").read_text()
    for cell, curves in curves_of(file, runs).items():
        numbers = [curve.numbers for curve in curves.values()]
        for value in ("final", "best") if name in ("feddp", "feddumap") else ("final",):  # what their claims are about
            found = [number[value] for number in numbers]
            assert f"| {fmean(found):.3f} ± {stdev(found):.3f} |" in text, (cell, value)
        rounds = [number.get("target_rounds") for number in numbers]
        if name in ("feddumap", "fedldf") and None not in rounds:
            assert f"| {fmean(rounds):.0f} ± {stdev(rounds):.0f} |" in text, cell


FULL = ("feddumap", "fedldf", "feddp", "fedadam_ssm", "fedadam_ssm_dirichlet")


@pytest.mark.parametrize("name", FULL)
def test_every_claim_of_a_paper_has_a_row(name: str) -> None:
    for claim in read_study(ROOT / "configs" / "studies" / f"{name}.yaml").claims:
        paper = "" if claim.paper is None else f"{claim.paper:.3g}"
        assert f"| {claim.text} | {paper} |" in PAGE


def test_the_table_of_accuracy_per_byte_is_that_of_the_kept_runs(tmp_path: Path) -> None:
    file = read_study(ROOT / "configs" / "studies" / "accuracy_per_byte.yaml")
    runs = {
        (run.cell, run.seed): run
        for run in kept_runs(ROOT / "docs" / "results" / "runs" / "accuracy_per_byte.tar.xz", tmp_path)
    }
    ordered = [runs[cell.name, seed] for cell in file.cells for seed in file.seeds]
    assert file.budget is not None
    found = {
        cell: {seed: file.budget.measure(curve) for seed, curve in curves.items()}
        for cell, curves in curves_of(file, ordered).items()
    }
    text = (ROOT / "docs" / "results" / "accuracy_per_byte.md").read_text()
    rows = efficiency_table(found).rows
    assert len(rows) == 30
    for row in rows:
        assert f"| {' | '.join(row)} |" in text


@pytest.mark.parametrize(("study", "page"), [("fedopt_clients", "fedopt"), ("personal_small", "personal")])
def test_the_tables_over_clients_are_those_of_the_kept_runs(study: str, page: str, tmp_path: Path) -> None:
    runs: dict[str, list[Curve]] = {}
    for run in kept_runs(ROOT / "docs" / "results" / "runs" / f"{study}.tar.xz", tmp_path):
        runs.setdefault(run.cell, []).append(Curve(read_run(run.folder), Metric("val/accuracy")))
    groups = [Group(cell, tuple(curves)) for cell, curves in runs.items()]
    text = (ROOT / "docs" / "results" / f"{page}.md").read_text()
    rows = clients_table(groups, groups[0].curves[0].metric).rows
    assert len(rows) >= len(groups) > 3
    for row in rows:
        assert f"| {' | '.join(row)} |" in text


@pytest.mark.slow
@pytest.mark.parametrize("archive", KEPT, ids=lambda path: path.name.partition(".")[0])
def test_the_study_finds_its_kept_runs(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the digests in the folders' names: a new parameter has the default null, or parts old runs from new ones."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.chdir(tmp_path)
    labels = np.arange(20) % 10
    images = np.zeros((20, 32, 32, 3), np.uint8)
    np.savez("cifar10.npz", train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    name = archive.name.partition(".")[0]
    with tarfile.open(archive) as file:
        kept = {Path(path).parent.relative_to(name) for path in file.getnames() if path.endswith("metrics.csv")}
    study = read_study(ROOT / "configs" / "studies" / f"{name}.yaml")
    assert kept <= {run.folder for run in study.runs(Path(), resolve)}

"""Test that docs/results.md says what the kept runs of the studies show."""

import re
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from made_runs import rising, write_run

from lightning_fl.cli.planned_fit import read, resolve
from lightning_fl.report.clients import clients_table
from lightning_fl.report.comparison import Curve, Group, Metric
from lightning_fl.report.published_settings import settings_of
from lightning_fl.report.records import read_run
from lightning_fl.study.claims import Claim
from lightning_fl.study.searches import open_searches
from lightning_fl.study.study_file import read_study

pytestmark = pytest.mark.usefixtures("types_of_a_new_process")
reads_archives = pytest.mark.process  # they take seconds to unpack, and hold what the pages say

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs"))

import claims  # noqa: E402
import client_figures  # noqa: E402
from claims import kept_runs  # noqa: E402

STUDIES = sorted((ROOT / "configs" / "studies").glob("*.yaml"))
KEPT = sorted((ROOT / "docs" / "results" / "runs").glob("*.tar.xz"))
PAGE = (ROOT / "docs" / "results.md").read_text()


def rows_of(text: str) -> list[str]:
    """Return the lines of tables without their heads."""
    lines = text.splitlines()
    heads = {number + shift for number, line in enumerate(lines) if line.startswith("| ---") for shift in (-1, 0)}
    return [line for number, line in enumerate(lines) if line.startswith("| ") and number not in heads]


def tables_of_claims() -> list[str]:
    """Return the tables of claims of the page, a table for each study."""
    blocks = re.findall(r"<!-- claims: .+? -->\n\n(.*?)\n\n<!-- end -->", PAGE, re.DOTALL)
    return [table for block in blocks for table in block.split("\n\n") if table.startswith("| ")]


def verdict_of(row: str) -> str:
    """Return the verdict of a row, of which the last cell may be that after the correction."""
    *_, before, last = (cell.strip() for cell in row.strip("| ").split("|"))
    is_corrected = not last or re.fullmatch(r"(stands|undecided) \(q .*\)", last)
    return before if is_corrected else last


def test_runs_are_kept() -> None:
    assert KEPT


def test_every_picture_of_the_pages_is_drawn_by_a_program() -> None:
    drawn = [f"{picture.name}.{kind}" for picture in claims.PICTURES for kind in picture.kinds]
    drawn += [f"{name}.svg" for name in client_figures.PICTURES]
    assert sorted(drawn) == sorted(path.name for path in claims.IMAGES.iterdir())


@reads_archives
@pytest.mark.parametrize("page", claims.PAGES, ids=lambda path: path.stem)
def test_the_tables_of_the_pages_are_those_of_the_kept_runs(page: Path) -> None:
    """Check every claim's figures and verdict, and the tables of runs: `python docs/claims.py` writes them."""
    text = page.read_text(encoding="utf-8")
    assert claims.with_tables(text) == text


def test_an_archive_fills_the_rows_of_its_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cell, slope in {"FedDP": 0.015, "SCAFFOLD": 0.016}.items():
        write_run(tmp_path / "feddp_width" / cell / "seed-0-0", rising(40, slope))
    with tarfile.open(tmp_path / "feddp_width.tar.xz", "w:xz") as file:
        file.add(tmp_path / "feddp_width", "feddp_width")
    monkeypatch.setattr(claims, "RUNS", tmp_path)
    monkeypatch.setattr(claims, "read_kept", claims.read_kept.__wrapped__)
    shown = claims.claims_of("FedDP")
    with_runs, *without = re.split("<details><summary>", shown)
    (row,) = rows_of(with_runs)
    assert row.endswith("| -0.040 | one seed: beyond the margin |")  # and no column of corrections
    assert (
        sum("not run yet: lightning-fl study feddp_controls, 8 core hours</summary>" in part for part in without) == 1
    )
    assert all(row.endswith("| not run yet |") for part in without for row in rows_of(part))
    names = claims.TABLES["FedDP"]
    assert len(without) == len(names) - 1
    assert len(rows_of(shown)) == sum(len(read_study(claims.STUDIES / f"{name}.yaml").claims) for name in names)
    page = claims.with_tables("a\n\n<!-- runs: feddp_width -->\n\nold\n\n<!-- end -->\n\nb\n")
    assert "| SCAFFOLD |    1 | " in page
    assert "old" not in page
    assert claims.with_tables(page) == page


@pytest.mark.parametrize("has_floor", [False, True])
def test_differences_below_that_of_a_method_from_itself_are_called_so(
    has_floor: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test an archive with and without the cell `Again`, whose final accuracy is by 0.02, 0.01 and 0.04 above FedAvg's."""
    finals = {
        "FedAvg": [0.70, 0.71, 0.72],
        "Again": [0.72, 0.72, 0.76],
        "FedLDF": [0.80, 0.81, 0.80],
        "HDFL": [0.78, 0.789, 0.778],
        "FedADP": [0.60, 0.609, 0.601],
    }
    for cell in [cell for cell in finals if has_floor or cell != "Again"]:
        for seed, final in enumerate(finals[cell]):
            write_run(tmp_path / "fedldf_small" / f"{cell}-iid-pass" / f"seed-{seed}-0", [final] * 3, seed=seed)
    with tarfile.open(tmp_path / "fedldf_small.tar.xz", "w:xz") as file:
        file.add(tmp_path / "fedldf_small", "fedldf_small")
    monkeypatch.setattr(claims, "RUNS", tmp_path)
    monkeypatch.setattr(claims, "read_kept", claims.read_kept.__wrapped__)
    shown = claims.study_block("fedldf_small", [""] * len(claims.judged("fedldf_small")))
    assert "(`lightning-fl study fedldf_small`, 2 core hours)." in " ".join(shown.split())
    row, far = (
        next(row for row in rows_of(shown) if f"FedLDF ends more accurate than {name}" in row)
        for name in ("HDFL", "FedADP")
    )
    floor = re.search(r"The\s+floor, FedAvg-iid-pass from Again-iid-pass: (0\.\d+)\s+in\s+final", shown)
    assert (floor is not None) == has_floor
    assert verdict_of(row) == ("holds" if floor is None else f"does not hold: below the floor of {floor[1]}")
    assert verdict_of(far) == "holds"
    assert claims.kind_of(verdict_of(row)) == ("reproduced, or holds" if floor is None else "below the floor")


def test_the_summary_counts_every_row_of_the_tables_once() -> None:
    _, head, _, table, *_ = re.split(
        r"<!-- (?:summary: [^>]*|end) -->\n\n|\n\n", PAGE.partition("# Results")[2].lstrip()
    )
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in table.splitlines()[2:]]
    verdicts = [verdict_of(line) for of in tables_of_claims() for line in rows_of(of)]
    assert len(verdicts) == sum(int(count) for _, *counts, _, _ in rows for count in counts)
    for kind, *counts, where, _ in rows:
        of_kind = [verdict for verdict in verdicts if claims.kind_of(verdict) == kind]
        assert sum(map(int, counts)) == len(of_kind) == sum(map(int, re.findall(r" (\d+)(?:,|$)", where)))
    totals = [int(total) for total in re.findall(r"of (\d+) claims have runs", " ".join(head.split()))]
    assert totals == [sum(int(counts[at]) for _, *counts, _, _ in rows) for at in range(3)]


def test_every_claim_and_every_archive_has_a_place() -> None:
    titles = re.findall(r"<!-- claims: (.+?) -->", PAGE)
    assert sorted(titles) == sorted([*claims.TABLES, claims.LONG_TABLE])
    shown = {name for names in claims.TABLES.values() for name in names} | {*claims.LONG}
    assert shown == {path.stem for path in STUDIES if read_study(path).claims}
    texts = [path.read_text() for path in claims.PAGES]
    for name in {path.name.partition(".")[0] for path in KEPT} - shown:
        assert any(name in text for text in texts), name


def test_every_claim_of_a_paper_says_where_it_is_printed() -> None:
    for path in STUDIES:
        file = read_study(path)
        for claim in file.claims:
            assert claim.paper is None or claim.source, (path.stem, claim.text)
            assert not claim.is_of_paper or file.regime, path.stem


@pytest.mark.matrix
def test_a_mean_is_over_the_last_half_of_the_rounds() -> None:
    """Check that the later stage of FedLDF's paper is the same part of all studies, and so of none chosen after the runs."""
    for path in STUDIES:
        file = read_study(path)
        for claim in file.claims:
            if claim.between is not None:
                assert file.regime is not None
                num_rounds = int(file.regime.here.split(", ")[-2].split()[0].replace(",", ""))
                assert claim.between == (num_rounds // 2 + 1, num_rounds)


@reads_archives
@pytest.mark.parametrize("archive", KEPT, ids=lambda path: path.name.partition(".")[0])
def test_the_regime_of_a_study_is_that_of_its_kept_runs(archive: Path, tmp_path: Path) -> None:
    file = read_study(ROOT / "configs" / "studies" / f"{archive.name.partition('.')[0]}.yaml")
    runs = kept_runs(archive, tmp_path)
    assert {run.cell for run in runs} <= {cell.name for cell in file.cells}
    if file.regime is None:
        return
    network, *_, rounds, clients = file.regime.here.lower().split(", ")
    for run in runs:
        record = read_run(run.folder)
        of_run = settings_of(record)
        of_round = f"{of_run['cohort']} of {of_run['clients']}"
        assert of_round in clients.removesuffix(" clients").split(" or ")
        assert re.sub(r"\W", "", network).startswith(record.settings["model.network"].split("_")[0])
    assert rounds == f"{max(read_run(run.folder).num_rounds for run in runs):,} rounds"


@reads_archives
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


@reads_archives
def test_the_table_of_few_and_many_local_steps_is_that_of_the_kept_runs() -> None:
    """Check the ratios of rounds to the target, with their intervals, that FedDUMAP's page shows of two studies."""
    text = (ROOT / "docs" / "results" / "feddumap.md").read_text()
    rows = rows_of(text[text.index("| rounds to 0.8 | ") :].partition("\n\n")[0])
    assert len(rows) == 4
    for names, *figures in [[cell.strip() for cell in row.strip("| ").split("|")] for row in rows]:
        first, second = re.sub(",.*", "", names).split(" / ")
        claim = Claim("", f"{first}-five", f"{second}-five", "target_rounds")
        for study, shown in zip(("feddumap_small", "feddumap_steps"), figures, strict=True):
            pairs = claim.pairs(claims.read_kept(study)[1])
            assert shown == claims.figure(claim, claim.judge(pairs, Metric("test/accuracy"))), (study, names)


@pytest.mark.slow
@pytest.mark.parametrize("archive", KEPT, ids=lambda path: path.name.partition(".")[0])
def test_the_study_finds_its_kept_runs(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the digests in the folders' names: a new parameter has the default null, or parts old runs from new ones."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.chdir(tmp_path)
    labels = np.arange(20) % 10
    images = np.zeros((20, 32, 32, 3), np.uint8)
    for file, of_file in (("cifar10.npz", images), ("fashion_mnist.npz", images[:, :28, :28, 0])):
        np.savez(file, train_images=of_file, train_labels=labels, test_images=of_file, test_labels=labels)
    name = archive.name.partition(".")[0]
    with tarfile.open(archive) as runs:
        paths = [Path(path).relative_to(name) for path in runs.getnames() if path.endswith("metrics.csv")]
        kept = {path.parent for path in paths if path.match("*/seed-*/*")}
    study = read_study(ROOT / "configs" / "studies" / f"{name}.yaml")
    if study.search is not None:  # the archive has its journals
        kept_runs(archive, tmp_path)
        study = study.with_flags(open_searches(study, tmp_path / name, resolve).winners())
    runs_of_study = study.runs(Path(), resolve)
    assert kept <= {run.folder for run in runs_of_study}
    assert study.runs(Path(), read) == runs_of_study

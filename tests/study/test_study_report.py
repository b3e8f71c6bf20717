"""Test `lightning-fl report FILE`: the present runs of a study file, with the flags of a report."""

import re
import shutil
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from made_runs import rising, write_run

from lightning_fl.cli import main
from lightning_fl.cli.planned_fit import read
from lightning_fl.cli.shipped_configs import is_study
from lightning_fl.errors import UserError
from lightning_fl.outputs.figures import Look
from lightning_fl.study import report_on_study
from lightning_fl.study.budget import Budget, Efficiency
from lightning_fl.study.own_files import keep_digests
from lightning_fl.study.pictures import draw_areas, draw_front, draw_trials
from lightning_fl.study.study_file import read_study

CLAIM = {"text": "a pull helps", "better": "FedProx", "than": "FedAvg"}


def resolve(arguments: Sequence[str]) -> Mapping[str, Any]:
    """Return a configuration without the parser, which takes seconds: the flags as they are."""
    flags = [word.removeprefix("--").partition("=") for word in arguments]
    return {"trainer": {"max_rounds": 9}, **{name: value for name, _, value in flags}}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Look, "formats", ("svg",))


def write_study(mu: float = 0.1, out: Path = Path("runs/studies/study"), **content: Any) -> Path:
    """Write a study file and the folders of its runs, all done."""
    path = Path("study.yaml")
    grid = {"method": {"FedAvg": ["--algorithm=FedAvg"], "FedProx": ["--algorithm=FedProx", f"--mu={mu}"]}}
    path.write_text(yaml.safe_dump({"seeds": [0, 1], "window": 1, "grid": grid, **content}, sort_keys=False))
    for run in read_study(path).runs(out, resolve):
        if not run.folder.exists():
            write_run(run.folder, rising(9, 0.05 + 0.01 * run.seed), run.cell, run.seed)
            (run.folder / "done.json").write_text("{}")
    return path


def test_a_report_of_a_study_has_its_present_runs_alone() -> None:
    write_study(mu=0.1)
    path = write_study(mu=0.5, claims=[CLAIM], target=0.3)
    assert len(list(Path("runs").rglob("metrics.csv"))) == 6
    said = report_on_study(
        [str(path), "--format", "svg,tex", "--panels", "--label", "Average", "--label", "Pull"], resolve
    )
    assert re.findall(r"^\| (Average|Pull) +\| +(\d)", said.partition("## Results")[2], re.M)[:2] == [
        ("Average", "2"),
        ("Pull", "2"),
    ]
    assert "## Claims" in said
    assert "## Cost of reaching accuracy 0.3" in said
    page = Path("report/report.md").read_text(encoding="utf-8")
    assert page.startswith("# study: accuracy\n\n## ")
    assert (
        "lightning-fl study study.yaml\n# which trains, with the seeds 0, 1:\n# FedAvg\nlightning-fl fit --algo" in page
    )
    assert page.index("## Commands") < page.index("## Claims") < page.index("## Results")
    assert r"\multicolumn{3}{c}{to accuracy 0.3}" in Path("report/results.tex").read_text(encoding="utf-8")
    assert Path("report/accuracy_panels.svg").is_file()
    assert not Path("runs/studies/study/report").exists()


def test_a_report_tells_that_own_code_has_changed_since_the_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path.cwd()))
    Path("bases_of_report.py").write_text("class Base: ...")
    Path("own_of_report.py").write_text("from bases_of_report import Base\nclass Pull(Base): ...")
    stages = [
        {"class_path": "own_of_report.Pull"},
        {"class_path": "lightning_fl.steps.Apply"},
        {"class_path": "torch.nn.ReLU"},
    ]

    def with_own(arguments: Sequence[str]) -> Mapping[str, Any]:
        return {
            **resolve(arguments),
            "stages": stages if "--algorithm=FedProx" in arguments else [{"class_path": "gone.X"}],
        }

    path = write_study()
    for run in read_study(path).runs(Path("elsewhere"), with_own):
        assert [file.name for file in run.own_files] == ["bases_of_report.py", "own_of_report.py"] * (
            run.cell == "FedProx"
        )
        write_run(run.folder, rising(9, 0.05), run.cell, run.seed)
        (run.folder / "done.json").write_text("{}")
        keep_digests(run.folder, run.own_files)
    for content, said in {
        "": "",
        "class Base: x = 1": "bases_of_report.py has changed since 2 runs of FedProx began",
    }.items():
        Path("bases_of_report.py").write_text(content or "class Base: ...")
        report_on_study([str(path), "elsewhere"], with_own)
        assert capsys.readouterr().err.partition(", whose")[0] == said


@pytest.mark.parametrize("number", ["final", "best", "at_uplink", "rise"])
@pytest.mark.parametrize("seeds", [(1,), (0, 1)])
def test_runs_without_a_finite_value_are_no_runs_that_are_missing(number: str, seeds: Sequence[int]) -> None:
    """Test a method that diverges in its first round: with one seed of two, and with both."""
    path = write_study(claims=[{**CLAIM, "in": number}])
    for run in read_study(path).runs(Path("runs/studies/study"), resolve):
        if run.cell == "FedProx" and run.seed in seeds:
            header, *rows = (run.folder / "metrics.csv").read_text().splitlines()
            at = header.split(",").index("val/accuracy")
            cells = [row.split(",") for row in rows]
            lines = [",".join([*row[:at], "nan", *row[at + 1 :]]) for row in cells]
            (run.folder / "metrics.csv").write_text("\n".join([header, *lines]) + "\n")
    said = report_on_study([str(path)], resolve)
    assert f"does not hold: there is no finite value of FedProx in {len(seeds)} of 2" in said
    assert "not run yet" not in said


@pytest.mark.matrix
def test_a_report_tells_the_floor_and_the_claims_below_it() -> None:
    grid = {"FedAvg": ["--algorithm=FedAvg"], "again": ["--threads=2"], "FedProx": ["--algorithm=FedProx"]}
    path = write_study(claims=[CLAIM], floor=[["FedAvg", "again"]], grid={"method": grid})
    assert "The floor, FedAvg from again: 0." in report_on_study([str(path)], resolve)
    for run in read_study(path).runs(Path("runs/studies/study"), resolve):
        slope = {"FedAvg": 0.05, "again": 0.051 + 0.002 * run.seed, "FedProx": 0.0505}[run.cell]
        shutil.rmtree(run.folder)
        write_run(run.folder, rising(9, slope), run.cell, run.seed)
        (run.folder / "done.json").write_text("{}")
    said = report_on_study([str(path)], resolve)
    (floor,) = re.findall(r"The floor, FedAvg from again: (\S+) in final\.", said)
    assert f"does not hold: below the floor of {floor} " in said


@pytest.mark.matrix
def test_a_claim_is_below_the_floor_of_its_own_clients() -> None:
    """Test FedProx 0.02 ahead with few and with many clients, where FedAvg differs from itself by 0.005 and 0.05."""
    grid = {
        "method": {"FedAvg": ["--algorithm=FedAvg"], "again": ["--threads=2"], "FedProx": ["--algorithm=FedProx"]},
        "clients": {"few": ["--clients=2"], "many": ["--clients=9"]},
    }
    claims = [{"text": kind, "better": f"FedProx-{kind}", "than": f"FedAvg-{kind}"} for kind in grid["clients"]]
    floor = [[f"FedAvg-{kind}", f"again-{kind}"] for kind in grid["clients"]]
    path = write_study(claims=claims, floor=floor, grid=grid)
    ahead = {"again-few": 0.005, "again-many": 0.05, "FedProx-few": 0.02, "FedProx-many": 0.02}
    for run in read_study(path).runs(Path("runs/studies/study"), resolve):
        shutil.rmtree(run.folder)
        write_run(run.folder, [0.5 + ahead.get(run.cell, 0) * (1 + 0.01 * run.seed)] * 9, run.cell, run.seed)
        (run.folder / "done.json").write_text("{}")
    said = report_on_study([str(path)], resolve)
    assert re.search(r"^\| few .*\| holds ", said, re.M)
    assert re.search(r"^\| many .*\| does not hold: below the floor of 0\.05", said, re.M)
    assert re.search(
        r"from again-few: 0\.005 in final\. The floor, FedAvg-many from again-many: 0\.05\d in final\.", said
    )


@pytest.mark.matrix
def test_claims_of_the_file_are_not_judged_by_another_metric_or_target() -> None:
    path = write_study(claims=[CLAIM], budget=[1e3, 1e5])
    assert "## Accuracy per byte" in report_on_study([str(path)], resolve)
    assert "## Accuracy per byte" in report_on_study([str(path), "--window", "1"], resolve)
    for flags in (["--metric", "clients/accepted"], ["--target", "0.2"], ["--window", "5"]):
        said = report_on_study([str(path), *flags], resolve)
        assert "## Claims" not in said
        assert "## Accuracy per byte" not in said
        assert "Claims and budget belong to the metric, target and window of the study file." in said


@pytest.mark.usefixtures("types_of_a_new_process")
@pytest.mark.matrix
def test_a_report_needs_no_file_of_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("study.yaml")
    base = ["--model=ImageClassifier", "--data=Arrays", "--data.path=away.npz", "--trainer.max_rounds=9"]
    path.write_text(
        yaml.safe_dump(
            {
                "seeds": [0],
                "base": base,
                "grid": {"method": {name: [f"--algorithm={name}"] for name in ("FedAvg", "FedProx")}},
            }
        )
    )
    for run in read_study(path).runs(Path("runs/studies/study"), read):
        write_run(run.folder, rising(9), run.cell, run.seed)
        (run.folder / "done.json").write_text("{}")
    main(["report", str(path)])
    assert re.findall(r"^\| (FedAvg|FedProx) +\| +1 \|", capsys.readouterr().out, re.M)[:2] == ["FedAvg", "FedProx"]


def test_what_is_not_done_is_said() -> None:
    path = write_study(out=Path("elsewhere"))
    (next(Path("elsewhere/FedProx").glob("seed-1-*")) / "done.json").unlink()
    assert "- 1 of 4 runs of the study are not done.\n" in report_on_study([str(path), "elsewhere"], resolve)
    assert "lightning-fl study study.yaml --out elsewhere\n" in Path("report/report.md").read_text(encoding="utf-8")
    with pytest.raises(
        UserError, match=r"^runs/studies/study has no finished run of study.yaml as the file is now: `lightning"
    ):
        report_on_study([str(path)], resolve)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["non.yaml"], "there is no study file 'non.yaml'; among the package's studies, allowed: "),
        (["study.yaml", "a", "b"], "after a study file give at most one folder, the folder of its runs, got a, b."),
        (
            ["a", "study.yaml"],
            "a report takes runs, or one study file and the folder of its runs after it, got a study.yaml.",
        ),
        (["study.yaml", "--format", "bib"], "format 'bib' is unknown; allowed: pdf, png, svg, tex."),
        (["nothing"], "there is no run in nothing: the folder does not exist."),
    ],
)
def test_mistakes_of_the_command(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("study.yaml").write_text("seeds: [0]\ngrid: {method: {FedAvg: []}}\n")
    with pytest.raises(SystemExit) as ended:
        main(["report", *words])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.startswith(f"lightning-fl: error: {said}")
    assert error.count("\n") == 1


def found(spent: Mapping[str, float]) -> dict[str, dict[int, Efficiency]]:
    """Return what combinations have spent for the same accuracy."""
    return {name: {0: Efficiency(0.5, sent, 0.5, True, sent, None)} for name, sent in spent.items()}


def test_each_column_of_the_front_has_ticks_and_what_sends_nothing_is_a_line() -> None:
    choices = {f"{alpha}-{name}": (alpha, name) for alpha in "abcd" for name in ("LocalOnly", "FedAvg", "FedDyn")}
    cells = found({name: {"LocalOnly": 0.0, "FedAvg": 1e6, "FedDyn": 5e6}[of] for name, (_, of) in choices.items()})
    figure = draw_front(cells, choices, "accuracy", Budget(1e6, 1e8))
    assert len(figure.axes) == 4
    assert [axes.xaxis.get_tick_params()["labelbottom"] for axes in figure.axes] == [False, True, True, True]
    (bound,) = [line for line in figure.axes[0].lines if line.get_label() == "LocalOnly"]
    assert np.array_equal(bound.get_xydata(), [(0, 0.5), (1, 0.5)]), "across the width, in parts of it"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["LocalOnly", "FedAvg", "FedDyn"], "none is on a front"
    assert draw_front(found({"FedAvg": 0.0}), {"FedAvg": ("FedAvg",)}, "accuracy", Budget(1e6, 1e8)).legends


@pytest.mark.parametrize("is_sized", [False, True])
def test_numbers_of_a_map_have_room_or_are_left_out(is_sized: bool) -> None:
    choices = {f"{row}-{column}": (f"row-{row}", f"column-{column}") for row in range(2) for column in range(14)}
    figure = draw_areas(found(dict.fromkeys(choices, 1e6)), choices, Budget(1e6, 1e8), Look(is_sized=is_sized))
    assert figure is not None
    assert (figure.get_size_inches()[0] > Look.size[0]) != is_sized
    figure.draw_without_rendering()
    numbers = [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(numbers) == 28 * (not is_sized)
    assert not any(one.overlaps(other) for one, other in combinations(numbers, 2))


def test_searches_of_one_trial_are_points_and_those_of_none_have_no_name() -> None:
    figure = draw_trials({"a": {1: 0.5}, "b": {}}, {"a": {1: 0.5}, "b": {}}, "accuracy")
    assert figure is not None
    assert figure.axes[0].get_xticks().tolist() == [1]
    assert figure.axes[0].lines[0].get_marker() == "o"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["a"]


def test_a_folder_of_runs_is_no_study() -> None:
    Path("fedldf_small").mkdir()
    assert not is_study("fedldf_small")
    assert is_study("fedopt_small")
    assert is_study("configs/studies/fedopt_small.yaml")
    assert not is_study("runs/metrics.csv")

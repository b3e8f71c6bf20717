"""Test study files: their combinations, folders and mistakes."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_fl import UserError
from lightning_fl.study.study_file import read_study

GRID = {
    "method": {"avg": [], "prox": ["--algorithm=FedProx"]},
    "work": {"short": ["short.yaml"], "long": ["long.yaml"]},
}


def written(folder: Path, **content: Any) -> Path:
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump({"seeds": [0, 1], "grid": GRID, **content}, sort_keys=False))
    return path


def resolve(arguments: Any) -> dict[str, Any]:
    """Return a configuration of these arguments, as the command line would."""
    flags = dict(word.removeprefix("--").split("=", 1) for word in arguments)
    return {
        "seed_everything": int(flags["seed_everything"]),
        "trainer": {"max_rounds": 3, "default_root_dir": "anywhere", "logger": True, "threads": 2},
        "algorithm": {"class_path": flags.get("algorithm", "FedAvg")},
        "file": flags["config"],
        "data": {"class_path": "Digits", "init_args": {"seed": int(flags["data.seed"])}},
    }


def test_the_grid_is_a_product_without_what_is_excluded(tmp_path: Path) -> None:
    study = read_study(written(tmp_path, base=["base.yaml"], exclude=[{"method": "prox", "work": "long"}]))
    assert {cell.name: cell.arguments for cell in study.cells} == {
        "avg-short": ("--config=base.yaml", "--config=short.yaml"),
        "avg-long": ("--config=base.yaml", "--config=long.yaml"),
        "prox-short": ("--config=base.yaml", "--algorithm=FedProx", "--config=short.yaml"),
    }


def test_each_run_has_a_folder_that_names_its_cell_seed_and_configuration(tmp_path: Path) -> None:
    study = read_study(written(tmp_path))
    runs = study.runs(tmp_path, resolve)
    assert [(run.cell, run.seed) for run in runs][:5] == [
        ("avg-short", 0), ("avg-long", 0), ("prox-short", 0), ("prox-long", 0), ("avg-short", 1)
    ]  # fmt: skip
    assert len({run.folder for run in runs}) == 8
    assert all(run.folder.parent == tmp_path / run.cell for run in runs)
    digests = {run.cell: run.folder.name.rpartition("-")[2] for run in runs}
    assert len(set(digests.values())) == 4
    assert all(run.folder.name == f"seed-{run.seed}-{digests[run.cell]}" for run in runs), "the seed does not count"


@pytest.mark.parametrize(
    ("change", "is_another"),
    [
        ({"trainer": {"max_rounds": 4}}, True),
        ({"data": {"class_path": "Digits", "init_args": {"seed": 0, "num_clients": 5}}}, True),
        ({"trainer": {"max_rounds": 3, "default_root_dir": "elsewhere", "logger": False, "threads": 1}}, False),
    ],
)
def test_another_configuration_is_another_run(change: dict[str, Any], is_another: bool, tmp_path: Path) -> None:
    study = read_study(written(tmp_path))
    before = study.runs(tmp_path, resolve)
    after = study.runs(tmp_path, lambda arguments: {**resolve(arguments), **change})
    assert {run.folder for run in before}.isdisjoint({run.folder for run in after}) == is_another
    assert is_another or before == after


def test_two_cells_with_the_same_settings_are_refused(tmp_path: Path) -> None:
    grid = {"runner": {"one": ["file.yaml", "--threads=1"], "two": ["file.yaml", "--threads=2"]}}
    with pytest.raises(UserError, match=r"^one and two have the same settings"):
        read_study(written(tmp_path, grid=grid)).runs(tmp_path, resolve)


def test_a_flag_may_be_separated_from_its_value_by_a_blank(tmp_path: Path) -> None:
    words = ["--algorithm FedProx", "--algorithm.mu  0.1", "--trainer.default_root_dir=my runs", "my file.yaml"]
    (cell,) = read_study(written(tmp_path, base=[], grid={"method": {"prox": words}})).cells
    assert cell.arguments == (
        *("--algorithm=FedProx", "--algorithm.mu=0.1", "--trainer.default_root_dir=my runs"),
        "--config=my file.yaml",
    )


def test_all_cells_that_do_not_fit_are_named_at_once(tmp_path: Path) -> None:
    def refuse(arguments: Any) -> dict[str, Any]:
        if "--algorithm=FedProx" in arguments:
            raise UserError("mu is missing.")
        return resolve(arguments)

    with pytest.raises(UserError, match=r"^prox-short, prox-long: mu is missing\.$"):
        read_study(written(tmp_path)).runs(tmp_path, refuse)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"seed": [0]}, "'seed'; did you mean 'seeds'"),
        ({"seeds": []}, "needs the key 'seeds'"),
        ({"seeds": [0, 0]}, "different whole numbers"),
        ({"seeds": [0, True]}, "different whole numbers"),
        ({"seeds": 3}, "different whole numbers"),
        ({"grid": {}}, "needs the key 'grid'"),
        ({"grid": {"method": ["avg"]}}, "'method' must name its choices"),
        ({"grid": {"method": {"avg": "--algorithm=FedAvg"}}}, "the choice 'avg' of 'method' must be a list"),
        ({"grid": {"method": {"a/b": []}}}, "no spaces or slashes; got 'a/b'"),
        ({"base": "configs/quickstart.yaml"}, "base must be a list"),
        ({"exclude": [{"methods": "avg"}]}, "did you mean 'method'"),
        ({"exclude": [{"method": "pro"}]}, "did you mean 'prox'"),
        ({"exclude": [{}]}, "excludes every combination"),
        ({"claims": [{"text": "x", "better": "avg-short", "than": "prox", "paper": 1}]}, "did you mean 'prox-"),
        ({"claims": [{"text": "x", "better": "avg-short", "paper": 1}]}, "needs the key 'than'"),
        ({"claims": [{"text": "x", "better": "avg-short", "than": "avg-long", "paper": 0}]}, "other than 0"),
        (
            {"claims": [{"text": "x", "better": "avg-short", "than": "avg-long", "paper": -1, "margin": 1}]},
            "other than paper's",
        ),
        ({"claims": [{"text": "x", "better": "avg-short", "than": "avg-long", "paper": 2, "in": "best"}]}, "'best'"),
        (
            {"claims": [{"text": "x", "better": "avg-short", "than": "avg-long", "paper": 2, "in": "target_rounds"}]},
            "give a target",
        ),
    ],
)
def test_mistakes_are_said_in_a_sentence(content: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        read_study(written(tmp_path, **content))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_no_study_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no study file"):
        read_study(tmp_path / "none.yaml")
    for text, said in (("[1, 2]", "must contain the keys"), ("a: [", "is not valid YAML")):
        (tmp_path / "study.yaml").write_text(text)
        with pytest.raises(UserError, match=said):
            read_study(tmp_path / "study.yaml")

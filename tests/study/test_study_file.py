"""Test study files: their combinations, folders and mistakes."""

from contextlib import suppress
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import pytest
import yaml
from characters import CHARACTERS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_fl import UserError
from lightning_fl.study import study_file
from lightning_fl.study.study_file import KEYS, read_study

GRID = {
    "method": {"avg": [], "prox": ["--algorithm=FedProx"]},
    "work": {"short": ["short.yaml"], "long": ["long.yaml"]},
}


CLAIM = {"text": "x", "better": "avg-short", "than": "avg-long"}


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


def test_a_method_may_stand_beside_itself_as_the_floor(tmp_path: Path) -> None:
    grid = {"runner": {"one": ["file.yaml", "--threads=1"], "two": ["file.yaml", "--threads=2"]}}
    study = read_study(written(tmp_path, grid=grid, floor=[["one", "two"]]))
    assert len({run.folder for run in study.runs(tmp_path, resolve)}) == 2 * len(study.seeds)


SHORT, LONG = ("avg-short", "again-short"), ("avg-long", "again-long")


@pytest.mark.parametrize(
    ("better", "than", "pairs", "expected"),
    [
        ("prox-short", "avg-short", [SHORT, LONG], [SHORT]),
        ("prox-long", "avg-long", [SHORT, LONG], [LONG]),
        ("avg-long", "avg-short", [SHORT, LONG], [SHORT, LONG]),
        pytest.param("prox-long", "avg-long", [SHORT], [SHORT], id="none of its own"),
        pytest.param(
            "prox-long",
            "avg-long",
            [SHORT, ("avg-long", "again-short")],
            [("avg-long", "again-short")],
            id="no setting",
        ),
    ],
)
def test_the_floor_of_a_claim_is_that_of_its_settings(
    tmp_path: Path, better: str, than: str, pairs: list[tuple[str, str]], expected: list[tuple[str, str]]
) -> None:
    grid = {**GRID, "method": {**GRID["method"], "again": ["--threads=2"]}}
    claim = {**CLAIM, "better": better, "than": than}
    study = read_study(written(tmp_path, grid=grid, claims=[claim], floor=[list(pair) for pair in pairs]))
    assert study.floor_pairs(study.claims[0]) == tuple(expected)


def test_a_flag_may_be_separated_from_its_value_by_a_blank(tmp_path: Path) -> None:
    words = ["--algorithm FedProx", "--algorithm.mu  0.1", "--data.root=my runs", "my file.yaml"]
    (cell,) = read_study(written(tmp_path, base=[], grid={"method": {"prox": words}})).cells
    assert cell.arguments == (
        *("--algorithm=FedProx", "--algorithm.mu=0.1", "--data.root=my runs"),
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
        ({"base": ["--data.seed 9"]}, "base has --data.seed, but the study sets it for each run"),
        ({"exclude": [{"methods": "avg"}]}, "did you mean 'method'"),
        ({"exclude": [{1: "avg"}]}, "exclude names the axis '1'; allowed: method, work"),
        ({"seeds": [0, -1]}, "a seed must be a whole number from 0 to 4294967295, got -1"),
        ({"seeds": [0, 2**32]}, "a seed must be a whole number from 0 to 4294967295, got 4294967296"),
        ({"target": "abc"}, "target must be a number, got 'abc'"),
        ({"target": True}, "target must be a number, got True"),
        ({"target": 60, "metric": "val/accuracy"}, "write 60 % as 0.6"),
        ({"metric": 5}, "metric must be the name of a column of metrics.csv, got 5"),
        ({"window": 4}, "window must be 1 (no smoothing) or an odd number"),
        ({"window": "5"}, "window must be a whole number"),
        ({"grid": {"method": {True: [], "True": ["a.yaml"]}}}, "the axis 'method' has the choice 'True' twice"),
        ({"grid": {True: {"a": []}, "True": {"b": []}}}, "grid has the axis 'True' twice"),
        ({"grid": {"method": {"a\0b": []}}}, "that is no text: 'a\\x00b'"),
        ({"grid": {"method": {"a\nb": []}}}, "no spaces or slashes; got 'a\\nb'"),
        ({"grid": {"method": {"a" * 201: []}}}, "is longer than 200 bytes"),
        ({"grid": {f"axis{i}": {str(j): [] for j in range(10)} for i in range(8)}}, "has 100,000,000 combinations"),
        ({"base": ["/dev/null"]}, "base names /dev/null, which is not a file that every run can read again"),
        ({"exclude": [{"method": "pro"}]}, "did you mean 'prox'"),
        ({"exclude": [{}]}, "excludes every combination"),
        ({"claims": [{"text": "x", "better": "avg-short", "than": "prox", "paper": 1}]}, "did you mean 'prox-"),
        ({"claims": [{"text": "x", "better": "avg-short", "paper": 1}]}, "needs the key 'than'"),
        ({"claims": [{"text": "x", "better": "avg-short", "than": "avg-long", "paper": 0}]}, "other than 0"),
        (
            {"claims": [{"text": "x", "better": "avg-short", "than": "avg-long", "paper": -1, "margin": 1}]},
            "other than paper's",
        ),
        ({"claims": [{"text": "x", "better": "avg-short", "than": "avg-long", "paper": 2, "in": "most"}]}, "'most'"),
        (
            {"claims": [{"text": "x", "better": "avg-short", "than": "avg-long", "paper": 2, "in": "target_rounds"}]},
            "give a target",
        ),
        (
            {"claims": [CLAIM | {"rounds": 5}]},
            "is for `in: at_uplink, at_downlink, at_total_traffic` and `in: mean`, got `in: final`",
        ),
        (
            {"claims": [CLAIM | {"in": "largest_gap"}]},
            "tells equal methods apart in a fifth of all cases; use `in: mean`",
        ),
        (
            {"claims": [CLAIM | {"in": "mean"}]},
            "must be the first and the last round of `in: mean`, as [151, 300], got None",
        ),
        ({"claims": [CLAIM | {"in": "mean", "rounds": [9, 5]}]}, "must be a whole number of at least 9, got 5"),
        (
            {"claims": [CLAIM | {"bytes": 1e6}]},
            "is for `in: at_uplink, at_downlink, at_total_traffic` without rounds, got `in: final`",
        ),
        ({"claims": [CLAIM | {"bytes": -1, "in": "at_uplink"}]}, "must be a number above 0, got -1"),
        ({"claims": [CLAIM | {"metric": 5}]}, "must be a column of metrics.csv or a list of columns, got 5"),
        (
            {"target": 0.5, "claims": [CLAIM | {"in": "target_rounds", "metric": "val/loss", "paper": 2}]},
            "is not for target_rounds: it has no target",
        ),
        ({"target": 0.5, "claims": [CLAIM | {"in": "never_reached", "paper": 2}]}, "has no meaning for never_reached"),
        (
            {"floor": [["avg-short"]]},
            "floor must be a list of pairs of cells that are the same method, got [['avg-short']]",
        ),
        ({"floor": [["avg-short", "avg-lon"]]}, "floor names 'avg-lon'; did you mean 'avg-long'"),
        ({"floor": [["avg-short", "avg-short"]]}, "floor must pair different cells"),
        ({"claims": [CLAIM | {"rounds": 0, "in": "at_uplink"}]}, "must be a whole number of at least 1, got 0"),
        ({"claims": [CLAIM | {"source": 12}]}, "source of the claim 'x' must be words, got 12"),
        (
            {"regime": {"paper": "VGG-9"}},
            "regime has the words paper and here, and alike, true or false, got {'paper': 'VGG-9'}",
        ),
        ({"takes": 12}, "takes must be words, got 12"),
    ],
)
@pytest.mark.sampled(inf)
def test_mistakes_are_said_in_a_sentence(content: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        read_study(written(tmp_path, **content))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


GRIDS = {
    "a key": "seeds: [0]\ngrid: {a: {x: [], y: []}}\nseeds: [1]\n",
    "an axis": "seeds: [0]\ngrid:\n  a: {x: []}\n  a: {y: []}\n",
    "a choice": "seeds: [0]\ngrid: {a: {x: [one.yaml], x: [two.yaml]}}\n",
}


@pytest.mark.parametrize("text", GRIDS.values(), ids=GRIDS.keys())
def test_nothing_is_given_twice(text: str, tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text(text)
    with pytest.raises(UserError, match=r"has the key .* twice"):
        read_study(tmp_path / "study.yaml")


choices = st.lists(st.text("xy-", min_size=1, max_size=3), min_size=1, max_size=4, unique=True)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(grid=st.lists(choices, min_size=1, max_size=3))
def test_each_combination_has_a_name_of_its_own(grid: list[list[str]], tmp_path: Path) -> None:
    names = {f"axis{i}": {name: [f"--model.a{i}={name}"] for name in axis} for i, axis in enumerate(grid)}
    path = written(tmp_path, grid=names)
    found = [*map("-".join, product(*grid))]
    if len(set(found)) < len(found):
        with pytest.raises(UserError, match="are both called"):
            read_study(path)
    else:
        assert [cell.name for cell in read_study(path).cells] == found


def test_two_combinations_with_one_name_are_both_named(tmp_path: Path) -> None:
    grid = {"a": {"x": [], "x-y": []}, "b": {"y-z": [], "z": []}}
    with pytest.raises(UserError, match=r"the combinations x and y-z, and x-y and z, are both called x-y-z: rename a"):
        read_study(written(tmp_path, grid=grid))
    assert len(read_study(written(tmp_path, grid=grid, exclude=[{"a": "x", "b": "y-z"}])).cells) == 3


def test_a_study_has_a_largest_number_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_file, "MOST_RUNS", 7)
    with pytest.raises(UserError, match="has 8 runs, but a study has 7 at most"):
        read_study(written(tmp_path))


@pytest.mark.parametrize(
    ("content", "given", "said"),
    [
        ({"target": 60}, {"model": {"class_path": "lightning_fl.modules.ImageClassifier"}}, "write 60 % as 0.6"),
        ({"target": 60}, {"trainer": {"max_rounds": 3, "metric": "val_accuracy"}}, "write 60 % as 0.6"),
        ({"budget": [1.0, 2.0], "metric": "val/loss"}, {}, "lower is better for val/loss"),
        ({"budget": [1.0, 2.0]}, {"trainer": {"max_rounds": 3, "metric": "f1", "metric_mode": "min"}}, "better for f1"),
        ({"target": 60}, {}, None),
        ({"budget": [1.0, 2.0]}, {}, None),
    ],
)
def test_what_a_report_would_refuse_is_refused_before_the_first_run(
    content: dict[str, Any], given: dict[str, Any], said: str | None, tmp_path: Path
) -> None:
    study = read_study(written(tmp_path, **content))
    if said is None:
        assert len(study.runs(tmp_path, lambda arguments: resolve(arguments) | given)) == 8
        return
    with pytest.raises(UserError) as error:
        study.runs(tmp_path, lambda arguments: resolve(arguments) | given)
    assert said in str(error.value)


def test_cells_with_different_data_are_refused_before_the_first_run(tmp_path: Path) -> None:
    grid = {"data": {"digits": ["file.yaml", "--data=Digits"], "cifar": ["file.yaml", "--data=CIFAR10"]}}

    def with_data(arguments: Any) -> dict[str, Any]:
        return resolve(arguments) | {"data": {"class_path": arguments[1].partition("=")[2]}}

    said = r"Digits in digits, CIFAR10 in cifar; make a study for each"
    with pytest.raises(UserError, match=said):
        read_study(written(tmp_path, grid=grid)).runs(tmp_path, with_data)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(CHARACTERS, max_size=5) | st.dates(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab1", max_size=2) | st.integers(0, 2), inner, max_size=3)
    ),
    max_leaves=6,
)


def test_numbers_of_claims_may_have_an_exponent_without_a_sign(tmp_path: Path) -> None:
    path = written(tmp_path, claims=[CLAIM | {"paper": "PAPER", "margin": "MARGIN"}], target=0.5)
    path.write_text(path.read_text().replace("PAPER", "2e-2").replace("MARGIN", "1.5e-3"))
    (claim,) = read_study(path).claims
    assert (claim.paper, claim.margin) == (0.02, 0.0015)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from(KEYS), value=VALUES, inside=st.sampled_from([None, "method", "claim", "exclude"]))
def test_any_value_gives_a_study_or_a_sentence(key: str, value: Any, inside: str | None, tmp_path: Path) -> None:
    claim = {"text": "x", "better": "avg-short", "than": "avg-long"}
    content = {
        None: {key: value},
        "method": {"grid": {"method": value, "work": {"short": [value]}}},
        "claim": {
            "claims": [claim | {name: value} for name in ("better", "in", "paper", "margin", "text")[:1]] + [value]
        },
        "exclude": {"exclude": [value, {"method": value}]},
    }[inside]
    with suppress(UserError):
        read_study(written(tmp_path, **content)).runs(tmp_path, resolve)


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60) | st.text("&*[]{}:,-!'\"%@<x0 \n\t", max_size=40))
def test_any_file_gives_a_study_or_a_sentence(tmp_path: Path, content: bytes | str) -> None:
    (tmp_path / "study.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    with suppress(UserError):
        read_study(tmp_path / "study.yaml")


BOMBS = {
    "laughs": "\n".join(["a0: &a0 [x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))]),
    "itself": "seeds: &a [*a]\ngrid: {a: {x: []}}\n",
    "deep": "seeds: " + "[" * 600,
    "a date that does not exist": "seeds: 2001-99-99\n",
    "a number with too many digits": f"seeds: {'9' * 5000}\n",
    "half a character": 'seeds: "\\ud800"\n',
}


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS.keys())
def test_a_file_without_bounds_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text(text)
    with pytest.raises(UserError):
        read_study(tmp_path / "study.yaml")


def test_a_file_that_is_no_study_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no study file"):
        read_study(tmp_path / "none.yaml")
    for text, said in (("[1, 2]", "must contain the keys"), ("a: [", "is not valid YAML")):
        (tmp_path / "study.yaml").write_text(text)
        with pytest.raises(UserError, match=said):
            read_study(tmp_path / "study.yaml")

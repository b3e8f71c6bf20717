"""Test `search:` of study files: ranges, flags of single combinations, budgets and mistakes."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from optuna.pruners import HyperbandPruner

from lightning_fl import UserError
from lightning_fl.study.search_file import Range, SearchFile, read_search
from lightning_fl.study.study_file import read_study

CELLS = {f"{method}-{clients}": (method, clients) for method in ("avg", "prox") for clients in ("iid", "shards")}
RATE = {"model.learning_rate": {"low": "1e-2", "high": 0.3, "log": True}}


def search(**content: Any) -> SearchFile:
    read = read_search({"trials": 4, "rounds": 60, "flags": RATE, **content}, CELLS, [0, 1], None)
    assert read is not None
    return read


def test_a_range_has_numbers_whole_numbers_or_choices() -> None:
    of = {
        "a": {"low": "1e-3", "high": 1, "log": True},
        "b": {"low": 1, "high": 8.0, "integer": True},
        "c": {"choices": ["iid", True, 3]},
    }
    ranges = search(flags=of).flags["avg-iid"]
    assert ranges == {
        "a": Range(0.001, 1, log=True),
        "b": Range(1, 8, integer=True),
        "c": Range(choices=("iid", True, 3)),
    }
    assert [str(values) for values in ranges.values()] == ["0.001 to 1 (log)", "1 to 8 (integer)", "iid or true or 3"]
    assert [ranges["a"].contains(value) for value in (0.001, 0.5, 1.0, 1.1, "iid", True, None)] == [True] * 3 + [
        False
    ] * 4
    assert [ranges["b"].contains(value) for value in (1, 8, 9, 1.5)] == [True, True, False, False]
    assert [ranges["c"].contains(value) for value in ("iid", True, 3, 1)] == [True, True, True, False]


def test_choices_and_combinations_add_and_replace_flags() -> None:
    mu, other, rate = ({"low": low, "high": 1} for low in (0.1, 0.2, 0.3))
    own = {"prox": {"algorithm.mu": mu}, "prox-iid": {"algorithm.mu": other}, "shards": {"model.learning_rate": rate}}
    flags = search(own_flags=own).flags
    assert {name: [*of] for name, of in flags.items()} == {
        name: ["model.learning_rate", *["algorithm.mu"] * name.startswith("prox")] for name in CELLS
    }
    assert (flags["prox-shards"]["algorithm.mu"].low, flags["prox-iid"]["algorithm.mu"].low) == (0.1, 0.2)
    assert [of["model.learning_rate"].low for of in flags.values()] == [0.01, 0.3, 0.01, 0.3]


def test_rungs_grow_by_the_factor_and_stay_below_the_budget() -> None:
    assert search(halving={"first": 2, "factor": 3}).rungs == (2, 6, 18, 54)
    assert search(rounds=54, halving={"first": 2}).rungs == (2, 6, 18)
    by_bytes = read_search(
        {"trials": 1, "budget": "1e8", "flags": RATE, "hyperband": {"first": "1e7"}}, CELLS, [0], None
    )
    assert by_bytes is not None
    assert by_bytes.rungs == (10**7, 3 * 10**7, 9 * 10**7)
    assert search().rungs == ()


def test_a_budget_ends_every_run_of_the_study(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    for budget, arguments in (
        ({"rounds": 9}, ("--trainer.max_rounds=9",)),
        (
            {"budget": "1.5e6"},
            ("--trainer.callbacks+=CommunicationMeter", "--trainer.callbacks.max_uplink_bytes=1500000"),
        ),
    ):
        content = {"base": ["--a=1"], "seeds": [0], "grid": {"method": {"avg": ["--b=2"]}}}
        path.write_text(yaml.safe_dump({**content, "search": {"trials": 2, "flags": RATE, **budget}}))
        (cell,) = read_study(path).cells
        assert cell.arguments == ("--a=1", "--b=2", *arguments)


def test_the_metric_is_that_of_the_study_unless_it_is_of_a_test() -> None:
    content = {"trials": 1, "rounds": 2, "flags": RATE}
    for metric, expected in ((None, "val/accuracy"), ("val/loss", "val/loss")):
        read = read_search(content, CELLS, [0], metric)
        assert read is not None
        assert read.metric == expected
    with pytest.raises(UserError, match="must be measured on samples that clients hold out"):
        read_search(content, CELLS, [0], "test/accuracy")
    assert read_search({**content, "metric": "val/accuracy"}, CELLS, [0], "test/accuracy") is not None


def test_more_trials_go_on_with_a_search_and_anything_else_begins_another() -> None:
    first = search().identity("avg-iid")
    assert search(trials=50).identity("avg-iid") == first
    for change in ({"seed": 7}, {"metric": "val/loss"}, {"rounds": 61}, {"halving": {"first": 2}}):
        assert search(**change).identity("avg-iid") != first
    own = search(own_flags={"prox": {"algorithm.mu": {"low": 0, "high": 1}}})
    assert own.identity("avg-iid") == first
    assert own.identity("prox-iid") != first


def test_hyperbands_rungs_are_among_ours() -> None:
    """Check that trials of every bracket are compared at rungs that we report."""
    rungs = search(rounds=100, hyperband={"first": 4, "factor": 3}).rungs
    pruner = HyperbandPruner(min_resource=4, max_resource=100, reduction_factor=3)
    import optuna

    study = optuna.create_study(pruner=pruner)
    pruner.prune(study, optuna.trial.create_trial(state=optuna.trial.TrialState.RUNNING))
    assert len(pruner._pruners) == len(rungs) == 3
    assert [4 * 3**bracket for bracket in range(3)] == [*rungs]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"trial": 3}, "search has the key 'trial'; did you mean 'trials'"),
        ({"trials": 0}, "trials of search must be a whole number from 1 to 10000, got 0"),
        ({"trials": "many"}, "trials of search must be a whole number"),
        ({"seed": 1}, "seed of search is 1, which is one of the study's seeds"),
        ({"seed": -1}, "seed of search must be a whole number from 0"),
        (
            {"metric": "test/accuracy"},
            "must be measured on samples that clients hold out for validation, such as val/accuracy",
        ),
        ({"metric": "train/loss"}, "must be measured on samples that clients hold out"),
        ({"metric": 3}, "metric of search must be the name of a column"),
        (
            {"budget": 1e8},
            "search needs one limit of a run: budget, in uplink bytes of all clients, or rounds; got budget and rounds",
        ),
        ({"rounds": 0}, "rounds of search must be a whole number of at least 1, got 0"),
        ({"halving": {"first": 60}}, "from 1 to below the budget, 60, got 60"),
        ({"halving": {"first": 0.5}}, "first of halving must be a whole number of bytes or rounds"),
        ({"halving": {"first": 2, "factor": 1}}, "factor of halving must be a whole number of at least 2, got 1"),
        ({"halving": {"factor": 2}}, "halving of search has the keys first"),
        ({"halving": {"first": 2}, "hyperband": {"first": 2}}, "search has halving or hyperband, got both"),
        ({"flags": ["model.learning_rate"]}, "flags of search must be flags with their ranges, such as {low: 0.01"),
        ({"flags": {}}, "search has no flags for avg-iid"),
        (
            {"flags": {"model.learning_rate": None}},
            "the range of model.learning_rate needs values: low and high, or choices",
        ),
        ({"flags": {"model.learning_rate": {"low": 1}}}, "the range of model.learning_rate needs values"),
        ({"flags": {"a": {"low": 0, "high": 1, "log": True}}}, "both above 0 on a logarithmic scale"),
        ({"flags": {"a": {"low": 2, "high": 1}}}, "the range of a must have a low below its high, got"),
        ({"flags": {"a": {"low": "x", "high": 1}}}, "the range of a must have a low below its high, got"),
        ({"flags": {"a": {"low": 0.5, "high": 2, "integer": True}}}, "must have whole ends if integer is true"),
        (
            {"flags": {"a": {"low": 1, "high": 2, "log": "yes"}}},
            "log and integer of the range of a must be true or false",
        ),
        ({"flags": {"a": {"low": 1, "high": 2, "lag": True}}}, "the range of a has the key 'lag'; did you mean 'log'"),
        ({"flags": {"a": {"choices": []}}}, "choices must be two or more different numbers or words"),
        ({"flags": {"a": {"choices": [1, 1]}}}, "choices must be two or more different numbers or words"),
        ({"flags": {"a": {"choices": [1, None]}}}, "choices must be two or more different numbers or words"),
        ({"flags": {"a": {"choices": [1, 2], "low": 1}}}, "the range of a has choices or low and high"),
        (
            {"flags": {"--a": {"choices": [1, 2]}}},
            "must name flags without dashes, such as model.learning_rate, got '--a'",
        ),
        (
            {"flags": {"data.seed": {"choices": [1, 2]}}},
            "flags of search has data.seed, but all trials have the search's own seed",
        ),
        ({"own_flags": {"prx": RATE}}, "own_flags of search names 'prx'; did you mean 'prox'"),
        ({"own_flags": ["prox"]}, "own_flags of search must name choices or combinations"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as raised:
        search(**change)
    assert said in str(raised.value)
    assert str(raised.value).endswith(".")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([], "search must have the keys trials"),
        ({"rounds": 3, "flags": RATE}, "search needs the key 'trials'"),
        ({"trials": 3, "flags": RATE}, "or rounds; got neither"),
        ({"trials": 3, "budget": 0, "flags": RATE}, "budget of search must be a number of uplink bytes above 0"),
        ({"trials": 3, "budget": "much", "flags": RATE}, "budget of search must be a number of uplink bytes above 0"),
    ],
)
def test_what_lacks_is_named(content: Any, said: str) -> None:
    with pytest.raises(UserError) as raised:
        read_search(content, CELLS, [0], None)
    assert said in str(raised.value)

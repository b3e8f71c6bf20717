"""Test that runs have short and distinct names."""

from pathlib import Path
from typing import Any

import pytest
from characters import CHARACTERS
from hypothesis import given, settings
from hypothesis import strategies as st
from made_runs import groups_of, require_readable, rising, write_run

from lightning_fl.report.comparison import Metric
from lightning_fl.report.labels import LONGEST_LABEL, labels
from lightning_fl.report.plots import draw_bits, draw_curves
from lightning_fl.report.records import Record


def part(name: str, **options: Any) -> dict[str, Any]:
    return {"class_path": f"lightning_fl.parts.{name}", "init_args": options}


def labelled(tmp_path: Path, *runs: dict[str, Any]) -> list[str]:
    folders = [write_run(tmp_path / f"run{i}", rising(9), **options) for i, options in enumerate(runs)]
    return [group.label for group in groups_of(*folders)]


def test_the_fewest_settings_that_tell_runs_apart(tmp_path: Path) -> None:
    runs = [{"algorithm": "FedDU", "C": c, "f": f, "decay": c} for c, f in ((1.0, "one_minus"), (2.0, "inverse"))]
    assert labelled(tmp_path / "a", *runs) == ["FedDU, C=1.0", "FedDU, C=2.0"]
    grid = [{"algorithm": "FedDUM", "C": c, "beta": b} for c in (1.0, 2.0) for b in (0.5, 0.9)]
    assert labelled(tmp_path / "b", *grid)[1] == "FedDUM, C=1.0, beta=0.9"
    # If the method's own settings are equal, others distinguish the runs: the network before the number of rounds.
    other = [{"model": {"network": name}, "trainer": {"max_rounds": n}} for name, n in (("cnn", 9), ("vgg11", 10))]
    assert labelled(tmp_path / "c", *other) == ["FedAvg, network=cnn", "FedAvg, network=vgg11"]
    assert labelled(tmp_path / "d", *runs, {}) == ["FedDU, C=1.0", "FedDU, C=2.0", "FedAvg"]
    # A setting that distinguishes only some runs is left out if another distinguishes all.
    some = [{"algorithm": "FedDU", "C": c, "decay": d} for c, d in ((1.0, 0.1), (1.0, 0.2), (2.0, 0.3))]
    assert labelled(tmp_path / "e", *some) == ["FedDU, decay=0.1", "FedDU, decay=0.2", "FedDU, decay=0.3"]
    long = [{"algorithm": "FedProx", "mu": mu} for mu in (0.009000000000000001, 3 * 0.1)]
    assert labelled(tmp_path / "g", *long) == ["FedProx, mu=0.009", "FedProx, mu=0.3"]
    near = [{"algorithm": "FedProx", "mu": mu} for mu in (0.123456781, 0.123456782)]
    assert labelled(tmp_path / "h", *near) == ["FedProx (run0)", "FedProx (run1)"]
    bits = [{"algorithm": "FedDU", **{name: i >> k & 1 for k, name in enumerate("abcd")}} for i in range(16)]
    assert labelled(tmp_path / "f", *bits)[6] == "FedDU, a=0, b=1, c=1, d=0"


def test_composed_methods_have_short_names(tmp_path: Path) -> None:
    steps = [part("Apply", learning_rate=1.0), part("Momentum", beta=0.9, dampening=True, init_with="zero")]
    composed = [
        {"rule": part("LocalOptimizer"), "steps": steps, "uplink": part("TopK", alpha=0.05, index_bits="ceil")},
        {"rule": part("Proximal", mu=0.1), "steps": steps[:1], "uplink": part("Dense")},
    ]
    found = labelled(tmp_path / "a", *({"algorithm": "Algorithm", **one} for one in composed))
    assert found == ["Algorithm, rule=LocalOptimizer, TopK(0.05)", "Algorithm, rule=Proximal(0.1)"]
    betas = [[steps[0], part("Momentum", beta=beta)] for beta in (0.5, 0.9)]
    found = labelled(tmp_path / "b", *({"algorithm": "Algorithm", "steps": of} for of in betas))
    assert found == ["Algorithm, beta=0.5", "Algorithm, beta=0.9"]


def test_slots_that_a_user_fills_are_shown_as_parts(tmp_path: Path) -> None:
    top, prox = part("TopK", alpha=0.1, index_bits="ceil"), {"algorithm": "FedProx", "mu": 0.1}
    fed = part("ErrorFeedback", codec=top)
    found = labelled(tmp_path / "a", prox | {"uplink": None}, prox | {"uplink": top}, prox | {"uplink": fed})
    assert found == ["FedProx", "FedProx, TopK(0.1)", "FedProx, ErrorFeedback(TopK(0.1))"]
    exact = part("TopK", alpha=0.1, index_bits="exact")
    found = labelled(tmp_path / "b", prox | {"uplink": top}, prox | {"uplink": exact})
    assert found == ["FedProx, TopK(0.1, index_bits=ceil)", "FedProx, TopK(0.1, index_bits=exact)"]
    assert labelled(tmp_path / "c", prox, prox | {"downlink": top}) == ["FedProx", "FedProx, downlink=TopK(0.1)"]


def test_parts_are_shown_of_all_runs_that_have_them_if_others_have_none(tmp_path: Path) -> None:
    top, avg, prox = part("TopK", alpha=0.1), {"uplink": None}, {"algorithm": "FedProx", "mu": 0.1, "uplink": None}
    smaller = {"uplink": part("TopK", alpha=0.05)}
    found = labelled(tmp_path / "a", avg, prox | {"uplink": top})
    assert found == ["FedAvg", "FedProx, TopK(0.1)"]
    found = labelled(tmp_path / "b", prox, prox | {"mu": 0.01, "uplink": top})  # which mu alone tells apart, too
    assert found == ["FedProx, mu=0.1", "FedProx, mu=0.01, TopK(0.1)"]
    assert labelled(tmp_path / "c", smaller, prox | {"uplink": top}) == ["FedAvg, TopK(0.05)", "FedProx, TopK(0.1)"]
    assert labelled(tmp_path / "d", {"uplink": top}, prox | {"uplink": top}) == ["FedAvg", "FedProx"]
    usual = {"rule": part("LocalOptimizer"), "uplink": part("Dense"), "aggregator": part("WeightedMean")}
    assert labelled(tmp_path / "e", {"algorithm": "Algorithm"} | usual, prox) == ["FedAvg", "FedProx"]
    qsgd = usual | {"algorithm": "Algorithm", "uplink": part("QSGD", levels=4), "steps": None, "personal": []}
    assert labelled(tmp_path / "f", qsgd, prox) == ["FedAvg, QSGD(4)", "FedProx"]
    mine = qsgd | {"steps": [part("Apply"), part("Momentum", beta=0.9)]}
    assert labelled(tmp_path / "g", mine, prox)[0] == "Algorithm, QSGD(4)"


def test_secure_aggregation_has_its_name(tmp_path: Path) -> None:
    off, sizes = {"secure_aggregation": None}, {"key_bits": 256, "share_bits": 256, "value_bits": 16}
    runs = [{"trainer": off}, {"trainer": {"secure_aggregation": sizes}}]
    found = labelled(tmp_path / "a", *runs, {"algorithm": "FedProx", "trainer": {"secure_aggregation": sizes}})
    assert found == ["FedAvg", "FedAvg, secure aggregation", "FedProx, secure aggregation"]
    wider = {"trainer": {"secure_aggregation": sizes | {"value_bits": 32}}}
    found = labelled(tmp_path / "b", *runs, wider)
    assert found == ["FedAvg", *(f"FedAvg, value_bits={bits}, secure aggregation" for bits in (16, 32))]
    of_python = {"secure_aggregation": {"class_path": "lightning_fl.SecureAggregation", "init_args": sizes}}
    assert labelled(tmp_path / "c", runs[0], {"trainer": of_python}) == ["FedAvg", "FedAvg, secure aggregation"]


def test_folders_stand_for_what_would_be_too_long(tmp_path: Path) -> None:
    many = [{f"option_{key}": value for key in "abcdef"} for value in (1, 2)]
    long = [{"personal": [f"network.layer{i}.{end}" for i in range(20)]} for end in ("weight", "bias")]
    assert labelled(tmp_path / "a", *many) == ["FedAvg, option_a=1", "FedAvg, option_a=2"]
    for name in labelled(tmp_path / "b", *long):
        assert len(name) <= LONGEST_LABEL
    same = [write_run(tmp_path / seed / "run", rising(9)) for seed in "ab"]
    for folder in same:
        (folder / "config.yaml").unlink()
    assert [group.label for group in groups_of(*same)] == ["run (a/run)", "run (b/run)"]


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.text("ab/", min_size=1, max_size=60),
            st.dictionaries(st.sampled_from("xyz"), st.text(CHARACTERS, max_size=90)),
        ),
        min_size=1,
        max_size=6,
        unique_by=lambda run: Path(run[0]).absolute(),
    )
)
def test_no_two_labels_are_the_same(runs: list[tuple[str, dict[str, str]]]) -> None:
    records = [
        Record(Path(folder), {}, {f"algorithm.{key}": value for key, value in options.items()}, "FedAvg", None, ())
        for folder, options in runs
    ]
    found = labels(records)
    assert len(set(found)) == len(found)
    assert max(map(len, found)) <= LONGEST_LABEL


@pytest.mark.parametrize("axis", ["uplink", "rounds", "simulated_seconds"])
def test_legends_of_runs_that_differ_in_much_can_be_read(tmp_path: Path, axis: str) -> None:
    folders = [
        write_run(
            tmp_path / f"a_rather_long_name_of_a_folder_{i}", rising(50, 0.01 - i / 1000), data={"num_clients": 10**i}
        )
        for i in range(6)
    ]
    runs = groups_of(*folders)
    figure = draw_curves(runs, Metric(target=0.3), axis)
    assert figure is not None
    require_readable(figure)
    assert draw_bits(runs) is None

"""Test the study of all methods, and the curves that docs/curves.py makes of its runs."""

import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from lightning_fl import algorithms
from lightning_fl.cli.planned_fit import resolve
from lightning_fl.study.study_file import read_study

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs"))

import curves  # noqa: E402

pytestmark = pytest.mark.usefixtures("types_of_a_new_process")

METHODS = sorted(set(algorithms.__all__) - {"Algorithm"})
STUDY = read_study(curves.STUDY)


def test_every_method_has_a_cell() -> None:
    assert sorted(cell.name for cell in STUDY.cells) == METHODS
    for cell in STUDY.cells:
        assert f"--algorithm={cell.name}" in cell.arguments


def test_every_cell_has_kept_runs_of_all_seeds() -> None:
    kept = [(name, curve.record.folder.name) for name, group in curves.kept_groups().items() for curve in group.curves]
    assert kept == [(cell.name, str(seed)) for cell in STUDY.cells for seed in STUDY.seeds]


def test_kept_runs_go_from_the_first_round_to_the_last() -> None:
    groups = curves.kept_groups()
    assert groups.keys() <= {cell.name for cell in STUDY.cells}
    assert curves.BASELINE in groups
    arguments = {cell.name: dict(flag.split("=", 1) for flag in cell.arguments if "=" in flag) for cell in STUDY.cells}
    for name, group in groups.items():
        rounds, every = (int(arguments[name][f"--trainer.{flag}"]) for flag in ("max_rounds", "test_every_n_rounds"))
        for curve in group.curves:
            assert curve.axis("rounds").tolist() == list(range(every, rounds + 1, every))
            assert (np.diff(curve.axis("uplink")) >= 0).all()
            assert ((curve.raw > 0) & (curve.raw <= 1)).all()


def test_the_planned_traffic_is_that_of_the_kept_runs() -> None:
    assert list(curves.planned_traffic()) == [cell.name for cell in STUDY.cells]
    for name, (up, _, is_fixed) in curves.planned_traffic().items():
        (first, *_) = curves.kept_groups()[name].curves
        if is_fixed:
            assert up == first.axis("uplink")[-1], f"python docs/curves.py traffic after a change of {name}"
        else:
            assert up == pytest.approx(first.axis("uplink")[-1], rel=0.1)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("FedProx", "upload 74.0 MB and download 74.0 MB."),
        ("FedPAQ", "upload 9.40 MB and download 74.0 MB."),
        ("IFCA", "the uplink is as large as FedAvg's, but the total traffic is larger than FedAvg's."),
        ("FedAdamSSM", "the uplink is smaller than FedAvg's, but the total traffic is larger than FedAvg's."),
    ],
)
def test_both_directions_stand_beside_a_curve(method: str, words: str) -> None:
    assert words in curves.curve_block(method)


@pytest.mark.parametrize("method", ["FedDUMAP", "FedAsync"])
def test_the_command_beside_a_curve_is_its_first_run(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare configurations: the command has no seed, so it takes the files' and the data's."""
    monkeypatch.chdir(ROOT)
    (cell,) = (cell for cell in STUDY.cells if cell.name == method)
    words = curves.curve_block(method).partition("```bash\n")[2].partition("\n```")[0].replace("\\\n", "").split()
    assert words[:2] == ["lightning-fl", "fit"]
    seeded = (*cell.arguments, f"--seed_everything={STUDY.seeds[0]}", f"--data.seed={STUDY.seeds[0]}")
    found, expected = resolve(words[2:]), resolve(seeded)
    assert {key: found[key] for key in found if key != "config"} == {
        key: expected[key] for key in expected if key != "config"
    }
    assert found["algorithm"]["class_path"].endswith(method)


@pytest.mark.parametrize("method", [cell.name for cell in STUDY.cells])
def test_the_command_beside_a_curve_has_each_flag_once(method: str) -> None:
    command = curves.curve_block(method).partition("```bash\n")[2].partition("\n```")[0]
    flags = [line.split("=")[0] for line in command.splitlines()]
    assert len(set(flags)) == len(flags)


@pytest.mark.parametrize("method", ["FedAvg", "FedLDF"])
def test_pictures_are_small_and_the_same_every_time_with_text_as_text(method: str) -> None:
    drawn = curves.draw(method)
    assert drawn == curves.draw(method)
    assert len(drawn) < 40_000
    texts = [text.text for text in ET.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in texts if text and "seeds)" in text] == [
        f"{name} ({len(curves.kept_groups()[name].curves)} seeds)" for name in dict.fromkeys(("FedAvg", method))
    ]
    assert "test accuracy" in texts
    assert "rounds" in texts


def test_runs_are_kept_in_the_order_of_the_study_and_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = curves.KEPT.read_text(encoding="utf-8").splitlines()
    monkeypatch.setattr(curves, "KEPT", tmp_path / "kept.csv")
    curves.KEPT.write_text("\n".join([*kept, "FedGone,0,0,1,0.5"]) + "\n", encoding="utf-8")
    curves.main([str(tmp_path)])
    assert curves.KEPT.read_text(encoding="utf-8").splitlines() == kept
    folder = tmp_path / "FedProx" / "seed-1-0123abcd"
    folder.mkdir(parents=True)
    text = "round,comm/total_uplink_bytes,val/accuracy,test/accuracy\n0,1e6,1,0.12344\n1,2e6,1,0.5\n"
    (folder / "metrics.csv").write_text(text)
    curves.main([str(tmp_path)])
    old = [line for line in kept if line.startswith("FedProx,1,")]
    place = kept.index(old[0])
    new = ["FedProx,1,0,1000000,0.1234", "FedProx,1,1,2000000,0.5000"]
    assert curves.KEPT.read_text(encoding="utf-8").splitlines() == kept[:place] + new + kept[place + len(old) :]

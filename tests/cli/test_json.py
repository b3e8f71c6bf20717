"""Test the JSON that commands print: one document on standard output, as its schema describes it, with the numbers of the run."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import Command
from made_runs import rising, write_run

import lightning_fl as package
from lightning_fl.cli import catalogue
from lightning_fl.study.study_file import read_study

jsonschema = pytest.importorskip("jsonschema")  # which nbformat, of the extra dev, needs
SCHEMA = json.loads((Path(package.__file__).parent / "schema.json").read_text())
SHORT = ["--config", "quickstart", "--trainer.max_rounds=2", "--data.num_clients=10", "--model.network=linear"]
STUDY = {"base": ["quickstart", "--trainer.max_rounds=9"], "seeds": [0, 1], "target": 0.2, "budget": [1e3, 1e5]}


def document(kind: str, text: str) -> dict[str, Any]:
    """Return a document that follows the schema."""
    found: dict[str, Any] = json.loads(text)
    jsonschema.validate(found, SCHEMA)
    assert found["kind"] == kind
    return found


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def test_the_schema_is_one_and_takes_no_other_key() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"kind": "list", "names": [], "more": 1}, SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"kind": "fit"}, SCHEMA)


def test_a_fit_prints_its_final_table(lightning_fl: Command) -> None:
    ended = lightning_fl("fit", *SHORT, "--json")
    found = document("fit", ended.out)
    assert "uplink " in ended.err, "the table that people read"
    rows = rows_of(Path("runs/quickstart/metrics.csv"))
    assert found["rounds"] == found["planned_rounds"] == len(rows) == 2
    sent = {way: float(rows[-1][f"comm/total_{way}link_bytes"]) for way in ("up", "down")}
    assert found["bytes"] == {**sent, "total": sum(sent.values())}
    assert found["results"]["last"] == pytest.approx(float(rows[-1]["val/accuracy"]))
    assert found["results"]["metric"] == "val/accuracy"
    assert Path(found["metrics"]).is_file()
    assert Path(found["model"]).is_file()
    assert "json" not in yaml.safe_load(Path("runs/quickstart/config.yaml").read_text()), "no setting of the run"


@pytest.mark.parametrize("is_file", [True, False])
def test_json_is_a_flag_of_the_command_line_alone(
    is_file: bool, lightning_fl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("more.yaml").write_text("json: true" if is_file else "seed_everything: 1")
    if not is_file:
        monkeypatch.setenv("PL_FIT__JSON", "true")
    said = lightning_fl("fit", *SHORT, "--config", "more.yaml").sentence
    assert "json is only a flag of the command line" in said
    assert not Path("runs").exists()


def test_a_plan_has_the_costs_that_people_read(lightning_fl: Command) -> None:
    found = document("plan", lightning_fl("fit", *SHORT, "--dry_run", "--json").out)
    assert found["uplink_bytes"] == 2 * found["round_uplink_bytes"] > 0
    assert not Path("runs").exists()


def test_a_mistake_leaves_standard_output_empty(lightning_fl: Command) -> None:
    ended = lightning_fl("fit", *SHORT, "--trainer.max_roundss=3", "--json")
    assert ended.out == ""
    assert "there is no flag" in ended.sentence


@pytest.mark.parametrize("words", [[], ["codecs"], ["TopK"], ["FedDU"], ["trainer"], ["configs"]], ids=" ".join)
def test_a_list_has_all_names_and_parameters(words: list[str], lightning_fl: Command) -> None:
    found = document("list", lightning_fl("list", *words, "--json").out)
    names = [one["name"] for one in found["names"]]
    expected = [one.name for one in catalogue.entries() if not words or words[0] in (one.section, one.name)]
    assert names == expected
    assert ("configurations" in found) == (words in ([], ["configs"]))


def test_a_list_of_code_is_no_json(lightning_fl: Command) -> None:
    said = lightning_fl("list", "FedAvg", "--source", "--json").sentence
    assert "with --source, or JSON with --json, not both" in said
    assert "there is no such name" in lightning_fl("list", "Topk", "--json").sentence
    assert "there is no such name; here it is ServerYogi; " in lightning_fl("list", "FedYogi", "--json").sentence


def test_a_report_has_every_number_of_its_runs(lightning_fl: Command) -> None:
    folders = [str(write_run(Path(f"runs/{seed}"), rising(9, 0.01 * (seed + 1)), "FedAvg", seed)) for seed in (0, 1)]
    found = document("report", lightning_fl("report", *folders, "--target", "0.1", "--json").out)
    (line,) = found["lines"]
    rows = rows_of(Path("report/runs.csv"))
    for run, row in zip(line["runs"], rows, strict=True):
        assert run["folder"] == row["folder"]
        for name, number in run["numbers"].items():
            assert ("" if number is None else number) == (row[name] and float(row[name]))
    assert line["means"]["final"] == pytest.approx({"mean": 0.135, "deviation": 0.0636396, "count": 2})
    assert line["means"]["target_rounds"]["count"] == 1
    assert (found["metric"], found["target"], found["traffic"]) == ("val/accuracy", 0.1, "up")
    assert sorted(found["files"]) == sorted(str(path) for path in Path("report").iterdir() if path.name[0] != ".")


@pytest.mark.matrix
def test_a_study_has_its_plan_and_later_its_claims_and_budgets(lightning_fl: Command) -> None:
    grid = {"method": {name: [f"--algorithm={name}"] for name in ("FedAvg", "FedProx")}}
    claims = [{"text": "x", "better": "FedProx", "than": "FedAvg", "in": "target_uplink"}]
    Path("study.yaml").write_text(yaml.safe_dump({**STUDY, "grid": grid, "claims": claims}))
    plan = document("study_plan", lightning_fl("study", "study.yaml", "--dry_run", "--json").out)
    assert [(run["cell"], run["seed"]) for run in plan["runs"]] == [
        *(("FedAvg", 0), ("FedProx", 0), ("FedAvg", 1), ("FedProx", 1)),
    ]
    assert {*plan["plans"]} == {"FedAvg", "FedProx"}
    assert plan["plans"]["FedAvg"]["rounds"] == 9
    for run in plan["runs"]:
        write_run(Path(run["folder"]), rising(9, 0.05 + 0.01 * (run["cell"] == "FedProx")), run["cell"], run["seed"])
        Path(run["folder"], "done.json").write_text("{}")
    found = document("report", lightning_fl("report", "study.yaml", "--json").out)
    (claim,) = found["claims"]
    assert claim["outcome"] == "does not hold: undecided, as the interval contains 1"
    assert (claim["q"], claim["stands"]) == (1, False)
    (budget,) = found["budgets"]
    assert [(run["cell"], run["best"]) for run in budget["runs"]] == [
        *(("FedAvg", 0.45), ("FedAvg", 0.45), ("FedProx", 0.54), ("FedProx", 0.54)),
    ]
    said = lightning_fl("study", "study.yaml", "--json").sentence
    assert "--json of a study needs --dry_run" in said
    assert len(read_study(Path("study.yaml")).cells) == 2

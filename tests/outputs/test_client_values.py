"""Test values that callbacks log of single clients, in clients.csv."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from compared_runs import MakeTrainer
from lightning.pytorch import Callback
from toys import Perceptron, federation

from lightning_fl import UserError
from lightning_fl.outputs.clients import rows as rows_module
from lightning_fl.outputs.clients.rows import add_rows, own_values
from lightning_fl.outputs.metrics_csv import read_rows
from lightning_fl.report.clients import read_clients
from lightning_fl.report.records import read_run


class Uploads(Callback):
    """Log the place of each client's upload, and twice that."""

    def on_client_upload(self, trainer: Any, pl_module: Any, client: int, position: int, total: int) -> None:
        trainer.log_client(client, {"own/place": position})
        trainer.log_client(client, {"own/twice": torch.tensor(2 * position)})


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "clients.csv").open() as file:
        return list(csv.DictReader(file))


def test_each_client_has_a_row_a_round_with_its_values(
    make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    make_trainer(max_rounds=2, callbacks=[Uploads()], **keeps_files).fit(Perceptron(), federation())
    trainer = make_trainer(max_rounds=3, callbacks=[Uploads()], **keeps_files)
    trainer.fit(Perceptron(), federation(), ckpt_path="last")
    rows, rounds = rows_of(tmp_path), trainer.history
    assert list(rows[0]) == ["round", "client", "own/place", "own/twice"]
    rounds = rounds if isinstance(rounds, list) else rounds.to_dict("records")
    assert [int(row["round"]) for row in rows] == [
        row["round"] for row in rounds for _ in range(int(row["clients/selected"]))
    ]
    assert len({(row["round"], row["client"]) for row in rows}) == len(rows)
    assert all(float(row["own/twice"]) == 2 * float(row["own/place"]) > 0 for row in rows)
    assert not any(name.startswith("own/") for row in rounds for name in row), "and no column of the round's"


def test_a_clients_own_values_share_the_row_of_its_evaluation(tmp_path: Path) -> None:
    path = tmp_path / "clients.csv"
    add_rows(path, [{"round": 0, "client": client, "samples": 5, "val/accuracy": 0.5 + client} for client in (0, 1)])
    add_rows(path, [{"round": 0, "client": 1, "own": 7.0}, {"round": 1, "client": 0, "own": 8.0}])
    columns, rows = read_rows(path)
    assert columns == ["round", "client", "samples", "val/accuracy", "own"]
    assert [list(row.values()) for row in rows] == [
        ["0", "0", "5", "0.5", ""],
        ["0", "1", "5", "1.5", "7.0"],
        ["1", "0", "", "", "8.0"],
    ]
    (tmp_path / "metrics.csv").write_text("round,val/accuracy\n0,0.5\n1,0.6\n")
    found = read_clients(read_run(tmp_path), "val/accuracy")
    assert found is not None
    assert (found.round, found.values.tolist()) == (0, [0.5, 1.5]), "the report reads evaluations alone"


def test_a_clients_name_is_no_formula_of_a_spreadsheet(tmp_path: Path) -> None:
    """The file is written anew with a new column, and names stay as they are."""
    path = tmp_path / "clients.csv"
    for round_index, column in enumerate(("own", "other", "own")):
        add_rows(path, [{"round": round_index, "client": 0, "name": "=1+1", "own": -1.0, column: -1.0}])
    assert [(row["name"], row["own"]) for row in read_rows(path)[1]] == [("'=1+1", "-1.0")] * 3


def test_rows_of_later_rounds_are_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with a file that is written anew each time, which a new column, an earlier round and an incomplete row need."""
    path, renewed, written = tmp_path / "clients.csv", tmp_path / "renewed.csv", []
    write = rows_module._write
    monkeypatch.setattr(rows_module, "_write", lambda path, *rest: written.append(path) or write(path, *rest))
    plain = [[{"round": t, "client": k, "name": '="a",b', "own": t / 3} for k in range(2)] for t in range(9)]
    steps = [*plain[:3], [{"round": 3, "client": 1, "new": True}], *plain[3:6], [{"round": 3, "client": 9}], *plain[6:]]
    for number, rows in enumerate(steps):
        if number == len(steps) - 2:
            path.open("a").write("7,0,a,")
        add_rows(path, rows)
        with monkeypatch.context() as always:
            always.setattr(rows_module, "_columns_to_continue", lambda *_: [])
            add_rows(renewed, rows)
        assert path.read_bytes() == renewed.read_bytes(), number
    assert (written.count(renewed), written.count(path)) == (len(steps), 5)


@pytest.mark.parametrize(
    ("client", "values", "said"),
    [
        (5, {"a": 1}, "log_client needs the index of a client, 0 to 4, got 5."),
        (0, {"samples": 1}, "log_client cannot log 'samples', because clients.csv has another column of this name"),
        (0, {"a": "x"}, "log_client logs numbers, got a 'x'."),
        (0, {"a": torch.ones(2)}, "log_client logs numbers, got a tensor"),
    ],
)
def test_mistakes_are_refused_in_one_sentence(client: int, values: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        own_values(client, values, 5)
    assert str(error.value).startswith(said)


def test_values_outside_of_a_fit_are_refused(make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match=r"^log_client logs values of a round, but no fit is running"):
        make_trainer().log_client(0, {"a": 1})

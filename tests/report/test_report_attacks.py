"""Test what a report says about attacks, from runs written by hand."""

import csv
from pathlib import Path
from typing import Any

import pytest
from made_runs import groups_of, rising, write_run

from lightning_fl.outputs.figures import Look
from lightning_fl.report.attacks import attack_parts, draw_shares
from lightning_fl.report.comparison import Metric
from lightning_fl.report.document import Table


def attacked(folder: Path, slope: float, share: float | None, success: float = 0.5, **options: Any) -> Path:
    """Write a run of four rounds with ten answers each, in which a share of the clients attacks in the last two."""
    adversary = {
        "attackers": share,
        "attack": {"class_path": "lightning_fl.features.attacks.SignFlip", "init_args": {"scale": 2.0}},
    }
    trainer = {} if share is None else {"adversary": adversary}
    write_run(folder, rising(4, slope), trainer=trainer, **options)
    if share is not None:
        with (folder / "metrics.csv").open() as file:
            head, *rows = csv.reader(file)
        with (folder / "metrics.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*head, "attack/attackers", "attack/success", "robust/attackers_kept"])
            for place, row in enumerate(rows):
                writer.writerow([*row, 10 * share * (place > 1), success if place == 3 else "", 0.25])
    return folder


def test_the_table_has_success_share_and_weight_of_attackers(tmp_path: Path) -> None:
    groups = groups_of(
        attacked(tmp_path / "clean", 0.2, None),
        attacked(tmp_path / "one", 0.1, 0.2, success=0.5),
        attacked(tmp_path / "two", 0.1, 0.2, success=0.7, seed=1),
        window=1,
    )
    _, shown, *pictures = attack_parts(groups, Metric(window=1), Look())
    assert isinstance(shown, Table)
    assert shown.header == ["method", "attack", "final accuracy", "success", "attackers", "weight"]
    ((_, attack, final, success, attackers, weight),) = shown.rows
    assert (attack, attackers, weight) == ("SignFlip", "0.100", "0.250")
    assert success.startswith("0.600 ± 0.141")
    assert final.startswith(("0.3", "0.4"))
    assert len(pictures) == 1, "the clean run is the share 0"
    assert attack_parts(groups[:1], Metric(window=1), Look()) == []


def test_runs_that_differ_in_the_share_are_points_of_a_line(tmp_path: Path) -> None:
    folders = [attacked(tmp_path / f"{share}", 0.2 - share / 4, share) for share in (0.4, 0.1, 0.2)]
    folders.append(attacked(tmp_path / "clean", 0.2, None))
    other = attacked(tmp_path / "prox", 0.1, 0.2, algorithm="FedProx", mu=0.1)
    groups = groups_of(*folders, other, window=1)
    figure = draw_shares(groups, Metric(window=1), Look())
    assert figure is not None
    (line,) = figure.axes[0].lines
    assert list(line.get_xdata()) == [0, 0.1, 0.2, 0.4]
    assert line.get_label() == "FedAvg"
    finals = {group.settings.get("trainer.adversary.attackers", 0): group.spread("final")[0] for group in groups[:4]}
    assert list(line.get_ydata()) == pytest.approx([finals[share] for share in (0, 0.1, 0.2, 0.4)])
    assert draw_shares(groups_of(folders[0], other, window=1), Metric(window=1), Look()) is None
    same = [attacked(tmp_path / f"same-{share}", 0.2 - share / 4, share, algorithm="FedNova") for share in (0.1, 0.2)]
    figure = draw_shares(groups_of(*folders[1:3], *same, window=1), Metric(window=1), Look())
    assert figure is not None
    assert [line.get_label() for line in figure.axes[0].lines] == ["FedAvg", "FedNova"]
    assert [line.is_dashed() for line in figure.axes[0].lines] == [False, True], "the first is seen through the second"
    metrics = folders[0] / "metrics.csv"
    metrics.write_text(metrics.read_text().replace(f"\n3,{groups[0].curves[0].raw[-1]}", "\n3,nan"))
    figure = draw_shares(groups_of(*folders, window=1), Metric(window=1), Look())
    assert figure is not None
    assert list(figure.axes[0].lines[0].get_xdata()) == [0, 0.1, 0.2], "0.4 has diverged, and is no 0"
    assert draw_shares(groups_of(folders[0], folders[3], window=1), Metric(window=1), Look()) is None

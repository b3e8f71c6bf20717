"""Runs with files written by hand, and checks of their pictures."""

import csv
from itertools import combinations
from pathlib import Path
from typing import Any

import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg

from lightning_fl.report.comparison import Group, Metric, group_runs
from lightning_fl.report.records import read_run


def write_run(folder: Path, values: list[float], algorithm: str = "FedAvg", seed: int = 0, **options: Any) -> Path:
    """Write the files of a run whose round costs 1,000 bytes up, 3,000 down, 2 simulated seconds and half a second.

    Args:
        folder: folder to write into.
        values: accuracy after each round.
        algorithm: name of the method.
        seed: seed of run and data.
        **options: options of the method; except `rejected`, the rejected ones of ten uploads in each round, `data_class`, and
                changes under `data`, `model` and `trainer`; `sent`, the bytes up, and `received`, those
                down; `joules` and `epsilon` of each round.
    """
    folder.mkdir(parents=True)
    columns = ["round", "val/accuracy", "comm/total_uplink_bytes", "comm/total_downlink_bytes", "clients/selected"]
    columns += ["model/parameters", "model/macs", "time/simulated_seconds", "time/round_seconds", "step"]
    columns += ["clients/accepted", "clients/rejected"]
    rejected = options.pop("rejected", [0] * len(values))
    every = options.get("trainer", {}).get("log_every_n_rounds", 1)
    sent = options.pop("sent", 1000)
    received = options.pop("received", 3 * sent)
    costs = {"energy/total_joules": options.pop("joules", None), "privacy/epsilon": options.pop("epsilon", None)}
    costs = {name: cost for name, cost in costs.items() if cost}
    columns += costs
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for i, (value, lost) in enumerate(zip(values, rejected, strict=True)):
            if (i + 1) % every and i + 1 < len(values):
                continue
            spent = [sent * (i + 1), received * (i + 1), 10, 650, 4_500_000, 2.0 * (i + 1), 0.5, i]
            writer.writerow([i, value, *spent, 10 - lost, lost, *(cost * (i + 1) for cost in costs.values())])
    trainer = {"max_rounds": len(values), "default_root_dir": str(folder), "log_every_n_rounds": 1}
    data = {"seed": seed, "num_clients": 20, **options.pop("data", {})}
    model = {"network": "cnn", **options.pop("model", {})}
    config = {
        "seed_everything": seed,
        "trainer": {**trainer, **options.pop("trainer", {})},
        "model": {"class_path": "lightning_fl.modules.ImageClassifier", "init_args": model},
        "data": {"class_path": f"lightning_fl.data.{options.pop('data_class', 'CIFAR10')}", "init_args": data},
        "algorithm": {"class_path": f"lightning_fl.algorithms.{algorithm}", "init_args": options},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def rising(num_rounds: int, slope: float = 0.01, start: float = 0.0) -> list[float]:
    """Return a straight line, which smoothing does not change."""
    return [round(start + slope * (i + 1), 6) for i in range(num_rounds)]


def groups_of(*folders: Path, **metric: Any) -> list[Group]:
    return group_runs([read_run(folder) for folder in folders], Metric(**metric))


def require_readable(figure: Any) -> None:
    """Check that no text of a picture covers another or leaves the picture, and that no legend covers the curves."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    texts = [label for axes in figure.axes for label in (axes.xaxis.label, axes.yaxis.label, axes.title)]
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            texts += [tick.label1 for tick in ticks if low <= tick.get_loc() <= high and tick.label1.get_visible()]
    texts += [text for legend in figure.legends for text in legend.get_texts()]
    boxes = {(t.get_text(), i): t.get_window_extent(renderer) for i, t in enumerate(texts) if t.get_text()}
    assert len(boxes) > 4
    for (name, a), (other, b) in combinations(boxes.items(), 2):
        assert not a.shrunk(0.98, 0.98).overlaps(b.shrunk(0.98, 0.98)), f"{name} covers {other}"
    for name, box in boxes.items():
        assert box.x0 >= 0 <= box.y0, name
        assert box.x1 <= figure.bbox.x1, name
        assert box.y1 <= figure.bbox.y1, name
    for legend in figure.legends:
        assert not any(legend.get_window_extent(renderer).overlaps(axes.bbox) for axes in figure.axes)

"""Short table at the end of a run."""

from __future__ import annotations

from math import isnan
from pathlib import Path
from typing import Any, Protocol

from lightning.pytorch.loggers import Logger
from torch import Tensor

from lightning_fl.outputs.metrics_csv import RoundCSVLogger, read_rows
from lightning_fl.outputs.run_folder import EXPORT, METRICS
from lightning_fl.outputs.units import in_bytes


class Finished(Protocol):
    """Attributes that the table reads from a trainer after its run."""

    run: Any
    loggers: list[Logger]
    loss_guard: Any
    default_root_dir: str
    enable_checkpointing: bool
    callback_metrics: dict[str, Tensor]
    metric: str | None

    @property
    def metric_falls(self) -> bool:
        """True if lower values of the metric are better."""


def final_table(trainer: Finished) -> str:
    """Return the results of a finished `fit` and the paths of its files, one line each."""
    lines = final_lines(trainer)
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


def final_lines(trainer: Finished) -> list[tuple[str, str]]:
    """Return name and value of accuracy, rounds, bytes, rejected uploads if there were any, curve and model."""
    run = trainer.run
    lines = [
        ("rounds", f"{run.round:,}"),
        ("uplink", in_bytes(run.ledger.total_bytes("up"))),
        ("downlink", in_bytes(run.ledger.total_bytes("down"))),
    ]
    root = Path(trainer.default_root_dir)
    curve = _curve(trainer)
    target = trainer.metric
    if target is not None and target in trainer.callback_metrics:
        best = best_of(trainer)
        known = f" (best {best[0]:.4f} after round {best[1]})" if best else ""
        lines.insert(0, (target.replace("val/", ""), f"{float(trainer.callback_metrics[target]):.4f}{known}"))
    if run.num_rejected:
        why = "not finite" if trainer.loss_guard.clients is None else "not finite, or loss exploded"
        uploads = f"{run.num_rejected:,} of {run.num_uploads:,} uploads"
        lines.append(("rejected", f"{uploads}, in {run.num_rounds_rejecting:,} of {run.round:,} rounds: {why}"))
    if curve:
        lines.append(("curve", _short(curve)))
    if trainer.enable_checkpointing:
        lines.append(("model", _short(root / EXPORT)))
    return lines


def best_of(trainer: Finished) -> tuple[float, int] | None:
    """Return the metric's best value in `metrics.csv` and the number of rounds until then; None without values."""
    target = trainer.metric or ""
    curve = _curve(trainer)
    rows = read_rows(curve)[1] if curve else []
    points = [(float(row[target]), int(row["round"]) + 1) for row in rows if row.get(target)]
    points = [point for point in points if not isnan(point[0])]
    return (min if trainer.metric_falls else max)(points, key=lambda point: point[0]) if points else None


def _curve(trainer: Finished) -> Path | None:
    """Return the path of the run's curve; None if it writes none: the folder may contain an earlier run's."""
    writes = trainer.run.round > 0 and any(isinstance(logger, RoundCSVLogger) for logger in trainer.loggers)
    return Path(trainer.default_root_dir) / METRICS if writes else None


def _short(path: Path) -> str:
    """Return a path in the working directory as a relative path, and any other path unchanged."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)

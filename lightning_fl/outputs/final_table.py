"""Results of a run for its user: a short table at the end, and the rows of its rounds; both show themselves in a notebook."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import isnan, nan
from pathlib import Path
from typing import Any, Protocol

from lightning.pytorch.loggers import Logger
from torch import Tensor

from lightning_fl.outputs.figures import curve_svg
from lightning_fl.outputs.losses import rejection_reasons
from lightning_fl.outputs.metric import AT_BEST_VALIDATION, validated_and_tested
from lightning_fl.outputs.metrics_csv import RoundCSVLogger
from lightning_fl.outputs.plan import duration
from lightning_fl.outputs.run_folder import EXPORT, METRICS
from lightning_fl.outputs.units import in_bytes, significant

ATTACKERS, SUCCESS = "attack/attackers", "attack/success"
"""Columns about an attack."""
MOST_ROWS = 10
"""Rows of a table in a notebook."""
LEFT = "<{0} style='text-align:left'>{1}</{0}>"


class Finished(Protocol):
    """Attributes that the table reads from a trainer after its run."""

    run: Any
    algorithm: Any
    loggers: list[Logger]
    loss_guard: Any
    adversary: Any
    default_root_dir: str
    enable_checkpointing: bool
    metric: str | None
    num_rounds: int
    stop: Any
    privacy_in_words: str

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """Last value of each logged name."""

    @property
    def metric_falls(self) -> bool:
        """True if lower values of the metric are better."""


@dataclass(frozen=True, repr=False)
class FinalTable:
    """Results of a finished `fit` and the paths of its files.

    Attributes:
        lines: name and value of each line.
        rows: rows of the rounds.
        metric: name of the metric whose curve a notebook shows.
    """

    lines: Sequence[tuple[str, str]]
    rows: Sequence[Mapping[str, float]]
    metric: str | None

    def __repr__(self) -> str:
        width = max(len(name) for name, _ in self.lines)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in self.lines)

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr>{LEFT.format('th', escape(name))}{LEFT.format('td', escape(value))}</tr>"
            for name, value in self.lines
        )
        return f"<table>{rows}</table>{curve_of(self.rows, self.metric)}"


class History(list[dict[str, float]]):
    """Rows of the rounds, which a notebook shows as a table, its middle left out, and the curve of the run's metric."""

    def __init__(self, rows: Sequence[dict[str, float]], metric: str | None) -> None:
        super().__init__(rows)
        self._metric = metric

    def _repr_html_(self) -> str:
        names = list(dict.fromkeys(name for row in self for name in row))
        is_long = len(self) > MOST_ROWS
        ends = [*self[: MOST_ROWS // 2], {}, *self[-MOST_ROWS // 2 :]] if is_long else list(self)
        body = "".join(f"<tr>{''.join(f'<td>{_cell(row, name)}</td>' for name in names)}</tr>" for row in ends)
        head = "".join(f"<th>{escape(name)}</th>" for name in names)
        count = f"<p>{len(self):,} rows × {len(names)} columns</p>"
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return (
            f"<div style='overflow-x:auto'>{table}</div>{count}{curve_of(self, self._metric)}" if self else "no rounds"
        )


def history(rows: Sequence[dict[str, float]], metric: str | None) -> Any:
    """Return the rows of the rounds as a pandas DataFrame if pandas is there, else as a list; both show their curve."""
    try:
        from pandas import DataFrame
    except ImportError:
        return History(rows, metric)

    class HistoryFrame(DataFrame):
        """DataFrame that shows the curve below its table in a notebook; a copy, selection or pickle is an ordinary one."""

        def _repr_html_(self) -> str:
            return f"{super()._repr_html_()}{curve_of(rows, metric)}"

        def __reduce__(self) -> Any:
            return DataFrame, (dict(self),)

    return HistoryFrame(rows)


def curve_of(rows: Sequence[Mapping[str, float]], metric: str | None) -> str:
    """Return the curve of a metric as SVG; empty without values."""
    measured = [row for row in rows if metric in row]
    if metric is None or not measured:
        return ""
    return curve_svg([int(row["round"]) + 1 for row in measured], [row[metric] for row in measured], metric)


def show(table: FinalTable) -> None:
    """Print a table, or let a notebook display it."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if hasattr(shell, "kernel"):
        from IPython.display import display

        display(table)
    else:
        print(table)


def _cell(row: Mapping[str, float], name: str) -> str:
    if not row:
        return "…"
    value: Any = row.get(name)
    if isinstance(value, str):  # of a callback
        return escape(value)
    return "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def final_table(trainer: Finished, rows: Sequence[Mapping[str, float]]) -> FinalTable:
    """Return the results of a finished `fit`.

    Args:
        trainer: trainer after its fit.
        rows: rows of the rounds, from which the best value is read and whose curve a notebook shows.
    """
    return FinalTable(final_lines(trainer, rows), rows, trainer.metric)


def final_lines(trainer: Finished, rows: Sequence[Mapping[str, float]]) -> list[tuple[str, str]]:
    """Return name and value of accuracy, rounds, bytes, curve and model, and of rejected and lost uploads, attack and ε if any.

    With a clock of clients the simulated time is beside the bytes. The accuracy is that of the last evaluation. If the test set
    was measured after rounds, too, a line has the test value of the round that was best in validation. Best values and lost
    uploads are those of the logged rounds, and say so if others have no row.

    Args:
        trainer: trainer after its fit.
        rows: rows of the rounds, from which the best value is read.
    """
    run, stop = trainer.run, trainer.stop
    stopped = f" of {trainer.num_rounds:,} ({stop})" if stop is not None and run.round < trainer.num_rounds else ""
    lines = [
        ("rounds", f"{run.round:,}{stopped}"),
        ("uplink", in_bytes(run.ledger.total_bytes("up"))),
        ("downlink", in_bytes(run.ledger.total_bytes("down"))),
    ]
    if any("time/slowest_client" in row for row in rows):  # a clock of clients, whose seconds are theirs
        lines.append(("simulated time", duration(run.simulated_seconds)))
    root = Path(trainer.default_root_dir)
    is_whole = len(rows) == run.round
    among = "" if is_whole else ", of the logged ones"
    curve = curve_file(trainer)
    target = trainer.metric
    if target is not None and target in trainer.callback_metrics:
        best = best_of(trainer, rows)
        best_text = f" (best {best[target]:.4f} after round {best['round'] + 1:.0f}{among})" if best else ""
        lines.insert(0, (target.removeprefix("val/"), f"{float(trainer.callback_metrics[target]):.4f}{best_text}"))
        if chosen := tested_at_best_validation(trainer, rows):
            name, value, number = chosen
            lines.insert(1, (AT_BEST_VALIDATION, f"{name} {value:.4f} (after round {number:.0f}{among})"))
    if run.num_rejected:
        pace = trainer.algorithm.pace
        may_be_stale = pace is not None and pace.max_staleness is not None
        why = rejection_reasons(trainer.loss_guard.clients is not None, may_be_stale)
        uploads = f"{run.num_rejected:,} of {run.num_uploads:,} uploads"
        lines.append(("rejected", f"{uploads}, in {run.num_rounds_rejecting:,} of {run.round:,} rounds: {why}"))
    if lost := [row for row in rows if row.get("clients/lost")]:
        rounds = f"{len(rows):,} {'' if is_whole else 'logged '}rounds"
        count = f"{sum(int(row['clients/lost']) for row in lost):,} uploads, in {len(lost):,} of {rounds}"
        lines.append(("lost", f"{count}: too few clients sent for a secure sum"))
    if trainer.adversary is not None:
        lines.append(("attack", _attack(trainer, rows)))
    if trainer.privacy_in_words:
        lines.append(("privacy", trainer.privacy_in_words))
    if curve:
        lines.append(("curve", _short(curve)))
    if trainer.enable_checkpointing:
        lines.append(("model", _short(root / EXPORT)))
    return lines


def _attack(trainer: Finished, rows: Sequence[Mapping[str, float]]) -> str:
    """Describe the attack and, if counted, its attackers, after its success, if a `BackdoorProbe` has measured that."""
    counts = [row[ATTACKERS] for row in rows if ATTACKERS in row]
    words = type(trainer.adversary.attack).__name__
    if counts:
        words += f", {significant(sum(counts) / len(counts))} attackers a round"
    if SUCCESS not in trainer.callback_metrics:
        return words
    return f"success {float(trainer.callback_metrics[SUCCESS]):.2f} ({words})"


def best_of(
    trainer: Finished, rows: Iterable[Mapping[str, float]], name: str | None = None
) -> Mapping[str, float] | None:
    """Return the first of the rows with the best value of the run's metric, or of a name for it; None if no row has one."""
    name = name or trainer.metric or ""
    points = [row for row in rows if not isnan(row.get(name, nan))]
    return (min if trainer.metric_falls else max)(points, key=lambda row: row[name]) if points else None


def tested_at_best_validation(
    trainer: Finished, rows: Sequence[Mapping[str, float]]
) -> tuple[str, float, float] | None:
    """Return name and test value of the run's metric in the round that was best in validation, and that round's number from 1.

    None if no round has both values. The test set is measured beside a validation only if that has other samples.
    """
    names = validated_and_tested(trainer.metric or "", {name for row in rows for name in row})
    if names is None:
        return None
    validated, tested = names
    chosen = best_of(trainer, [row for row in rows if not isnan(row.get(tested, nan))], validated)
    return None if chosen is None else (tested, chosen[tested], chosen["round"] + 1)


def curve_file(trainer: Finished) -> Path | None:
    """Return the path of the run's curve; None if it writes none: the folder may contain an earlier run's."""
    writes = trainer.run.round > 0 and any(isinstance(logger, RoundCSVLogger) for logger in trainer.loggers)
    return Path(trainer.default_root_dir) / METRICS if writes else None


def _short(path: Path) -> str:
    """Return a path in the working directory as a relative path, and any other path unchanged."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)

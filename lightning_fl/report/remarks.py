"""What a reader should know before comparing runs: gaps, rejected uploads, other samples, seeds that are the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from lightning_fl.report.comparison import Group
from lightning_fl.report.labels import SEEDS, differing
from lightning_fl.report.records import SOURCES, Record
from lightning_fl.report.smoothing import ORDER

SHORT_WINDOW = 9
# What decides which samples a run is evaluated on.
EVALUATION = ("data.val_fraction", "trainer.limit_val_batches")


def remarks(groups: Sequence[Group]) -> list[str]:
    """A sentence or two for each."""
    records = [curve.record for group in groups for curve in group.curves]
    said = [f"{record.folder}: {gap}." for record in records for gap in record.gaps]
    said += _without_settings(records)
    name = groups[0].curves[0].metric.name
    for record in records:
        said += _rejected(record)
        if count := record.not_finite.get(name):
            said.append(f"{record.folder}: {name} is not finite in {_counted(count, 'row')}, left out here.")
    said += _evaluation(groups)
    for group in groups:
        seeds = [tuple(curve.record.settings.get(seed) for seed in SEEDS) for curve in group.curves]
        if len(set(seeds)) < len(seeds):
            said.append(f"{group.label}: some of its {len(seeds)} runs have the same seeds.")
    return said + _short_curves(groups)


def _counted(count: int, thing: str) -> str:
    """A number of things.

    >>> _counted(1, "round"), _counted(1200, "round")
    ('1 round', '1,200 rounds')
    """
    return f"{count:,} {thing}{'s' * (count != 1)}"


def _without_settings(records: Iterable[Record]) -> list[str]:
    """Runs from Python leave no configuration."""
    unknown = [_code(str(record.folder)) for record in records if "data" not in record.settings]
    if not unknown:
        return []
    what = (
        "it has no config.yaml that can be read" if len(unknown) == 1 else "they have no config.yaml that can be read"
    )
    return [f"Nothing says on which data and with which settings {', '.join(unknown)} ran: {what}."]


def _rejected(record: Record) -> list[str]:
    """How many uploads were rejected, in how many rounds, and in how many of them none was left."""
    rejected, accepted = (record.column(f"clients/{what}") for what in ("rejected", "accepted"))
    num_rejected, num_rounds = int(np.nansum(rejected)), int((rejected > 0).sum())
    if not num_rejected:
        return []
    why = " or of a loss that exploded" * (record.settings.get("trainer.loss_guard.clients") is not None)
    uploads = f"{num_rejected:,} of {int(np.nansum(rejected + accepted)):,} uploads"
    text = f"{record.folder}: {uploads} were rejected, not finite{why}, in {num_rounds:,} of {_counted(len(rejected), 'round')}"
    if num_lost := int(((rejected > 0) & (accepted == 0)).sum()):
        lost = "all" if num_lost == num_rounds else f"{num_lost:,}"
        text += f"; in {lost} of these none was left, and the model stayed as it was"
    return [f"{text}."]


def _evaluation(groups: Sequence[Group]) -> list[str]:
    """Settings by which runs of one data set may not have been evaluated on the same samples."""
    said = []
    for key in sorted({*EVALUATION, *SOURCES.values()} & {*differing([group.curves[0].record for group in groups])}):
        values = list(dict.fromkeys(str(group.settings[key]) for group in groups if key in group.settings))
        if len(values) < 2:  # of a run without a configuration nobody knows
            continue
        what = "may be of different data" if key in SOURCES.values() else "were not evaluated on the same samples"
        said.append(f"The runs {what}: `{key}` is {' and '.join(map(_code, values))}.")
    return said


def _code(text: str) -> str:
    return f"`{text}`"


def _short_curves(groups: Sequence[Group]) -> list[str]:
    """Curves that smoothing bends."""
    window = groups[0].curves[0].metric.window
    short = [curve for group in groups for curve in group.curves if ORDER < len(curve.raw) < 2 * window]
    if not short or window < SHORT_WINDOW:
        return []
    count = "One run has" if len(short) == 1 else f"{len(short)} runs have"
    less = (
        f"`--window {SHORT_WINDOW}` smooths less, `--window 1` not at all"
        if window > SHORT_WINDOW
        else "`--window 1` smooths not at all"
    )
    return [
        f"{count} fewer than {2 * window} values: smoothing reaches over half of such a curve or more, and its steep beginning "
        f"then moves its later values. {less}."
    ]

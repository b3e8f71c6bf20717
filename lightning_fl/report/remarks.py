"""Remarks to read before comparing runs: common settings, gaps, rejected uploads, different samples, repeated seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_fl.errors import require
from lightning_fl.outputs.losses import rejection_reasons
from lightning_fl.outputs.metric import TRAINING, words_of
from lightning_fl.outputs.neighbours import EPSILON
from lightning_fl.outputs.units import counted
from lightning_fl.report.comparison import ENDS, Curve, Group
from lightning_fl.report.labels import SEEDS, WELL_KNOWN, differing, experiment_settings, shown, unknown_settings
from lightning_fl.report.published_settings import settings_of
from lightning_fl.report.records import SOURCES, Record
from lightning_fl.report.smoothing import ORDER

SHORT_WINDOW = 9
# Settings that decide on which samples a run is evaluated.
EVALUATION = ("data.val_fraction", "trainer.limit_val_batches")
IN_COMMON = {
    "data": "{}",
    "partition": "{}",
    "clients": "{} clients",
    "cohort": "{} a round",
    "work": "{}",
    "rounds": "{} rounds",
    "batch": "batch {}",
    "learning rate": "learning rate {}",
}
"""Phrase of each setting that a report names if all runs share it, by the keys of `settings_of`."""
TASK = ("model", "model.network", "data.num_clients", "data.partition")
"""Settings that seldom differ in one comparison; see `unrelated`."""
VALIDATION = {"val", "valid", "validation"}
TEST_SET = "the test set (`data.val_fraction` 0)"


def in_common(groups: Sequence[Group]) -> list[str]:
    """Return a line with the main settings that all runs share, and a line with the samples of their validation.

    A line is left out if its content is unknown. The second is also left out if the runs differ, which `remarks` reports.
    """
    records = [curve.record for group in groups for curve in group.curves]
    if any("data" not in record.settings for record in records):
        return []
    first, *others = (settings_of(record) for record in records)
    same = [name for name in IN_COMMON if name in first and all(first[name] == other.get(name) for other in others)]
    phrases = [IN_COMMON[name].format(shown(first[name])).removesuffix("s" * (first[name] == 1)) for name in same]
    networks = {str(record.settings.get("model.network") or record.settings.get("model")) for record in records}
    if len(networks) == 1:
        phrases += networks
    lines = [", ".join(phrases) + "."] if phrases else []
    name, fractions = groups[0].curves[0].metric.name, {record.settings.get("data.val_fraction") for record in records}
    on = _measured_on(fractions.pop(), records[0].settings["data"]) if len(fractions) == 1 else None
    if on is not None and words_of(name) & VALIDATION:
        lines.append(f"{name} is measured on {on}.")
    return lines


def _measured_on(val_fraction: Any, data: str) -> str | None:
    """Return the samples on which a validation is measured; None if unknown, as with a data module of the user's own."""
    if not isinstance(val_fraction, int | float):
        return None
    if val_fraction:
        return f"samples that the clients hold out (`data.val_fraction` {val_fraction:g})"
    if data not in (*WELL_KNOWN, *SOURCES):
        return None
    return "the datamodule's own validation data" if data == "Federated" else TEST_SET


def require_fitting(ylabel: str | None, groups: Sequence[Group]) -> None:
    """Raise if the user's name of the vertical axis is wrong about the samples of the values.

    Raises:
        UserError: it names a test, but the values come from a validation on held-out samples or from the training.
    """
    curves = [curve for group in groups for curve in group.curves]
    name = curves[0].metric.name
    if ylabel is None or "test" not in words_of(ylabel) or "test" in words_of(name):
        return
    for settings in (curve.record.settings for curve in curves):
        on = _measured_on(settings.get("data.val_fraction"), str(settings.get("data", "")))
        if words_of(name) & TRAINING:
            on = "training samples"
        require(
            on in (None, TEST_SET),
            f"--ylabel {ylabel!r} calls {name} a test value, but it is measured on {on}; choose another name, or choose a test "
            "value with --metric.",
        )


def unrelated(groups: Sequence[Group]) -> list[str]:
    """Return a remark if runs that were found below a folder have different tasks, as by chance; [] if they have one."""
    firsts = [group.curves[0].record for group in groups]
    keys = [key for key in TASK if key in differing(firsts)]
    if not keys:
        return []
    return [
        f"The runs below the given folders differ in their task, by {', '.join(f'`{key}`' for key in keys)}: if they do not "
        "belong together, name only the folders of the runs to compare."
    ]


def remarks(groups: Sequence[Group]) -> list[str]:
    """Return the remarks, one or two sentences each."""
    records = [curve.record for group in groups for curve in group.curves]
    said = [f"{record.folder}: {gap}." for record in records for gap in record.gaps]
    if unknown := [f"`{record.folder}`" for record in records if "data" not in record.settings]:
        said.append(
            f"Data and settings of {', '.join(unknown)} are unknown: there is no readable config.yaml or settings.yaml."
        )
    said += [
        f"{record.folder}: {', '.join(f'`{key}`' for key in keys)} unknown, so the run has its own line; "
        "save_hyperparameters() in the constructor keeps such arguments."
        for record in records
        if (keys := unknown_settings(record))
    ]
    for curve in (curve for group in groups for curve in group.curves):
        said += _changed(curve.record) + _rejected(curve.record) + _lost(curve.record) + _not_finite(curve)
    said += _evaluation(groups) + _private(records)
    for group in groups:
        seeds = [tuple(curve.record.settings.get(seed) for seed in SEEDS) for curve in group.curves]
        if len(set(seeds)) < len(seeds):
            said.append(f"{group.label}: some of its {len(seeds)} runs have the same seeds.")
    return said + _short_curves(groups)


def _private(records: Sequence[Record]) -> list[str]:
    """Return a remark on several private runs, whose privacy losses add up for an observer of more than one."""
    count = sum(not np.isnan(record.column(EPSILON)).all() for record in records)
    if count < 2:
        return []
    return [
        f"{count} runs are private. The ε of each covers this run alone; several runs on the same clients together cost at most "
        "the sum of their ε. Runs with the same seed draw different noise if a setting differs."
    ]


def _not_finite(curve: Curve) -> list[str]:
    """Return a remark on values that are not finite."""
    name, record = curve.metric.name, curve.record
    if name not in record.not_finite:
        return []
    said = f"{record.folder}: left out {counted(int(record.not_finite[name].sum()), 'non-finite value')} of {name}"
    lacking = [f"`{end}`" for end in ENDS if curve.numbers[end] is None]
    return [
        f"{said}, some of them in its last rounds: it has no {' and no '.join(lacking)}." if lacking else f"{said}."
    ]


def _changed(record: Record) -> list[str]:
    """Return a remark on settings that changed when the run was resumed; the last ones stand for the run elsewhere."""
    settings = [experiment_settings(fit) for fit in record.settings_of_fits]
    changes = []
    for key in dict.fromkeys(key for leg in settings for key in leg):
        values = [shown(fit[key]) for fit in record.settings_of_fits if key in fit]
        changed = [value for position, value in enumerate(values) if position == 0 or value != values[position - 1]]
        if len(changed) > 1 and key != "trainer.max_rounds":
            changes.append(f"`{key}` {' → '.join(changed)}")
    return [f"{record.folder}: settings changed when it was resumed: {', '.join(changes)}."] if changes else []


def _rejected(record: Record) -> list[str]:
    """Return a remark on rejected uploads, the rounds that had some, and the rounds in which none was accepted."""
    rejected, accepted = (record.column(f"clients/{what}") for what in ("rejected", "accepted"))
    num_rejected, num_rounds = int(np.nansum(rejected)), int((rejected > 0).sum())
    if not num_rejected:
        return []
    limits = ("trainer.loss_guard.clients", "algorithm.max_staleness")
    why = rejection_reasons(*(record.settings.get(limit) is not None for limit in limits))
    uploads = f"{num_rejected:,} of {int(np.nansum(rejected + accepted)):,} uploads"
    text = f"{record.folder}: {uploads} were rejected ({why}) in {num_rounds:,} of {_rounds(record)}"
    if num_lost := int(((rejected > 0) & (accepted == 0)).sum()):
        lost = "all" if num_lost == num_rounds else f"{num_lost:,}"
        text += f"; in {lost} of these no upload was accepted, and {_change(record)}"
    return [f"{text}."]


def _lost(record: Record) -> list[str]:
    """Return a remark on uploads whose secure sum was lost."""
    lost = record.column("clients/lost")
    if not (num_lost := int(np.nansum(lost))):
        return []
    rounds = f"{int((lost > 0).sum()):,} of {_rounds(record)}"
    why = f"in which too few clients sent for a secure sum, and {_change(record)}"
    return [f"{record.folder}: {num_lost:,} uploads were lost in {rounds}, {why}."]


def _change(record: Record) -> str:
    """Return a clause on the model's change in a round without an upload, in which a trusted server still adds noise."""
    has_noise = not np.isnan(record.column("privacy/noise")).all()
    return "only noise changed the model" if has_noise else "the model did not change"


def _rounds(record: Record) -> str:
    """Return the number of rounds that have a row, in words, which also say if others have none."""
    count = len(record.columns["round"])
    return counted(count, "round" if count == record.num_rounds else "logged round")


def _evaluation(groups: Sequence[Group]) -> list[str]:
    """Return remarks on settings for which runs may have been evaluated on different samples."""
    said, kinds = [], {group.settings.get("data") for group in groups}
    for key in sorted({*EVALUATION, *SOURCES.values()} & {*differing([group.curves[0].record for group in groups])}):
        values = list(dict.fromkeys(f"`{group.settings[key]}`" for group in groups if key in group.settings))
        if len(values) < 2:  # a run without a configuration has no known value
            continue
        what = "may use different data" if key in SOURCES.values() else "were not evaluated on the same samples"
        zero = "; 0 stands for the test set" * (key == "data.val_fraction" and "Federated" not in kinds)
        said.append(f"The runs {what}: `{key}` is {' and '.join(values)}{zero}.")
    return said


def _short_curves(groups: Sequence[Group]) -> list[str]:
    """Return a remark on curves that are short for the smoothing window that the user gives."""
    window = groups[0].curves[0].metric.window
    if window is None or window < SHORT_WINDOW:
        return []
    short = [curve for group in groups for curve in group.curves if ORDER < len(curve.raw) < 2 * window]
    if not short:
        return []
    count = "One run has" if len(short) == 1 else f"{len(short)} runs have"
    return [
        f"{count} fewer than {2 * window} values: the smoothing window covers half of such a curve or more, so a steep beginning "
        "shifts its later values, and `best (smoothed)` with them. A smaller `--window` smooths less, `--window 1` does not "
        "smooth; `final` and `last` are never smoothed."
    ]

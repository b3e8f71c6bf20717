"""`lightning-fl report RUN…`: compare runs in tables and pictures. For a study, `OfStudy` adds the study's own content."""

from __future__ import annotations

import textwrap
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_fl.errors import UserError, require
from lightning_fl.outputs import terminal
from lightning_fl.outputs.figures import Look
from lightning_fl.outputs.files import writing
from lightning_fl.outputs.json_text import json_text
from lightning_fl.outputs.metric import AT_BEST_VALIDATION, FINAL, is_accuracy
from lightning_fl.outputs.run_folder import remove_empty, require_writable
from lightning_fl.outputs.units import counted
from lightning_fl.report import latex, tables
from lightning_fl.report.comparison import VALUES, Curve, Group, Metric, common_metric, curves_with, group_runs
from lightning_fl.report.document import (
    Commands,
    Part,
    Picture,
    Sections,
    Table,
    locked,
    note_written,
    remove_earlier,
    set_others_aside,
    to_html,
    to_markdown,
)
from lightning_fl.report.flags import TEX, build_parser, formats_of, look_of
from lightning_fl.report.json_content import content_of
from lightning_fl.report.made_by import commands_of
from lightning_fl.report.published import PublishedTable, read_published
from lightning_fl.report.records import read_runs, require_same_data
from lightning_fl.report.remarks import in_common, remarks, require_fitting, unrelated
from lightning_fl.report.smoothing import DECIMALS, ORDER, WINDOW


def _how(groups: Sequence[Group], metric: Metric) -> str:
    """Return the paragraph that explains the numbers."""
    windows = sorted({curve.window for group in groups for curve in group.curves})
    smoothing, curve, best = "Curves are not smoothed.", "curve", "best"
    if windows != [1]:
        decimals = "three" if metric.decimals == DECIMALS else metric.decimals
        rounded = "" if decimals is None else f", and accuracies are rounded to {decimals} decimals"
        suited = f"; at most half of a curve, and {WINDOW} for long ones: `--window` sets another" * (
            metric.window is None
        )
        smoothing = (
            f"Curves are smoothed with a Savitzky–Golay filter of order {ORDER} and window "
            f"{' to '.join(dict.fromkeys((str(windows[0]), str(windows[-1]))))} (1 does not smooth{suited}){rounded}; pale lines "
            "are the raw values."
        )
        curve, best = "smoothed curve", VALUES["best"]
    return (
        f"`final` is {FINAL}, not smoothed; `last` is the last value. `{best}` is the best value of the {curve} (`best` in "
        "`runs.csv`): it is chosen on the values that it reports, so on test samples it is too optimistic. "
        f"`{AT_BEST_VALIDATION}` is the test value of the round with the best validation value, among rounds that have both. "
        f"{smoothing} A target is reached in the first round in which the {curve} meets it; `TargetReached` reads values that "
        "are not smoothed. Bytes are the sum over all clients, including the set-up; `total traffic` is uplink + downlink; "
        "1 MB is 10^6 bytes. `simulated time` is read from the run's simulated clock, `wall time` from the machine that ran it. "
        "MFLOPs are multiply-accumulates for one sample / 10^6. Runs that differ only in their seeds share one row: mean ± "
        "sample standard deviation, or one number if all runs agree. Tables round their numbers; `runs.csv` and `curves.csv` "
        "contain them in full."
    )


@dataclass(frozen=True)
class OfStudy:
    """Content that a study adds to the report of its runs.

    Attributes:
        lines: folders of the runs of each line by its name.
        name: name of the study, for the title; None for the methods' names.
        commands: commands that made the runs; None to read them from the runs' folders.
        sections: function that takes the look of the pictures and returns the sections before the results.
        content: the same content for `--json`.
    """

    lines: Mapping[str, Sequence[str]]
    name: str | None = None
    commands: Sequence[str] | None = None
    sections: Callable[[Look], Sections] = lambda _: {}
    content: Mapping[str, Any] = field(default_factory=dict)


def report(arguments: Sequence[str], study: OfStudy | None = None) -> str:
    """Read runs and write a report of them.

    Args:
        arguments: command line after `report`.
        study: content that a study adds; None to give runs that differ only in their seeds one line.

    Returns:
        Text to print: tables, remarks, and the path of the report.

    Raises:
        UserError: a folder has no run, the runs cannot be compared, or a flag's value is not allowed.
    """
    return write_report(build_parser().parse_args(arguments), study)


def write_report(flags: Namespace, study: OfStudy | None) -> str:
    """Write the report that the flags describe, as `report` does."""
    look = look_of(flags)
    published = read_published(flags.paper) if flags.paper else None
    records, notes = read_runs(flags.runs)
    metric = common_metric(records, flags.metric, flags.target, flags.window, flags.traffic)
    if published and not is_accuracy(metric.name):
        raise UserError(
            f"the published numbers are accuracies and cannot be compared with {metric.name}; leave out --paper."
        )
    curves, without = curves_with(records, metric)
    records = [curve.record for curve in curves.values()]
    are_found = any(note.startswith("Runs in ") for note in notes)
    notes += [f"Left out: {problem}" for problem in without]
    require_same_data({str(record.folder): record.settings for record in records})
    groups = _labelled(group_runs(records, metric) if study is None else _groups(study.lines, curves), flags.label)
    notes += unrelated(groups) if are_found else []
    require_fitting(look.ylabel, groups)
    folder = Path(flags.out)
    made = require_writable(flags.out, flag="--out")
    commands = commands_of(groups) if study is None or study.commands is None else study.commands
    try:
        sections = {
            **_origin(groups, commands),
            **(study.sections(look) if study else {}),
            **_sections(groups, metric, published, look, flags.panels, notes),
        }
    except UserError:  # a picture has no room
        remove_empty(made)
        raise
    name = study.name if study and study.name else ", ".join(dict.fromkeys(group.algorithm for group in groups))
    title = f"{name}: {metric.short}"
    pages = {"report.md": to_markdown(title, sections)}
    if flags.html:
        pages["report.html"] = to_html(title, sections)
    if TEX in formats_of(flags):
        comments = [title, *in_common(groups), *["report.md has the commands that made the runs."] * bool(commands)]
        pages = {"results.tex": latex.results(groups, metric, comments), **pages}

    pictures = [part for parts in sections.values() for part in parts if isinstance(part, Picture)]
    names = [*pages, "runs.csv", "curves.csv", *(name for picture in pictures for name in picture.files)]
    with writing(folder), locked(folder):
        remove_earlier(folder)
        aside = set_others_aside(folder, names)
        for name, page in pages.items():
            (folder / name).write_text(page, encoding="utf-8", errors="replace")
        tables.write_runs(folder / "runs.csv", groups)
        tables.write_curves(folder / "curves.csv", groups, metric)
        for picture in pictures:
            picture.save(folder)
        note_written(folder, names)
    if flags.json:
        said = {"remarks": [*notes, *tables.other_orders(groups, metric), *remarks(groups)]}
        of_study = dict(study.content) if study else {}
        files = {"files": [str(folder / name) for name in names]}
        return json_text("report", {"title": title, **content_of(groups, metric), **of_study, **said, **files})
    written = {
        "table": str(folder / "results.tex") if "results.tex" in pages else "",
        "pictures": ", ".join(f"{folder / '*'}.{kind}" for kind in look.formats if pictures),
        "report": str(folder / list(pages)[-1]),
        "kept": f"{aside}, with earlier files of the same names that no report had written, or that were changed since"
        if aside
        else "",
    }
    return _printed(sections, terminal.width(), {name: text for name, text in written.items() if text})


def _labelled(groups: Sequence[Group], names: Sequence[str] | None) -> Sequence[Group]:
    """Return the groups under the user's names."""
    if names is None:
        return groups
    lines = "; ".join(group.label for group in groups)
    require(
        len(names) == len(groups),
        f"--label is given {counted(len(names), 'time')}, but the report has {len(groups)} lines, in this order: {lines}.",
    )
    require(len(set(names)) == len(names), f"two lines have the same --label, got {', '.join(names)}.")
    return [replace(group, label=name) for group, name in zip(groups, names, strict=True)]


def _groups(lines: Mapping[str, Sequence[str]], curves: Mapping[Path, Curve]) -> list[Group]:
    """Return the groups of the runs, each line's in one."""
    curves_by_line = {
        name: tuple(curves[Path(folder)] for folder in folders if Path(folder) in curves)
        for name, folders in lines.items()
    }
    return [Group(name, line_records) for name, line_records in curves_by_line.items() if line_records]


def _origin(groups: Sequence[Group], commands: Sequence[str]) -> Sections:
    """Return the section at the top: the settings of the runs and the commands that made them."""
    sections: dict[str, list[Part]] = {
        "Settings in common" if len(groups) > 1 else "Settings": [in_common(groups)],
        "Settings that differ": [*tables.settings(groups)],
        "Commands": [Commands(commands)] if commands else [],
    }
    return _without_empty(sections)


def _without_empty(sections: Mapping[str, Sequence[Part]]) -> Sections:
    """Return the sections that have content."""
    return {heading: content for heading, parts in sections.items() if (content := [part for part in parts if part])}


def _sections(
    groups: Sequence[Group],
    metric: Metric,
    published: PublishedTable | None,
    look: Look,
    has_panels: bool,
    notes: list[str],
) -> Sections:
    """Return the sections with the results, and with the notes that explain them."""
    from lightning_fl.report.attacks import attack_parts
    from lightning_fl.report.clients import clients_table, draw_clients, unreadable
    from lightning_fl.report.codecs import codec_parts
    from lightning_fl.report.plots import draw_bits

    sections: dict[str, list[Part]] = {"Results": [tables.results(groups, metric)]}
    if metric.target is not None:
        sections[f"Cost of reaching {metric.short} {metric.target:g}"] = [tables.prices(groups, metric)]
    sections["Curves"] = _curves(groups, metric, look, has_panels)
    if figure := draw_bits(groups, look):
        picture = Picture("bytes_by_kind", "Bytes of the whole run by kind", figure, look)
        sections["Bytes by kind"] = [tables.bytes_by_kind(groups), picture]
    sections["Codecs"] = codec_parts(groups, look)
    sections["Attacks"] = attack_parts(groups, metric, look)
    local_metric = metric.over_clients
    if figure := draw_clients(groups, local_metric, look):
        about = (
            f"{local_metric.short.capitalize()} of each client on its own held-out samples, in the last round that evaluated the "
            "clients. `worst 10 %` is the mean of the worst tenth of them."
        )
        caption = f"Share of clients by {local_metric.short} on their own samples"
        picture = Picture(f"{local_metric.short.replace(' ', '_')}_of_clients", caption, figure, look)
        sections["Clients"] = [about, clients_table(groups, local_metric), picture]
    if published:
        about = (
            "Each row of the paper is followed by your runs of the same method and network, measured at the paper's target. "
            "The paper's final accuracy is the maximum of its smoothed curve, so it is compared with `best (smoothed)`. "
            "Their `setting` lists the differences from the paper's setting. Published times are simulated times on the paper's "
            "clock; published `rounds` are computed from these times."
        )
        left_out = [
            f"{group.label} is not in this table: {why}." for group in groups if (why := published.missing(group))
        ]
        sections[f"Published: {published.title}"] = [about, tables.beside(published, groups), left_out]
    sections["Remarks"] = [notes + tables.other_orders(groups, metric) + remarks(groups) + unreadable(groups)]
    sections["How to read it"] = [_how(groups, metric)]
    return _without_empty(sections)


def _curves(groups: Sequence[Group], metric: Metric, look: Look, has_panels: bool) -> list[Part]:
    """Return the pictures of the curves, one for each horizontal axis or one with a panel for each."""
    from lightning_fl.report.plots import AXES, axes_of, draw_curves, draw_panels, is_logarithmic, panels_of

    name, title = metric.short.replace(" ", "_"), metric.short.capitalize()
    if has_panels:
        figure = draw_panels(groups, metric, look)
        caption = f"{title} against {', '.join(AXES[axis] for axis in panels_of(groups, metric))}"
        return [Picture(f"{name}_panels", caption, figure, look)] if figure else []
    return [
        Picture(
            f"{name}_by_{axis}",
            f"{title} against {AXES[axis]}{', on a logarithmic axis' * is_logarithmic(look, axis)}",
            figure,
            look,
        )
        for axis in axes_of(metric)
        if (figure := draw_curves(groups, metric, axis, look))
    ]


def _printed(sections: Sections, width: int, written: Mapping[str, str]) -> str:
    """Return the tables and remarks as text for a terminal of this width, followed by the written files."""
    chosen = {
        heading: [
            fitting
            for part in parts
            if isinstance(part, (Table, list))
            for fitting in (part.fitting(width) if isinstance(part, Table) else [part])
        ]
        for heading, parts in sections.items()
    }
    text = to_markdown("", {heading: parts for heading, parts in chosen.items() if parts}).partition("\n\n")[2]
    lines = [
        line
        for long in text.splitlines()
        for line in ([long] if long[:1] in ("", "|") else textwrap.wrap(long, width, subsequent_indent="  "))
    ]
    longest = max(map(len, written))
    return "\n".join([*lines, "", *(f"{name:<{longest}}  {path}" for name, path in written.items())])

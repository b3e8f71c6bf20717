"""`lightning-fl report RUN…`: compare runs in tables and pictures."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lightning_fl.errors import CommandParser, UserError, require
from lightning_fl.outputs.figures import FORMATS, Look
from lightning_fl.outputs.files import writing
from lightning_fl.outputs.metric import AT_BEST_VALIDATION, FINAL, is_accuracy
from lightning_fl.outputs.run_folder import require_writable
from lightning_fl.report import tables
from lightning_fl.report.comparison import VALUES, Curve, Group, Metric, common_metric, curves_with, group_runs
from lightning_fl.report.document import (
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
from lightning_fl.report.labels import counted
from lightning_fl.report.published import PublishedTable, read_published
from lightning_fl.report.records import read_runs, require_same_data
from lightning_fl.report.remarks import in_common, remarks
from lightning_fl.report.smoothing import ORDER, WINDOW


def _how(metric: Metric) -> str:
    """Return the paragraph that explains the numbers."""
    smoothing, curve, best = "Curves are not smoothed.", "curve", "best"
    if metric.window > 1:
        rounded = ", and accuracies are rounded to three decimals" if is_accuracy(metric.name) else ""
        smoothing = (
            f"Curves are smoothed with a Savitzky–Golay filter of window {metric.window} and order {ORDER} (a smaller window "
            f"for shorter curves, none for {ORDER} or fewer values){rounded}; pale lines are the raw values."
        )
        curve, best = "smoothed curve", VALUES["best"]
    return (
        f"`final` is {FINAL}, not smoothed; `last` is the last value. `{best}` is the best value of the {curve} (`best` in "
        "`runs.csv`): it is chosen on the values that it reports, so on test samples it promises too much. "
        f"`{AT_BEST_VALIDATION}` is the test value of the round with the best value in validation, of rounds that have both. "
        f"{smoothing} A target is reached in the first round in which the {curve} meets it; `TargetReached` reads values that "
        "are not smoothed. Bytes are the sum over all clients, including the set-up; 1 MB is 10^6 bytes. `simulated time` is "
        "read from the run's simulated clock, `time here` from the machine that ran it. MFLOPs are multiply-accumulates for one "
        "sample / 10^6. Runs that differ only in their seeds share one row: mean ± sample standard deviation, or one number if "
        "all runs agree. Tables round their numbers; `runs.csv` and `curves.csv` contain them in full."
    )


def build_parser() -> ArgumentParser:
    """Return the parser of the command's flags."""
    parser = CommandParser(
        prog="lightning-fl report", description="Compare runs: tables, curves and pictures.", allow_abbrev=False
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="folder of a run (its trainer.default_root_dir), or a folder with runs below it; the report keeps this order",
    )
    parser.add_argument("--target", type=float, help="also report the cost of reaching this value, such as 0.6")
    parser.add_argument(
        "--metric", help="column of metrics.csv to compare (default: the metric that the runs are about)"
    )
    parser.add_argument(
        "--window",
        type=int,
        default=WINDOW,
        help="length of the smoothing window in values, odd and at least 5; 1 for no smoothing (default: %(default)s)",
    )
    parser.add_argument("--out", default="report", metavar="DIR", help="folder to write into (default: %(default)s)")
    parser.add_argument(
        "--paper", metavar="PAPER:TABLE", help="also show a published table, such as feddumap:10 or fedadam-ssm:I"
    )
    parser.add_argument(
        "--label",
        action="append",
        metavar="TEXT",
        help="name of a line in tables and pictures; once for each line, in their order",
    )
    look = parser.add_argument_group("pictures")
    look.add_argument(
        "--format",
        default=",".join(Look.formats),
        metavar="LIST",
        help=f"formats of the files, of {', '.join(FORMATS)}, separated by commas (default: %(default)s)",
    )
    look.add_argument("--size", metavar="WxH", help="width and height in inches, such as 3.5x2.4 (default: 7.5x4.2)")
    look.add_argument(
        "--dpi", type=int, default=Look.dpi, metavar="N", help="dots per inch of PNG files (default: %(default)s)"
    )
    look.add_argument(
        "--font-size",
        type=float,
        default=Look.font_size,
        metavar="POINTS",
        help="size of text in points (default: %(default)s)",
    )
    look.add_argument(
        "--xscale",
        choices=("log", "linear"),
        help="horizontal axis (default: log for bytes, linear for rounds and time)",
    )
    look.add_argument(
        "--yscale", choices=("log", "linear"), default=Look.yscale, help="vertical axis (default: %(default)s)"
    )
    parser.add_argument("--html", action="store_true", help="also write report.html, one self-contained page")
    return parser


def report(
    arguments: Sequence[str], claims: Sections | None = None, lines: Mapping[str, Sequence[str]] | None = None
) -> str:
    """Read runs and write a report of them.

    Args:
        arguments: command line after `report`.
        claims: section with a study's claims and their verdicts, if any.
        lines: folders of the runs of each line by its name; None: runs that differ only in their seeds share a line.

    Returns:
        Text to print: tables, remarks, and the path of the report.

    Raises:
        UserError: a folder has no run, the runs cannot be compared, or a flag's value is not allowed.
    """
    given = build_parser().parse_args(arguments)
    look = _look(given)
    published = read_published(given.paper) if given.paper else None
    records, notes = read_runs(given.runs)
    metric = common_metric(records, given.metric, given.target, given.window)
    if published and not is_accuracy(metric.name):
        raise UserError(
            f"the published numbers are accuracies and cannot be compared with {metric.name}; leave out --paper."
        )
    curves, without = curves_with(records, metric)
    records = [curve.record for curve in curves.values()]
    notes += [f"Left out: {problem}" for problem in without]
    require_same_data({str(record.folder): record.settings for record in records})
    groups = _labelled(group_runs(records, metric), given.label) if lines is None else _groups(lines, curves)
    folder = Path(given.out)
    require_writable(given.out, flag="--out")
    sections = {**(claims or {}), **_sections(groups, metric, published, look, notes)}
    title = f"{', '.join(dict.fromkeys(group.algorithm for group in groups))}: {metric.short}"
    pages = {"report.md": to_markdown(title, sections)} | (
        {"report.html": to_html(title, sections)} if given.html else {}
    )

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
    kept = (
        f"\nkept    {aside}, with files that stood in the way and that no report had written as they were"
        if aside
        else ""
    )
    return _printed(sections, folder / list(pages)[-1]) + kept


def _look(given: Namespace) -> Look:
    """Return the look of the pictures that the flags describe."""
    size = Look.size
    if given.size is not None:
        try:
            width, height = map(float, given.size.lower().split("x"))
        except ValueError:
            raise UserError(f"--size is the width and height in inches, such as 3.5x2.4, got {given.size!r}.") from None
        size = width, height
    formats = tuple(dict.fromkeys(filter(None, given.format.lower().replace(" ", "").split(","))))
    require(bool(formats), f"--format is empty: give one or several of {', '.join(FORMATS)}, separated by commas.")
    return Look(formats, size, given.dpi, given.font_size, given.xscale, given.yscale)


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
    """Return the groups of a study's runs, those of each cell in a line of its own."""
    found = {
        name: tuple(curves[Path(folder)] for folder in folders if Path(folder) in curves)
        for name, folders in lines.items()
    }
    return [Group(name, of_line) for name, of_line in found.items() if of_line]


def _sections(
    groups: Sequence[Group], metric: Metric, published: PublishedTable | None, look: Look, notes: list[str]
) -> Sections:
    """Return the report's content, without what is empty."""
    from lightning_fl.report.clients import clients_table, draw_clients, unreadable
    from lightning_fl.report.codecs import codec_parts
    from lightning_fl.report.plots import AXES, draw_bits, draw_curves, is_logarithmic

    sections: dict[str, list[Part]] = {"Results": [tables.results(groups, metric)]}
    if metric.target is not None:
        sections[f"Cost of reaching {metric.short} {metric.target:g}"] = [tables.prices(groups)]
    sections["Curves"] = [
        Picture(
            f"{metric.short.replace(' ', '_')}_by_{axis}",
            f"{metric.short.capitalize()} against {description}{', on a logarithmic axis' * is_logarithmic(look, axis)}",
            figure,
            look.formats,
        )
        for axis, description in AXES.items()
        if (figure := draw_curves(groups, metric, axis, look))
    ]
    if figure := draw_bits(groups, look):
        picture = Picture("bytes_by_kind", "Bytes of the whole run by kind", figure, look.formats)
        sections["Bytes by kind"] = [tables.bytes_by_kind(groups), picture]
    sections["Codecs"] = codec_parts(groups, look)
    of_clients = metric.of_clients
    if figure := draw_clients(groups, of_clients, look):
        about = (
            f"{of_clients.short.capitalize()} of each client on its own held-out samples, in the last round that evaluated the "
            "clients. `worst 10 %` is the mean of the worst tenth of them."
        )
        caption = f"Share of clients by {of_clients.short} on their own samples"
        picture = Picture(f"{of_clients.short.replace(' ', '_')}_of_clients", caption, figure, look.formats)
        sections["Clients"] = [about, clients_table(groups, of_clients), picture]
    if published:
        about = (
            "Each row of the paper is followed by your runs of the same method and network, measured at the paper's target. "
            "The paper's final accuracy is the maximum of its smoothed curve, so it is compared with `best (smoothed)`. "
            "Their `setting` lists what differs from the paper's setting. Published times are simulated times on the paper's "
            "clock; published `rounds` are computed from these times."
        )
        left_out = [
            f"{group.label} is not in this table: {why}." for group in groups if (why := published.missing(group))
        ]
        sections[f"Published: {published.title}"] = [about, tables.beside(published, groups), left_out]
    sections["Settings in common" if len(groups) > 1 else "Settings"] = [in_common(groups)]
    sections["Settings that differ"] = [*tables.settings(groups)]
    sections["Remarks"] = [notes + remarks(groups) + unreadable(groups)]
    sections["How to read it"] = [_how(metric)]
    return {heading: kept for heading, parts in sections.items() if (kept := [part for part in parts if part])}


def _printed(sections: Sections, path: Path) -> str:
    """Return the tables and remarks as text for the terminal."""
    chosen = {
        heading: [part for part in parts if isinstance(part, (Table, list))] for heading, parts in sections.items()
    }
    text = to_markdown("", {heading: parts for heading, parts in chosen.items() if parts}).partition("\n\n")[2]
    return f"{text}\nreport  {path}"

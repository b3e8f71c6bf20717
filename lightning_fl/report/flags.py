"""Flags of `lightning-fl report`."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace

from lightning_fl.checks import check_choice
from lightning_fl.errors import CommandParser, UserError, require
from lightning_fl.outputs.figures import FORMATS, Look
from lightning_fl.report.smoothing import WINDOW

TEX = "tex"
"""Format of a LaTeX table, in addition to the formats of pictures."""
PANELS_SIZE = (7.5, 2.8)
"""Width and height in inches of a picture with panels."""


def _given(text: str) -> str:
    """Return a value of a flag that must not be empty, as a variable of the shell that is not set makes it."""
    if not text.strip():
        raise ArgumentTypeError("it is empty; perhaps a variable of the shell is not set")
    return text


def build_parser() -> ArgumentParser:
    """Return the parser of the command's flags."""
    parser = CommandParser(
        prog="lightning-fl report",
        usage="%(prog)s RUN [RUN ...] [options]\n       %(prog)s STUDY [DIR] [options]",
        description="Compare runs, or the present runs of a study file: tables, curves and pictures.",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=_given,
        metavar="RUN",
        help="folder of a run (its trainer.default_root_dir), or a folder with runs below it; the report keeps this order. A "
        "study file stands for its finished runs, in the folder where the study writes them or in DIR, its --out; runs of "
        "earlier versions of the file are left out",
    )
    parser.add_argument("--target", type=float, help="also report the cost of reaching this value, such as 0.6")
    parser.add_argument(
        "--metric", type=_given, help="column of metrics.csv to compare (default: the runs' own metric)"
    )
    parser.add_argument(
        "--window",
        type=int,
        help="length of the smoothing window in values, odd and at least 5; 1 for no smoothing (default: "
        f"{WINDOW}, or at most half of a shorter curve)",
    )
    parser.add_argument(
        "--traffic",
        choices=("up", "down", "total"),
        default="up",
        help="bytes by which methods are compared in pictures and LaTeX tables: uplink, downlink, or their sum "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--out", type=_given, default="report", metavar="DIR", help="folder to write into (default: %(default)s)"
    )
    parser.add_argument(
        "--paper", metavar="PAPER:TABLE", help="also show a published table, such as feddumap:10 or fedadam-ssm:I"
    )
    parser.add_argument(
        "--label",
        action="append",
        metavar="TEXT",
        help="name of a line in tables and pictures; once for each line, in their order",
    )
    _add_look(parser)
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON document in place of tables and remarks; the same files are written",
    )
    parser.add_argument("--html", action="store_true", help="also write report.html, one self-contained page")
    return parser


def _add_look(parser: ArgumentParser) -> None:
    """Add the flags of the pictures."""
    look = parser.add_argument_group("pictures")
    look.add_argument(
        "--format",
        default=",".join(Look.formats),
        metavar="LIST",
        help=f"formats of the files, of {', '.join(FORMATS)}, separated by commas; with {TEX} also results.tex, a LaTeX table "
        "(default: %(default)s)",
    )
    look.add_argument(
        "--panels", action="store_true", help="draw the curves as one picture with a panel for each horizontal axis"
    )
    look.add_argument(
        "--size",
        metavar="WxH",
        help="width and height in inches, such as 3.5x2.4 (default: 7.5x4.2, with panels 7.5x2.8)",
    )
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
        "--font",
        metavar="NAME",
        help="font that is installed, or serif or STIXGeneral, which is like Times (default: DejaVu Sans)",
    )
    look.add_argument(
        "--ylabel",
        metavar="TEXT",
        help="name of the curves' vertical axis; (smoothed) is added for smoothed curves (default: the metric's name)",
    )
    look.add_argument(
        "--xscale",
        choices=("log", "linear"),
        help="horizontal axis (default: log for bytes, linear for rounds and time)",
    )
    look.add_argument(
        "--yscale", choices=("log", "linear"), default=Look.yscale, help="vertical axis (default: %(default)s)"
    )


def formats_of(flags: Namespace) -> tuple[str, ...]:
    """Return the formats of the pictures, and `tex` if a LaTeX table is to be written."""
    formats = tuple(dict.fromkeys(filter(None, flags.format.lower().replace(" ", "").split(","))))
    allowed = (*FORMATS, TEX)
    require(bool(formats), f"--format is empty: give one or several of {', '.join(allowed)}, separated by commas.")
    for name in formats:
        check_choice("format", name, allowed)
    return formats


def look_of(flags: Namespace) -> Look:
    """Return the look of the pictures that the flags describe."""
    size = PANELS_SIZE if flags.panels else Look.size
    if flags.size is not None:
        try:
            width, height = map(float, flags.size.lower().split("x"))
        except ValueError:
            raise UserError(f"--size is the width and height in inches, such as 3.5x2.4, got {flags.size!r}.") from None
        size = width, height
    formats = tuple(name for name in formats_of(flags) if name != TEX)
    return Look(
        formats,
        size,
        flags.dpi,
        flags.font_size,
        flags.xscale,
        flags.yscale,
        ylabel=flags.ylabel,
        font=flags.font,
        is_sized=flags.size is not None,
    )

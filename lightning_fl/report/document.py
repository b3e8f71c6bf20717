"""Report of paragraphs, tables and pictures, written as Markdown or as one self-contained HTML page, and its folder."""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import lock_descriptor

from lightning_fl.outputs.figures import Look
from lightning_fl.outputs.files import is_own_file
from lightning_fl.report.rendering import rendered

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WRITTEN = ".report-files.json"
"""File with the names and digests of the report's files, which distinguish them from the user's own."""


@dataclass(frozen=True)
class Table:
    """Table of text cells.

    Attributes:
        header: titles of the columns; the first columns hold words, the others numbers.
        rows: cells of each row, as many as the header has.
        num_texts: number of columns of words, which are aligned left.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_texts: int = 1

    def markdown(self) -> str:
        """Return the table as Markdown with aligned columns.

        >>> print(Table(["method", "rounds"], [["FedAvg", "60"]]).markdown())
        | method | rounds |
        |:-------|-------:|
        | FedAvg |     60 |
        """
        rows = self._cells()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        sides = ["<" if position < self.num_texts else ">" for position in range(len(widths))]
        columns = list(zip(sides, widths, strict=True))
        head, *body = (
            " | ".join(f"{cell:{side}{width}}" for cell, (side, width) in zip(row, columns, strict=True))
            for row in rows
        )
        rule = "|".join(":" + "-" * (w + 1) if side == "<" else "-" * (w + 1) + ":" for side, w in columns)
        return "\n".join([f"| {head} |", f"|{rule}|", *(f"| {line} |" for line in body)])

    def _cells(self) -> list[list[str]]:
        """Return the texts of all cells in Markdown, the header's first."""
        return [[plain(cell).replace("|", "\\|") for cell in row] for row in (self.header, *self.rows)]

    def fitting(self, width: int) -> list[Table]:
        """Return the table in parts, at most `width` characters wide in Markdown; each begins with the first column.

        A part has at least one more column, however wide that is.

        >>> table = Table(["method", "rounds", "uplink (MB)"], [["FedAvg", "60", "148"]])
        >>> [list(part.header) for part in table.fitting(24)], len(table.fitting(80))
        ([['method', 'rounds'], ['method', 'uplink (MB)']], 1)
        """
        widths = [3 + max(map(len, column)) for column in zip(*self._cells(), strict=True)]
        parts: list[list[int]] = []
        for place in range(1, len(widths)):
            if not parts or 1 + widths[0] + sum(widths[other] for other in [*parts[-1], place]) > width:
                parts.append([])
            parts[-1].append(place)
        return [self._with_columns([0, *places]) for places in parts] or [self]

    def _with_columns(self, places: Sequence[int]) -> Table:
        rows = [[row[place] for place in places] for row in self.rows]
        num_texts = sum(place < self.num_texts for place in places)
        return Table([self.header[place] for place in places], rows, num_texts)


@dataclass(frozen=True)
class Picture:
    """Figure with a caption.

    Attributes:
        name: name of its files, without suffix.
        caption: description of the figure.
        figure: figure of matplotlib.
        look: look that it was drawn with, which has the formats of its files.

    Raises:
        UserError: the size that the user has chosen is too small to read it.
    """

    name: str
    caption: str
    figure: Figure
    look: Look = Look()  # noqa: RUF009

    def __post_init__(self) -> None:
        from lightning_fl.report.layout import lay_out

        lay_out(self.figure, self.look, self.name)

    @property
    def files(self) -> list[str]:
        """Names of its files."""
        return [f"{self.name}.{kind}" for kind in self.look.formats]

    def save(self, folder: Path) -> None:
        """Write a file in each format."""
        for name in self.files:
            self._draw(folder / name, Path(name).suffix[1:])

    def _draw(self, to: Path | BytesIO, kind: str) -> None:
        from matplotlib import rc_context

        # Without dates and with a fixed salt, the same runs give the same file.
        undated: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
        style = {**self.look.style, "svg.hashsalt": self.name}
        with rc_context(style):  # the type of text and the fonts of formulas are read here
            self.figure.savefig(to, format=kind, dpi="figure", metadata=undated.get(kind))

    def markdown(self) -> str:
        """Return a Markdown reference to the first file that a page can show, or a link to a PDF; "" without a file."""
        if not self.look.formats:
            return ""
        shown = next((kind for kind in self.look.formats if kind != "pdf"), None)
        caption = plain(self.caption)
        return f"![{caption}]({self.name}.{shown})" if shown else f"[{caption}]({self.name}.pdf)"

    def embedded(self) -> str:
        """Return the picture as SVG in base64, for a page that embeds it."""
        drawn = BytesIO()
        self._draw(drawn, "svg")
        return base64.b64encode(drawn.getvalue()).decode()


@dataclass(frozen=True)
class Commands:
    """Commands for a shell, and comments on them.

    Attributes:
        lines: a command or a comment each.
    """

    lines: Sequence[str]

    @property
    def text(self) -> str:
        """Lines, without line ends inside them."""
        return "\n".join(map(on_one_line, self.lines))

    def markdown(self) -> str:
        """Return a block of code, whose fence is longer than any in it."""
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", self.text)), default=0))
        return f"{fence}bash\n{self.text}\n{fence}"


Part = str | Sequence[str] | Table | Picture | Commands
"""Paragraph, list, table, picture or commands."""


Sections = Mapping[str, Sequence[Part]]
"""Content under each heading."""


def to_markdown(title: str, sections: Sections) -> str:
    """Return the report as Markdown."""
    blocks = [f"# {plain(title)}"]
    for heading, parts in sections.items():
        if written := [*filter(None, map(_markdown, parts))]:
            blocks += [f"## {plain(heading)}", *written]
    return "\n\n".join(blocks) + "\n"


def _markdown(part: Part) -> str:
    if isinstance(part, (Table, Picture, Commands)):
        return part.markdown()
    return plain(part) if isinstance(part, str) else "\n".join(f"- {plain(line)}" for line in part)


def plain(text: str) -> str:
    r"""Return a text for Markdown on one line, in which only the parts between single backticks are markup.

    >>> print(plain("`<b>` <b>bold</b>\n[here](x) 1 < 2"))
    `<b>` \<b>bold\</b> [here\](x) 1 < 2
    """
    text = on_one_line(text)
    parts = re.split(r"((?<!`)`(?!`)[^`]+(?<!`)`(?!`))", text)  # every second one is code
    for position in range(0, len(parts), 2):
        escaped = re.sub(
            r"\\(?=[\\<\]`|]|$)", r"\\\\", parts[position]
        )  # else it would undo the backslashes that follow
        parts[position] = re.sub(r"<(?=[A-Za-z/!?])|\](?=\()|`", r"\\\g<0>", escaped)
    return "".join(parts)


def on_one_line(text: str) -> str:
    """Return a text with blanks in place of line ends and other characters that are not printed."""
    return "".join(each if each.isprintable() or each == "\u00a0" else " " for each in text)


def to_html(title: str, sections: Sections) -> str:
    """Return the report as one HTML page with its pictures and style embedded."""
    return rendered("page.html", title=title, sections=sections)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let one report at a time write to a folder, because two studies in it may end together. Windows has no such lock."""
    with ExitStack() as stack:
        with suppress(OSError):  # a file system without locks, or Windows, which opens no folder
            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            lock_descriptor(descriptor)
        yield


def remove_earlier(folder: Path) -> None:
    """Remove the files of the previous report, except those that were changed since."""
    with suppress(
        OSError, ValueError, AttributeError, RecursionError
    ):  # no earlier report, or a record that was edited
        record = folder / WRITTEN
        for name, digest in (json.loads(record.read_text()) if is_own_file(record) else {}).items():
            path = folder / Path(name).name
            if is_own_file(path) and _digest(path) == digest:
                path.unlink()


def set_others_aside(folder: Path, names: Iterable[str]) -> Path | None:
    """Move other files with the names of the report's files to the folder `earlier-1` (2, 3 …) in the report's folder.

    Args:
        folder: folder of the report, without the files of the previous one.
        names: names of the files that are to be written.

    Returns:
        The folder to which something was moved; None if nothing was.
    """
    present = [folder / name for name in names if os.path.lexists(folder / name)]
    record = folder / WRITTEN
    if os.path.lexists(record) and not is_own_file(record):
        present.append(record)
    if not present:
        return None
    aside = next(path for number in count(1) if not os.path.lexists(path := folder / f"earlier-{number}"))
    aside.mkdir()
    for path in present:
        os.replace(path, aside / path.name)
    return aside


def note_written(folder: Path, names: Iterable[str]) -> None:
    """Record the names and digests of the files that this report has written."""
    (folder / WRITTEN).write_text(json.dumps({name: _digest(folder / name) for name in names}, indent=1) + "\n")


def _digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()

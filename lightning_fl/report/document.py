"""Report of paragraphs, tables and pictures, written as Markdown or as one self-contained HTML page."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
        rows = [[cell.replace("|", "\\|") for cell in row] for row in (self.header, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        positions = [(width, position < self.num_texts) for position, width in enumerate(widths)]
        lines = [
            "| "
            + " | ".join(c.ljust(w) if text else c.rjust(w) for c, (w, text) in zip(row, positions, strict=True))
            + " |"
            for row in rows
        ]
        rule = "|" + "|".join(f":{'-' * (w + 1)}" if text else f"{'-' * (w + 1)}:" for w, text in positions) + "|"
        return "\n".join([lines[0], rule, *lines[1:]])

    def html(self) -> str:
        """Return the table as HTML."""
        sides = ["", " class=number"]
        head = "".join(f"<th{sides[i >= self.num_texts]}>{escape(cell)}</th>" for i, cell in enumerate(self.header))
        body = "".join(
            "<tr>" + "".join(f"<td{sides[i >= self.num_texts]}>{escape(c)}</td>" for i, c in enumerate(row)) + "</tr>"
            for row in self.rows
        )
        return f"<div class=table><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


@dataclass(frozen=True)
class Picture:
    """Figure with a caption.

    Attributes:
        name: name of its files, without suffix.
        caption: description of the figure.
        figure: figure of matplotlib.
    """

    name: str
    caption: str
    figure: Figure

    def save(self, folder: Path) -> list[str]:
        """Write a PNG and an SVG, and return their names."""
        self.figure.savefig(folder / f"{self.name}.png")
        self.figure.savefig(folder / f"{self.name}.svg", metadata={"Date": None})
        return [f"{self.name}.png", f"{self.name}.svg"]

    def markdown(self) -> str:
        """Return a Markdown reference to the PNG."""
        return f"![{self.caption}]({self.name}.png)"

    def html(self) -> str:
        """Return HTML with the picture embedded."""
        drawn = BytesIO()
        self.figure.savefig(drawn, format="svg", metadata={"Date": None})
        source = base64.b64encode(drawn.getvalue()).decode()
        caption = escape(self.caption)
        return (
            f'<figure><img alt="{caption}" src="data:image/svg+xml;base64,{source}">'
            f"<figcaption>{caption}</figcaption></figure>"
        )


@dataclass(frozen=True)
class Section:
    """Heading with its content: paragraphs, lists (of strings), tables and pictures."""

    title: str
    parts: Sequence[str | Sequence[str] | Table | Picture]


def to_markdown(title: str, sections: Sequence[Section]) -> str:
    """Return the report as Markdown."""
    blocks = [f"# {title}"]
    for section in sections:
        blocks.append(f"## {section.title}")
        for part in section.parts:
            if isinstance(part, (Table, Picture)):
                blocks.append(part.markdown())
            else:
                blocks.append(part if isinstance(part, str) else "\n".join(f"- {line}" for line in part))
    return "\n\n".join(blocks) + "\n"


STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff }
body { max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.2rem }
.table { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem }
th, td { padding: .3rem .7rem; text-align: left; border-bottom: 1px solid #ddd }
th { border-bottom: 2px solid #888; vertical-align: bottom }
.number { text-align: right; white-space: nowrap } th.number { white-space: normal }
figure { margin: 1.5rem 0 } img { max-width: 100%; height: auto } figcaption { color: #555; font-size: .9rem }
"""


def to_html(title: str, sections: Sequence[Section]) -> str:
    """Return the report as one HTML page with its pictures and style embedded."""
    body = [f"<h1>{escape(title)}</h1>"]
    for section in sections:
        body.append(f"<h2>{escape(section.title)}</h2>")
        for part in section.parts:
            if isinstance(part, (Table, Picture)):
                body.append(part.html())
            elif isinstance(part, str):
                body.append(f"<p>{_code(part)}</p>")
            else:
                body.append("<ul>" + "".join(f"<li>{_code(line)}</li>" for line in part) + "</ul>")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _code(text: str) -> str:
    """Return a text as HTML, with the parts between backticks as code."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if index % 2 else part for index, part in enumerate(parts))

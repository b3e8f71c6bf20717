"""Changes to the HTML of a page for narrow screens: whole words, hanging indents in code, and rows of wide tables as cards.

`_static/site.css` does the rest.
"""

from __future__ import annotations

import re
from html import unescape

TABLE = re.compile(r'<table class="docutils (.*?)</table>', re.DOTALL)
HEAD = re.compile(r"<th\b[^>]*>(.*?)</th>", re.DOTALL)
ROW = re.compile(r"<tr\b[^>]*>.*?</tr>", re.DOTALL)
CELL = re.compile(r"<td\b([^>]*)>(.*?)</td>", re.DOTALL)
TAG = re.compile(r"<[^>]*>")
CODE = re.compile(r"<code\b.*?</code>", re.DOTALL)
BLOCK = re.compile(r"<pre>.*?</pre>", re.DOTALL)
OTHER_TAG = re.compile(r"<(?!/?span\b)")
"""Tag of a block of code besides those of colours; the pages of sources have some."""
PIECE = re.compile(r"<[^>]*>|\n|[^<\n]+")
FLAG = re.compile(r"(?<![\w-])(?:--[a-z][\w.]{0,34}(?![\w.])|lightning-fl\b)")
NARROW = 40
"""Characters that fit side by side on a phone, in the size of tables there."""
PADDING = 2
"""Characters that the borders of a cell take."""
MOST_LINES = 9
"""Lines of a cell, at its share of the width, from which a row is easier to read as a card."""


def whole_words(html: str) -> str:
    """Give flags and other short code with hyphens a class, as browsers would break it behind them."""
    html = re.sub(r'<span class="pre">(?=[^<]{0,36}</span>)(?=[^<]*-)', '<span class="pre whole">', html)
    return BLOCK.sub(lambda block: FLAG.sub(r'<span class="whole">\g<0></span>', block[0]), html)


def with_hanging_indents(html: str) -> str:
    """Make each line of a block of code an element, with its indentation as a style: the rest of a wrapped line begins there."""
    return BLOCK.sub(lambda block: block[0] if OTHER_TAG.search(block[0][5:-6]) else in_lines(block[0]), html)


def in_lines(block: str) -> str:
    """Return a block of code with an element around each line; tags that reach over lines are closed and opened again.

    >>> in_lines("<pre>  <span>x</span> = 1</pre>")
    '<pre><span class="line" style="--indent: 2ch">  <span>x</span> = 1</span></pre>'
    """
    lines: list[str] = []
    line, opened = "", []
    for piece in PIECE.findall(block.removeprefix("<pre>").removesuffix("</pre>")):
        if piece == "\n":
            lines.append(f"{line}\n{'</span>' * len(opened)}")
            line = "".join(opened)
            continue
        line += piece
        if piece.startswith("</"):
            opened.pop()
        elif piece.startswith("<"):
            opened.append(piece)
    lines += [line] if plain(line) else []
    return f"<pre>{''.join(map(indented, lines))}</pre>"


def indented(line: str) -> str:
    """Return a line of code as an element that knows its indentation."""
    text = unescape(TAG.sub("", line))
    return f'<span class="line" style="--indent: {len(text) - len(text.lstrip(" "))}ch">{line}</span>'


def with_cards(html: str) -> str:
    """Give the cells of tables that are too wide for a phone the name of their column, which stands there in front of each."""
    return TABLE.sub(lambda found: labelled(found[0]) if is_wide(found[0]) else found[0], html)


def is_wide(table: str) -> bool:
    """True if the columns of a table do not fit side by side on a phone, or only with cells of many lines."""
    cells = [HEAD.findall(row) or [cell for _, cell in CELL.findall(row)] for row in ROW.findall(table)]
    rows = [[plain(unbroken(cell)) for cell in row[:1]] + [plain(cell) for cell in row[1:]] for row in cells]
    columns = [[cell for cell in column if cell] for column in zip(*rows, strict=True)] if rows else []
    widest = [max((len(word) for cell in column for word in cell.split()), default=0) for column in columns]
    longest = sum(max(map(len, column), default=0) for column in columns)
    room = NARROW - PADDING * len(columns)
    return sum(widest) > room or (len(columns) > 2 and longest > MOST_LINES * room)


def unbroken(html: str) -> str:
    """Return a cell of the first column, whose code stays on one line, with a character that breaks no line for its blanks."""
    return CODE.sub(lambda code: TAG.sub("", code[0]).strip().replace(" ", "_"), html)


def plain(html: str) -> str:
    """Return the text of a cell."""
    return unescape(TAG.sub("", html.replace("<wbr>", " "))).strip()


def filled(cell: str) -> str:
    """Return the content of a cell; nothing in place of an empty paragraph, so that cards leave the cell out."""
    return cell if plain(cell) or "<img" in cell else ""


def labelled(table: str) -> str:
    """Return a table whose cells have the names of their columns as an attribute."""
    names = [plain(name).replace('"', "&quot;") for name in HEAD.findall(table)]

    def with_names(row: re.Match[str]) -> str:
        columns = iter(names)
        return CELL.sub(lambda cell: f'<td{cell[1]} data-column="{next(columns)}">{filled(cell[2])}</td>', row[0])

    return ROW.sub(with_names, table).replace('class="docutils', 'class="cards docutils', 1)

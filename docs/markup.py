"""Markdown and reStructuredText of the generated pages, and docstrings as either."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent

from citations import cited
from equations import equations, is_equations, scripts

from lightning_fl.cli.catalogue import is_aligned

DOCS = Path(__file__).parent
PAGE = re.compile(r"docs/([\w/\\-]+)\.md")
"""Path of a page in a docstring, with the backslashes of `markdown`."""


def plain(docstring: str) -> str:
    """Return a docstring as reStructuredText in which only backticks have a meaning, and aligned lines stay aligned."""
    blocks = []
    for block in docstring.split("\n\n"):
        if block.lstrip().startswith(">>>"):
            blocks.append(block)
        elif is_aligned(block) and not re.match(r" *[A-Z]\w+:$", block, re.MULTILINE):
            directive, lines = (".. raw:: html", equations(dedent(block))) if is_equations(block) else ("::", block)
            blocks.append(f"{directive}\n\n" + "\n".join(f"    {line}" for line in lines.splitlines()))
        else:
            parts = re.split(r"(`[^`]*`)", block)
            escaped = (re.sub(r"(?<!^)(?<!\n)(?<!    )([*|])", r"\\\1", part) for part in parts[::2])
            blocks.append("".join(part for pair in zip(escaped, [*parts[1::2], ""], strict=True) for part in pair))
    return "\n\n".join(blocks)


def paragraph(text: str) -> str:
    """Return a paragraph of a docstring: equations, whose lines are aligned, in columns, and all else as text with links."""
    return equations(text) if is_aligned(text) else PAGE.sub(linked_page, cited(markdown(text)))


def linked_page(found: re.Match[str]) -> str:
    """Return a link to a page of docs/, under its title."""
    name = found[1].replace("\\", "")
    title = (DOCS / f"{name}.md").read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    return f"[{title}](/{name}.md)"


def markdown(text: str) -> str:
    """Return the text of a docstring as Markdown: what is in backticks, and flags, as code, and all else as it stands."""
    parts = re.split(r"(`[^`]*`|(?<![\w-])--[a-z][\w.]*\w)", text)
    code, escaped = (f"`{part.strip('`')}`" for part in parts[1::2]), map(escaped_words, parts[::2])
    return "".join(part for pair in zip(escaped, [*code, ""], strict=True) for part in pair)


def escaped_words(text: str) -> str:
    """Return words of a docstring in which no character has a meaning in Markdown; subscripts and superscripts become tags."""
    parts = re.split(r"(</?su[bp]>)", scripts(text))
    parts[::2] = (re.sub(r"([\\*_<>\[\]|{}])", r"\\\1", part) for part in parts[::2])
    return "".join(parts)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    one_line = ([" ".join(cell.split("\n")) for cell in line] for line in lines)  # a text of several lines is one cell
    cells = ([re.sub(r"(?<!\\)\|", r"\\|", cell) for cell in line] for line in one_line)  # `int|float` is one cell
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def fenced(text: str, language: str = "text") -> str:
    """Return a text as a code block."""
    return f"```{language}\n{text}\n```"


def rst(directive: str, *options: str) -> str:
    """Return a directive whose docstrings Sphinx reads as reStructuredText."""
    return "\n".join(["```{eval-rst}", directive, *(f"   :{option}" for option in options), "```"])


def toctree(names: Sequence[str]) -> str:
    """Return the navigation to pages."""
    return "\n".join(["```{toctree}", ":hidden:", "", *names, "```"])


def index_page(title: str, text: str, names: Sequence[str]) -> str:
    """Return a page that lists others."""
    return "\n".join([f"# {title}", "", text, "", "```{toctree}", ":maxdepth: 1", "", *names, "```"])

"""Markdown and reStructuredText of the generated pages, and docstrings as either."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lightning_fl.cli.catalogue import is_aligned

CITATIONS = {
    r"arXiv:(\d{4}\.\d{5})": "https://arxiv.org/abs/",
    r"doi:(10\.\d{4}/[\d.]+\d)": "https://doi.org/",
    r"openreview:(\w+)": "https://openreview.net/forum?id=",
}
"""Identifiers of papers, and what stands before them in an address."""


def plain(docstring: str) -> str:
    """Return a docstring as reStructuredText in which only backticks have a meaning, and aligned lines stay aligned."""
    blocks = []
    for block in docstring.split("\n\n"):
        if block.lstrip().startswith(">>>"):
            blocks.append(block)
        elif is_aligned(block) and not re.match(r" *[A-Z]\w+:$", block, re.MULTILINE):
            blocks.append("::\n\n" + "\n".join(f"    {line}" for line in block.splitlines()))
        else:
            parts = re.split(r"(`[^`]*`)", block)
            escaped = (re.sub(r"(?<!^)(?<!\n)(?<!    )([*|])", r"\\\1", part) for part in parts[::2])
            blocks.append("".join(part for pair in zip(escaped, [*parts[1::2], ""], strict=True) for part in pair))
    return "\n\n".join(blocks)


def paragraph(text: str) -> str:
    """Return a paragraph of a docstring: equations, whose lines are aligned, as they are, and all else as text."""
    return fenced(text) if is_aligned(text) else cited(markdown(text))


def markdown(text: str) -> str:
    """Return the text of a docstring as Markdown: what is in backticks, and flags, as code, and all else as it stands."""
    parts = re.split(r"(`[^`]*`|(?<![\w-])--[a-z][\w.]*\w)", text)
    code, escaped = (
        (f"`{part.strip('`')}`" for part in parts[1::2]),
        (re.sub(r"([\\*_<>\[\]|{}])", r"\\\1", part) for part in parts[::2]),
    )
    return "".join(part for pair in zip(escaped, [*code, ""], strict=True) for part in pair)


def cited(text: str) -> str:
    """Return a text with links on the identifiers of papers."""
    for pattern, address in CITATIONS.items():
        text = re.sub(pattern, rf"[\g<0>]({address}\1)", text)
    return text


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    cells = ([re.sub(r"(?<!\\)\|", r"\\|", cell) for cell in line] for line in lines)  # `int|float` is one cell
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

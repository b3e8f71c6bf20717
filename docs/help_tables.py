"""Help of commands as Markdown: usage as code, arguments in tables, which fit a phone, where lines of 80 columns do not."""

from __future__ import annotations

import re

from markup import fenced, markdown, paragraph, table

ENTRY = re.compile(r" {2,4}(\S.*?)(?: {2,}(\S.*))?")
"""An argument, and the begin of its text, if that stands on the same line."""
CHOICES = re.compile(r" \{([^}]{30,})\}")
TEXT_COLUMN = 10
"""Spaces from which a line goes on with the text of an argument."""


def help_blocks(text: str) -> list[str]:
    """Return what argparse prints as help: its usage, and below each heading a table of arguments."""
    blocks = []
    for block in text.strip("\n").split("\n\n"):
        head, _, rest = block.partition("\n")
        if head.startswith("usage:"):
            blocks.append(fenced(block))
        elif head.endswith(":") and rest:
            blocks += [f"**{head[:-1].capitalize()}**", table(["argument", "meaning"], arguments(rest))]
        else:
            blocks.append(paragraph(" ".join(block.split())))
    return blocks


def arguments(text: str) -> list[list[str]]:
    r"""Return the arguments below a heading, each with its text.

    >>> arguments("  -h, --help  Show this\n              message.\n  --a_long_flag FILE\n              Read it.")
    [['`-h, --help`', 'Show this message.'], ['`--a_long_flag FILE`', 'Read it.']]
    """
    found: list[list[str]] = []
    for line in text.splitlines():
        entry = ENTRY.fullmatch(line)
        if found and (entry is None or line.startswith(" " * TEXT_COLUMN)):
            found[-1][1] += f" {line.strip()}"
        elif entry is not None:
            found.append([entry[1], entry[2] or ""])
    return [row(name, about.strip()) for name, about in found]


def row(name: str, about: str) -> list[str]:
    """Return the row of an argument; a long list of its choices stands behind the text."""
    choices = CHOICES.search(name)
    if choices is None:
        return [f"`{name}`", markdown(about)]
    return [f"`{name.replace(choices[0], '')}`", f"{markdown(about)} Choices: `{choices[1].replace(',', '`, `')}`."]

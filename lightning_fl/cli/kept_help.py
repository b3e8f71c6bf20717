"""Help of `fit`, `validate`, `test` and `predict`, read from `flags.jsonl`: building their parser imports torch and Lightning,
which takes seconds.

`python docs/kept_texts.py` writes the file, and a test compares the printed help with the parser's own. The help also
names classes of torch and Lightning. The file has the classes that these packages had when it was written; if the installed
packages have others, the parser prints its own help. Changes of their functions and modules do not matter.
"""

from __future__ import annotations

import ast
import json
import re
from argparse import Action, HelpFormatter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("flags.jsonl")
OTHERS = ("torch.optim", "torch.optim.lr_scheduler", "lightning.pytorch.callbacks", "lightning.pytorch.loggers")
"""Modules of other packages whose classes the help names."""
NAMES = re.compile(r"^__all__ = (\[[^\]]*\])", re.MULTILINE)


@dataclass(frozen=True)
class Section:
    """Flags of some commands below a heading, with their texts as the help shows them."""

    heading: str
    flags: Sequence[tuple[str, str]]
    commands: Sequence[str]


class KeptFormatter(HelpFormatter):
    """Formatter that prints finished flags and texts."""

    def _format_action_invocation(self, action: Action) -> str:
        return str(action.metavar)

    def _expand_help(self, action: Action) -> str:
        return action.help or ""


@cache
def _kept() -> Any:
    """Return the classes of other packages, the texts around the flags of each command, and the sections."""
    classes, around, *sections = map(json.loads, FILE.read_text(encoding="utf-8").splitlines())
    return classes, around, [Section(**section) for section in sections]


def sections_of(command: str) -> list[Section]:
    """Return the sections of a command's help."""
    return [section for section in _kept()[2] if command in section.commands]


def help_of(command: str) -> str | None:
    """Return the text of `lightning-fl COMMAND --help`; None if none is kept, or the installed packages have other classes."""
    classes, around, _ = _kept()
    if command not in around or classes != {module: classes_of(module) for module in OTHERS}:
        return None
    formatter = KeptFormatter("")
    formatter.add_usage(around[command]["usage"], [], [])
    formatter.add_text(around[command]["description"])
    for section in sections_of(command):
        formatter.start_section(section.heading)
        formatter.add_arguments([Action([], "", metavar=flag, help=text) for flag, text in section.flags])
        formatter.end_section()
    formatter.add_text(around[command]["epilog"])
    return formatter.format_help()


def classes_of(module: str) -> list[str] | None:
    """Return the public classes of an installed module without importing it; None if its file does not list its names.

    Names with a capital letter are taken for classes.

    >>> found = classes_of("torch.optim")
    >>> "SGD" in found, "lr_scheduler" in found
    (True, False)
    """
    package, *inner = module.split(".")
    spec = find_spec(package)
    places = [Path(place).joinpath(*inner) for place in (spec.submodule_search_locations or [] if spec else [])]
    files = [file for place in places for file in (place / "__init__.py", place.with_suffix(".py")) if file.is_file()]
    listed = NAMES.search(files[0].read_text(encoding="utf-8")) if files else None
    return sorted(name for name in ast.literal_eval(listed[1]) if name[:1].isupper()) if listed else None

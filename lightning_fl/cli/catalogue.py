"""Names that a configuration may use, with one line each, and their parameters: what `lightning-fl list` prints.

They are read from `catalogue.jsonl`, one line for each name, because importing the classes takes seconds. A test compares it with
the classes; `python tests/cli/test_texts.py` writes it.
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from lightning_fl.cli import shipped_configs
from lightning_fl.cli.type_descriptions import shown
from lightning_fl.errors import UserError, require

FILE = Path(__file__).with_name("catalogue.jsonl")
FLAGS = {
    "algorithms": "--algorithm",
    "models": "--model",
    "networks": "--model.network",
    "data": "--data",
    "partitions": "--data.partition",
    "callbacks": "--trainer.callbacks",
    "trainer": "--trainer",
}
"""Flag for the names of each section."""
CONFIGS = "configs"
MORE = "`lightning-fl list NAME` shows the parameters of one of them, `lightning-fl list configs` the configurations."
UNLIMITED = 10**6
"""Width of an output that is no terminal."""
HELP = (
    "usage: lightning-fl list [NAME]\n\n"
    "List every algorithm, network, data set, partition and callback, with one line\n"
    "each. With a NAME such as FedDU: its parameters; such as algorithms or data: the\n"
    "names of one kind; configs: the configurations that come with the package;\n"
    "trainer: the trainer's flags."
)


@dataclass(frozen=True)
class Entry:
    """A name, its first line, and its parameters: a mapping with `about` and, unless it is required, `default`.

    `uses_server` is True of a method that trains or prunes by samples of the server. `misfits` are the methods and data that a
    network does not fit, each with the reason.
    """

    section: str
    name: str
    about: str
    parameters: dict[str, dict[str, Any]]
    uses_server: bool = False
    misfits: dict[str, str] = field(default_factory=dict)

    @property
    def flag(self) -> str:
        """Flag that takes the name."""
        return FLAGS[self.section]


def entries() -> list[Entry]:
    """Return all names, section by section."""
    return [Entry(**json.loads(line)) for line in FILE.read_text(encoding="utf-8").splitlines()]


def entry(section: str, name: str) -> Entry:
    """Return the entry of a name.

    Raises:
        UserError: the section has no such name.
    """
    known = {one.name: one for one in entries() if one.section == section}
    require(
        name in known,
        f"{FLAGS[section]} {name!r} is unknown; {_nearest(name, known)}lightning-fl list {section} names all.",
    )
    return known[name]


def listing(words: Sequence[str]) -> str:
    """Return the text of `lightning-fl list` with the words after it.

    Raises:
        UserError: there is more than one word, or nothing has this name.
    """
    require(len(words) <= 1, f"lightning-fl list takes one name at most, got {' '.join(words)}.")
    known = entries()
    sections = [section for section in FLAGS if section != "trainer"]
    if not words:
        return "\n\n".join([*(_section(section, known) for section in sections), "\n".join(_wrapped("", MORE))])
    word = words[0]
    if word in sections:
        return _section(word, known)
    if word == CONFIGS:
        return _table(CONFIGS, {name: _first_line(name) for name in shipped_configs.names()})
    found = next((one for one in known if word in (one.name, one.section)), None)
    if found is None:
        names = [*(one.name for one in known), *FLAGS, CONFIGS]
        raise UserError(
            f"lightning-fl list {word!r}: there is no such name; {_nearest(word, names)}lightning-fl list names all."
        )
    parameters = {f"{found.flag}.{name}": _explained(parameter) for name, parameter in found.parameters.items()}
    title = f"{found.flag} {found.name}:" if found.section != "trainer" else f"{found.flag}:"
    return "\n\n".join(
        ["\n".join(_wrapped(title, found.about)), *([_table("parameters", parameters)] if parameters else [])]
    )


def _explained(parameter: dict[str, Any]) -> str:
    if "default" not in parameter:
        return f"{parameter['about']} (required)"
    default = parameter["default"]
    return parameter["about"] if default is None else f"{parameter['about']} (default: {shown(default)})"


def _first_line(name: str) -> str:
    """Return the first sentence of the comment at the head of a configuration, or else its method."""
    text = (shipped_configs.folder() / f"{name}{shipped_configs.SUFFIX}").read_text(encoding="utf-8")
    if text.startswith("# "):
        return text.partition("\n")[0].removeprefix("# ").partition(". ")[0].rstrip(".:")
    method = yaml.safe_load(text)["algorithm"]
    return str(method if isinstance(method, str) else method["class_path"])


def _section(section: str, known: Sequence[Entry]) -> str:
    return _table(section, {one.name: one.about for one in known if one.section == section})


def _table(title: str, lines: dict[str, str]) -> str:
    width = max(map(len, lines))
    return "\n".join([title, *(line for name, text in lines.items() for line in _wrapped(f"  {name:<{width}} ", text))])


def _wrapped(start: str, text: str) -> list[str]:
    """Return a text after its start, wrapped to the width of a terminal; one line if it goes elsewhere."""
    width = shutil.get_terminal_size().columns if is_terminal() else UNLIMITED
    start = f"{start} " if start else ""
    indent = " " * len(start) if len(start) < width // 2 else "      "
    wrapped = textwrap.wrap(text, width, initial_indent=start, subsequent_indent=indent, break_on_hyphens=False)
    return wrapped or [start.rstrip()]


def is_terminal() -> bool:
    """True if the output goes to a terminal."""
    return sys.stdout.isatty()


def _nearest(given: str, names: Sequence[str] | dict[str, Any]) -> str:
    lower = {name.lower(): name for name in names}
    close = get_close_matches(given.lower(), lower, n=1)
    return f"did you mean {lower[close[0]]!r}? " if close else ""

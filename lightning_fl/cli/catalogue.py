"""Names that a configuration may use, with one line each, their parameters, and the parts of methods.

`lightning-fl list` and the site's reference show them. They are read from `lightning_fl/catalogue.jsonl`, one line for each name,
because importing the classes takes seconds. Reports also read default values there. `python docs/kept_texts.py` writes the file,
and a test compares it with the classes. A method's paper and equations are read from its module.
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from typing import Any

from lightning_fl.checks.other_names import name_here
from lightning_fl.cli import shipped_configs
from lightning_fl.cli.problems import PROBLEMS
from lightning_fl.cli.type_descriptions import shown
from lightning_fl.errors import UserError, require
from lightning_fl.outputs import terminal

FILE = Path(__file__).parents[1] / "catalogue.jsonl"
FLAGS = {
    "algorithms": "--algorithm",
    "models": "--model",
    "networks": "--model.network",
    "data": "--data",
    "partitions": "--data.partition",
    "shifts": "--data.shift",
    "attacks": "--trainer.adversary.attack",
    "callbacks": "--trainer.callbacks",
    "privacy": "--trainer.privacy",
    "selections": "--trainer.selection",
    "rules": "--algorithm.rule",
    "codecs": "--algorithm.uplink",
    "exchanges": "--algorithm.exchange",
    "aggregators": "--algorithm.aggregator",
    "steps": "--algorithm.steps",
    "personal": "--algorithm.personal",
    "trainer": "--trainer",
}
"""Flag for the names of each section."""
CONFIGS = "configs"
MORE = "`lightning-fl list NAME` shows the parameters of one of them, `lightning-fl list configs` the configurations."
SUM_ONLY = (
    "sum-only: the server needs only sums over the clients of a round, as with trainer.secure_aggregation; the page of a method "
    "names the parts that need more."
)
INDENT = 13
"""Indentation of the rest of an equation that is wider than the terminal, in columns."""
HELP = (
    "List all methods by problem, and all networks, data sets, partitions, attacks, callbacks and parts of methods, with one "
    "line each; or one of them in detail."
)
NAMES = {
    "Digits, TopK …": "a class: its parameters",
    "FedDU …": "a method: its parameters, paper, equations, parts and configurations",
    "algorithms, codecs …": "all names of one kind",
    CONFIGS: "the configurations that come with the package",
    "trainer": "the flags of the trainer",
}
OPTIONS = {
    "--source": "print the code of a method and of its parts, in the order of a round",
    "--json": "print the names with all parameters as one JSON document (docs/how-to/json.md)",
}


@dataclass(frozen=True)
class Entry:
    """A name, its first line, its module, and its parameters: a mapping with `about`, `type` and, unless required, `default`.

    `uses_server` is True for a method that trains or prunes with samples of the server. `sum_only` tells whether sums over the
    clients of a round suffice for a method: yes or no, and the reason. `incompatible` has the methods and data that a network
    does not fit, with the reasons. `slots` has the import paths of a method's parts with default parameters, outer parts before
    inner ones.
    """

    section: str
    name: str
    about: str
    module: str
    parameters: dict[str, dict[str, Any]]
    uses_server: bool = False
    sum_only: str = ""
    incompatible: dict[str, str] = field(default_factory=dict)
    slots: dict[str, list[str]] = field(default_factory=dict)

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
    entries_by_name = {one.name: one for one in entries() if one.section == section}
    require(
        name in entries_by_name,
        f"{FLAGS[section]} {name!r} is unknown; {_nearest(name, entries_by_name)}lightning-fl list {section} shows all names.",
    )
    return entries_by_name[name]


def source_of(module: str) -> Path:
    """Return the file of one of this package's modules, without importing it."""
    _, *inner = module.split(".")
    root = shipped_configs.PACKAGE if (shipped_configs.PACKAGE / inner[0]).exists() else shipped_configs.PACKAGE.parent
    return root.joinpath(*inner).with_suffix(".py")


def shown_source(module: str) -> str:
    """Return the path of a module's file, relative to the repository or the installed package."""
    return source_of(module).relative_to(shipped_configs.PACKAGE.parent).as_posix()


def description_of(method: Entry) -> list[str]:
    """Return the paragraphs that describe a method in its module: first the paper, then equations and remarks."""
    text = ast.get_docstring(ast.parse(source_of(method.module).read_text(encoding="utf-8"))) or ""
    return text.split("\n\n")


def configurations_of(method: Entry) -> list[str]:
    """Return the names of the shipped configurations that use a method."""
    return [name for name in shipped_configs.names() if shipped_configs.method_of(name) == method.name]


def help_text() -> str:
    """Return the text of `lightning-fl list --help`."""
    head = "\n".join(["usage: lightning-fl list [NAME] [--source | --json]", "", *_wrapped("", HELP)])
    return "\n\n".join([head, _table("names:", NAMES), _table("options:", OPTIONS)])


def content(words: Sequence[str]) -> dict[str, Any]:
    """Return the content of `lightning-fl list` with these words after it, with all parameters.

    Raises:
        UserError: there is more than one word, or nothing has this name.
    """
    listing(words)  # refuses an unknown name
    word = words[0] if words else None
    chosen = [one for one in entries() if word in (None, one.section, one.name)]
    problems = {name: problem.title for problem in PROBLEMS for name in problem.methods}
    names = [{**asdict(one), "flag": one.flag, "problem": problems.get(one.name)} for one in chosen]
    if word not in (None, CONFIGS):
        return {"names": names}
    configurations = [{"name": name, "about": _first_line(name)} for name in shipped_configs.names()]
    return {"names": names, "configurations": configurations}


def listing(words: Sequence[str]) -> str:
    """Return the text of `lightning-fl list` with these words after it.

    Raises:
        UserError: there is more than one word, or nothing has this name.
    """
    require(len(words) <= 1, f"lightning-fl list takes one name at most, got {' '.join(words)}.")
    every_entry = entries()
    sections = [section for section in FLAGS if section != "trainer"]
    if not words:
        return "\n\n".join([*(_section(section, every_entry) for section in sections), "\n".join(_wrapped("", MORE))])
    word = words[0]
    if word in sections:
        return _section(word, every_entry)
    if word == CONFIGS:
        return _table(CONFIGS, {name: _first_line(name) for name in shipped_configs.names()})
    entry_asked = next((one for one in every_entry if word in (one.name, one.section)), None)
    if entry_asked is None:
        names = [*(one.name for one in every_entry), *FLAGS, CONFIGS]
        raise UserError(
            f"lightning-fl list {word!r}: there is no such name; {_nearest(word, names)}lightning-fl list shows all names."
        )
    parameters = {
        f"{entry_asked.flag}.{name}": _explained(parameter) for name, parameter in entry_asked.parameters.items()
    }
    title = f"{entry_asked.flag} {entry_asked.name}:" if entry_asked.section != "trainer" else f"{entry_asked.flag}:"
    blocks = ["\n".join(_wrapped(title, entry_asked.about))]
    if entry_asked.slots:
        files = {slot: ", ".join(map(_located, paths)) for slot, paths in entry_asked.slots.items()}
        blocks += ["\n".join(_paragraph(text)) for text in description_of(entry_asked)]
        blocks.append(_table("parts, with default parameters", files))
        blocks.append("\n".join(_wrapped("sum-only:", entry_asked.sum_only)))
    if parameters:
        blocks.append(_table("parameters", parameters))
    if entry_asked.slots and (configurations := configurations_of(entry_asked)):
        blocks.append("\n".join(["configurations", *(f"  {name}" for name in configurations)]))
    return "\n\n".join(blocks)


def _located(path: str) -> str:
    """Return a class and its file, such as `TopK (lightning_fl/codecs/top_k.py)`."""
    module, _, name = path.rpartition(".")
    return f"{name} ({shown_source(module)})"


def _explained(parameter: dict[str, Any]) -> str:
    if "default" not in parameter:
        return f"{parameter['about']} ({parameter['type']}, required)"
    default = "" if parameter["default"] is None else f", default: {shown(parameter['default'])}"
    return f"{parameter['about']} ({parameter['type']}{default})"


def _first_line(name: str) -> str:
    """Return the method of a configuration, if it names one, and the first sentence of the comment at its head."""
    text = (shipped_configs.folder() / f"{name}{shipped_configs.SUFFIX}").read_text(encoding="utf-8")
    lines = takewhile(lambda line: line.startswith("#"), text.splitlines())
    sentence = re.split(r"\.(?: |$)", " ".join(line.removeprefix("#").strip() for line in lines))[0].rstrip(":")
    method = shipped_configs.method_of(name) if "methods/" in name else ""
    return ": ".join(filter(None, [method, sentence]))


def _section(section: str, all_entries: Sequence[Entry]) -> str:
    """Return the names of a section, methods by the problem that they are for."""
    about = {one.name: one.about for one in all_entries if one.section == section}
    if section != "algorithms":
        return _table(section, about)
    marks = {one.name: one.sum_only.partition(",")[0] for one in all_entries if one.section == section}
    rows = ({name: (marks[name], about[name]) for name in problem.methods} for problem in PROBLEMS)
    tables = [
        _marked_table(f"{section}: {problem.title}", found)
        for problem, found in zip(PROBLEMS, rows, strict=True)
        if found
    ]
    return "\n\n".join([*tables, "\n".join(_wrapped("", SUM_ONLY))])


def _marked_table(title: str, rows: dict[str, tuple[str, str]]) -> str:
    """Return a table of methods by name: whether sums suffice, and the first line."""
    rows = {"method": ("sum-only", "idea"), **rows}
    widths = max(map(len, rows)), max(len(mark) for mark, _ in rows.values())
    return _table(title, {f"{name:<{widths[0]}}  {mark:<{widths[1]}}": text for name, (mark, text) in rows.items()})


def is_aligned(text: str) -> bool:
    """True if lines of a paragraph are aligned in columns, like equations."""
    return bool(re.search(r"\S {2,}\S", text))


def _paragraph(text: str) -> list[str]:
    """Return the lines of a paragraph of a docstring for the width of the output; equations keep their columns."""
    if not is_aligned(text):
        return _wrapped("", " ".join(text.split()))
    return [part for line in text.splitlines() for part in _folded(line)]


def _folded(line: str) -> list[str]:
    """Return an aligned line; if it is too wide, its last column gets a line of its own, and long columns are wrapped."""
    width, indent = terminal.width(), " " * INDENT
    if len(line) <= width:
        return [line]
    columns = re.fullmatch(r"(.*\S) {2,}(\S.*)", line)
    # A short label has all the rest as its text.
    parts = [line] if columns is None or len(columns[1]) < INDENT else [columns[1], indent + columns[2]]
    return [
        wrapped
        for part in parts
        for wrapped in textwrap.wrap(part, width, subsequent_indent=indent, break_on_hyphens=False)
    ]


def _table(title: str, lines: dict[str, str]) -> str:
    width = max(map(len, lines))
    return "\n".join([title, *(line for name, text in lines.items() for line in _wrapped(f"  {name:<{width}} ", text))])


def _wrapped(start: str, text: str) -> list[str]:
    """Return a text after its start, wrapped to the width of a terminal; one line if it goes elsewhere."""
    width = terminal.width()
    start = f"{start} " if start else ""
    indent = " " * len(start) if len(start) < 0.6 * width else "      "
    wrapped = textwrap.wrap(text, width, initial_indent=start, subsequent_indent=indent, break_on_hyphens=False)
    return wrapped or [start.rstrip()]


def _nearest(word: str, names: Sequence[str] | dict[str, Any]) -> str:
    if here := name_here(word):
        return f"{here}; "
    lower = {name.lower(): name for name in names}
    close = get_close_matches(word.lower(), lower, n=1)
    return f"did you mean {lower[close[0]]!r}? " if close else ""

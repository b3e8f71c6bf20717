"""Sentences of errors and warnings, collected from the code for the page `errors.md`.

A sentence is the text that the code passes to `UserError`, `require` or a warning, with … for each value in it. A quotation
(`> …`) of the page must be in one of them, so that no explanation outlives its error.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from markup import markdown
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
FOLDERS = ("lightning_fl", "modules", "callbacks")
MARKER = "<!-- sentences -->"
PAGE = "errors"
RAISERS = {
    "UserError": 0,
    "MisconfigurationError": 0,
    "MissingFileError": 0,
    "FileError": 0,
    "require": 1,
    "rank_zero_warn": 0,
    "say_lost": 0,
}
"""Functions that take a sentence, and its position among their arguments."""
VALUE = "…"
FEWEST_WORDS = 4
"""Words of the shortest sentence that says something without its values."""
TOPICS = {
    "Command line and configuration files": ("cli", "outputs/yaml_files", "checks"),
    "Flags of the trainer": ("trainer", "plan", "engine", "clients", "processes", "link", "features"),
    "Your module": ("flat_module", "evaluation", "engine/data_for_module", "vectors", "modules"),
    "Data and partitions": ("data",),
    "Methods and their parts": (
        *("algorithms", "rules", "codecs", "coding", "exchanges", "aggregators", "steps", "personal", "slots"),
        "groups",
    ),
    "Attacks and privacy": ("features/attacks", "features/privacy"),
    "Pruning, gates and callbacks": ("callbacks", "pruning", "gates"),
    "Files and checkpoints of a run": ("outputs", "state", "settings"),
    "Studies and reports": ("study", "report"),
}
"""Headings, and the folders or files whose sentences stand below each; the longest that fits counts."""


class Sentence(NamedTuple):
    """Sentence of an error or a warning.

    Attributes:
        text: its words, with … for each value.
        file: path of the file below its package, such as `data/split`.
    """

    text: str
    file: str


def setup(app: Sphinx) -> dict[str, bool]:
    """List the sentences on their page when Sphinx reads it."""
    app.connect("env-get-outdated", lambda app, env, added, changed, removed: [PAGE])
    app.connect("source-read", fill)
    return {"parallel_read_safe": True}


def fill(app: Sphinx, name: str, text: list[str]) -> None:
    """Put the sentences into their page."""
    if name == PAGE:
        text[0] = with_sentences(text[0])


def with_sentences(page: str) -> str:
    """Return the page with all sentences in place of its marker.

    Raises:
        ValueError: a quotation of the page is in no sentence.
    """
    known = [sentence.text for sentence in sentences()]
    for quoted in re.findall(r"^> (.+)$", page, re.MULTILINE):
        if not any(quoted in text for text in known):
            raise ValueError(f"no error or warning says {quoted!r} any more: correct docs/{PAGE}.md.")
    return page.replace(MARKER, listed())


@cache
def sentences() -> list[Sentence]:
    """Return all sentences that have enough words of their own, file by file."""
    collected = [
        sentence for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")) for sentence in of_file(path)
    ]
    return list(dict.fromkeys(one for one in collected if len(re.findall(r"[^\W\d_]{2,}", one.text)) >= FEWEST_WORDS))


def of_file(path: Path) -> Iterator[Sentence]:
    """Yield the sentences of a file in the order of its lines."""
    file = path.relative_to(ROOT).with_suffix("").as_posix().removeprefix("lightning_fl/")
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda call: call.lineno):
        position = RAISERS.get(call.func.id if isinstance(call.func, ast.Name) else "")
        if position is not None and len(call.args) > position:
            yield Sentence(words_of(call.args[position]), file)


def words_of(node: ast.expr) -> str:
    """Return the text of an expression, with … for whatever is not written in it."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return re.sub(rf"{VALUE}+", VALUE, "".join(words_of(part) for part in node.values))
    if isinstance(node, ast.BinOp):
        return words_of(node.left) + words_of(node.right)
    return VALUE


def topic_of(sentence: Sentence) -> str:
    """Return the heading below which a sentence stands."""
    topics = {place: topic for topic, places in TOPICS.items() for place in places}
    fitting = [place for place in topics if sentence.file == place or sentence.file.startswith(f"{place}/")]
    if not fitting:
        raise ValueError(
            f"{sentence.file} has sentences of errors, but no topic: add its room to TOPICS in docs/sentences.py."
        )
    return topics[max(fitting, key=len)]


def listed() -> str:
    """Return all sentences as Markdown, below their topics."""
    blocks = []
    for topic in TOPICS:
        lines = [f"- {markdown(one.text)} {origin_of(one)}" for one in sentences() if topic_of(one) == topic]
        blocks += [f"### {topic}", "\n".join(lines)]
    return "\n\n".join(blocks)


def origin_of(sentence: Sentence) -> str:
    """Return the file of a sentence in small letters, which may break between words."""
    file = re.sub(r"([/_])", r"\1<wbr>", sentence.file)
    return f'<span class="origin">{file}</span>'

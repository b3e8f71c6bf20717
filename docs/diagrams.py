"""Diagrams of the site, drawn from the code as boxes of HTML, which `_static/site.css` lays out.

A line `<!-- diagram: round -->` of a page, or `floors` or `messages` in its place, becomes the diagram; repository hosts show
nothing there.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from html import escape
from importlib import import_module
from inspect import getdoc, getsource
from pathlib import Path
from textwrap import dedent
from types import FunctionType
from typing import NamedTuple

from messages import messages_diagram
from sphinx.application import Sphinx

from lightning_fl.cli import catalogue
from lightning_fl.engine import round as round_module
from lightning_fl.engine.engine import Engine
from lightning_fl.link.link import Link

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MARKER = re.compile(r"^<!-- diagram: (\w+) -->$", re.MULTILINE)
API = "../reference/api"
"""Pages of public names, from a page in a folder of the site's first folder."""


class Box(NamedTuple):
    """Stage of a round.

    Attributes:
        title: name of a slot of `Algorithm`, whose text is the docstring's; or the server's own work.
        code: call shown in the box; one of `train_round` or of a method that it calls, except that of the uplink.
        text: text of the server's own work.
    """

    title: str
    code: str
    text: str = ""


DOWN = [
    Box("cohort", "engine.cohort", "Draw the clients from the seed and the round."),
    Box("downlink", "link.broadcast"),
]
CLIENTS = [
    Box("rule", "ClientJob"),
    Box("personal", "method.personal"),
    Box("exchange", "roles.collect"),
    Box("uplink", f"link.{Link.send_up.__name__}"),
]
UP = [
    Box(
        "collector",
        "collector.take",
        "Reject uploads that are not finite and, with a loss guard, those whose loss explodes.",
    ),
    Box("aggregator", "collector.finish"),
    Box("book", "run.book", "Book bits, seconds and steps, even if the round is undone later."),
    Box("steps", "take_steps"),
    Box("commit", "_commit", "Store the model and all states. The next round begins."),
]
BROADCAST = "<b>Down:</b> model, buffers, and what the steps share", "Bits are counted for each client of the cohort."
UPLOADS = "<b>Up:</b> deltas, buffers, and what the rule adds", "Bits are counted for each upload."
CLASSES = {
    "downlink": "Codec",
    "uplink": "Codec",
    "rule": "Rule",
    "personal": "Personal",
    "exchange": "Exchange",
    "aggregator": "Aggregator",
    "steps": "Step",
}


def setup(app: Sphinx) -> dict[str, bool]:
    """Draw the diagrams of a page when Sphinx reads it."""
    app.connect("source-read", lambda app, page, text: text.__setitem__(0, drawn(text[0])))
    return {"parallel_read_safe": True}


def drawn(text: str) -> str:
    """Return the text of a page with its diagrams."""
    diagrams = {"round": round_diagram, "floors": floors_diagram, "messages": partial(messages_diagram, figure)}
    return MARKER.sub(lambda found: diagrams[found[1]](), text)


def round_diagram() -> str:
    """Return the diagram of a round.

    Raises:
        ValueError: `train_round` does not make the calls of the boxes in this order.
    """
    calls = [box.code for box in (*DOWN, *CLIENTS, *UP) if box.title != "uplink"]
    names = iter(names_in(round_module.train_round, ()))
    if not all(any(name == call or name.endswith(f".{call}") for name in names) for call in calls):
        raise ValueError(f"train_round does not have {', '.join(calls)} in this order: correct docs/diagrams.py.")
    parts = [side("Server", DOWN), wire(*BROADCAST), side("Each client", CLIENTS), wire(*UPLOADS), side("Server", UP)]
    caption = (
        "A round. Blue boxes are the slots of a method, with FedAvg's parts. Grey boxes are the same for every method."
    )
    return figure("round", parts, caption)


def names_in(function: FunctionType, callers: Sequence[str]) -> Iterator[str]:
    """Yield what a function names, such as `link.broadcast`, in the order in which it runs, with what it calls of the engine."""

    def walk(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Name | ast.Attribute):
            yield ast.unparse(node)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            return
        for child in ast.iter_child_nodes(node):
            yield from walk(child)
        if isinstance(node, ast.Call):
            inner = called(ast.unparse(node.func))
            if isinstance(inner, FunctionType) and inner.__name__ not in callers:
                yield from names_in(inner, (*callers, inner.__name__))

    for statement in ast.parse(dedent(getsource(function))).body[0].body:
        yield from walk(statement)


def called(name: str) -> object:
    """Return the function or method of the engine that a call names; that of an unwrapped role begins with an underscore."""
    owner, _, attribute = name.rpartition(".")
    homes = {"": vars(round_module).get(attribute), "roles": vars(Engine).get(f"_{attribute}")}
    return homes.get(owner, vars(Engine).get(attribute) if owner in ("self", "engine") else None)


def side(name: str, boxes: list[Box]) -> str:
    """Return the boxes of the server or of a client."""
    kind = "server" if name == "Server" else "client"
    return f'<div class="side {kind}"><b>{name}</b>{"".join(map(stage, boxes))}</div>'


def stage(box: Box) -> str:
    """Return a box of the round's diagram."""
    code = f"<code>{box.code}</code>"
    if box.title not in CLASSES:
        return f"<div><b>{box.title}</b>{code}<p>{box.text}</p></div>"
    method = catalogue.entry("algorithms", "Algorithm")
    cls, text = CLASSES[box.title], method.parameters[box.title]["about"].partition(";")[0].rstrip(".")
    part = ", ".join(path.rpartition(".")[2] for path in method.slots.get(box.title, ())) or "nothing"
    link = f'<a href="{API}/lightning_fl.slots.html#lightning_fl.slots.{cls}">{box.title}</a>'
    return f'<div class="slot"><b>{link}</b>{code}<p>{escape(text)}. <i>{part}</i></p></div>'


def wire(content: str, counted: str) -> str:
    """Return the arrow between server and clients, with the messages that cross."""
    code = "<code>link/link.py</code>"
    return f'<div class="wire"><span>↓</span><p>{content}<br><i>{counted}</i> {code}</p></div>'


def floors_diagram() -> str:
    """Return the diagram of the floors that the import lint checks, and of the rooms on each, from the docstrings."""
    with (Path(__file__).parents[1] / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    (floors,) = (contract["layers"] for contract in contracts if contract["id"] == "floors")
    parts = [f'<div class="floor">{"".join(map(room, floor.split(" | ")))}</div>' for floor in floors]
    return figure("floors", parts, "The rooms of the package. A room imports only from the floors below its own.")


def room(name: str) -> str:
    """Return the box of a room, with the first sentence of its docstring."""
    found = import_module(f"lightning_fl.{name}")
    text = re.split(r"(?<=\.)\s", getdoc(found) or "")[0]
    return f"<div><b>{name}</b><p>{escape(' '.join(text.split())).replace('`', '')}</p></div>"


def figure(name: str, parts: list[str], caption: str) -> str:
    """Return a diagram as one block of HTML, which has no empty line."""
    lines = [f'<figure class="diagram {name}">', *parts, f"<figcaption>{caption}</figcaption>", "</figure>"]
    return "\n".join(lines)

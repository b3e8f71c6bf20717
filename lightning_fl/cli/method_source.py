"""The code of a method and of its parts in the order of a round, read from their files without importing them."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from lightning_fl.cli.catalogue import Entry, entry, shown_source, source_of
from lightning_fl.errors import require

ROUND = {
    "downlink": "the server sends the model",
    "rule": "each client trains",
    "personal": "and keeps for itself",
    "exchange": "client and server agree on what is sent",
    "uplink": "the clients send it",
    "aggregator": "the server merges it",
    "steps": "and changes the model",
}
"""Slots in the order of a round, with their action."""


def listing(names: Sequence[str]) -> str:
    """Return the text of `lightning-fl list NAME --source`.

    Raises:
        UserError: the names are not the name of one method.
    """
    named = " ".join(names) or "none"
    require(len(names) == 1, f"lightning-fl list --source takes the name of one method, such as FedProx, got {named}.")
    return source(entry("algorithms", names[0]))


def source(method: Entry) -> str:
    """Return the classes of a method and of its default parts, slot by slot."""
    blocks = [_classes(f"{method.module}.{method.name}", f"{method.name}")]
    for slot, happens in ROUND.items():
        blocks += [_classes(path, f"{slot}: {happens}") for path in method.slots.get(slot, ())]
    return "\n\n\n".join(blocks)


def _classes(path: str, title: str) -> str:
    """Return a class, after the classes of its file from which it derives, under a title with the file."""
    module, _, name = path.rpartition(".")
    text = source_of(module).read_text(encoding="utf-8")
    classes = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
    chain = [classes[name]]
    for node in chain:
        chain += [classes[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in classes]
    code = [_lines(text, node) for node in reversed(chain)]
    return "\n\n\n".join([f"# {'-' * 20} {title} ({shown_source(module)})", *code])


def _lines(text: str, node: ast.ClassDef) -> str:
    """Return the lines of a class with its decorators."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])

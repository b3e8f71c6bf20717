"""Numbers of the home page, counted from the code: methods, codecs, attacks and so on.

A line `<!-- inside -->` of a page becomes the numbers; repository hosts show nothing there.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from sphinx.application import Sphinx

from lightning_fl import algorithms, callbacks, codecs
from lightning_fl.algorithms._asynchronous import Asynchronous
from lightning_fl.cli import catalogue

MARKER = re.compile(r"^<!-- inside -->$", re.MULTILINE)
WRAPPERS = {"Dense", "EntropyCoded", "ErrorFeedback", "Differences", "Followed", "Changes"}
"""Codecs that send everything, or wrap another codec; they are not counted."""


class Fact(NamedTuple):
    """One number of the home page.

    Attributes:
        count: how many there are.
        title: their name.
        text: a few examples.
        page: address of the page about them, from the home page.
    """

    count: int
    title: str
    text: str
    page: str


def facts() -> list[Fact]:
    """Return the numbers, counted from the code."""
    sections = [entry.section for entry in catalogue.entries()]
    methods = [name for name in algorithms.__all__ if name != "Algorithm"]
    asynchronous = [name for name in methods if issubclass(getattr(algorithms, name), Asynchronous)]
    return [
        Fact(
            len(methods),
            "methods",
            "FedAvg, SCAFFOLD, FedAdam, personalised, server-side and pruning methods",
            "reference/methods/by-problem.html",
        ),
        Fact(
            len({*codecs.__all__} - WRAPPERS),
            "codecs",
            "top-k, QSGD, EDEN, … with error feedback and entropy coding, for uploads and broadcasts",
            "how-to/codecs.html",
        ),
        Fact(
            sections.count("privacy"),
            "kinds of differential privacy",
            "central (DP-FedAvg, DP-FTRL) and local, with an accountant",
            "how-to/privacy.html",
        ),
        Fact(
            sections.count("attacks"),
            "attacks",
            "label flips, backdoors, ALIE, … and robust aggregators against them",
            "how-to/attacks.html",
        ),
        Fact(
            len(asynchronous),
            "asynchronous methods",
            f"{' and '.join(asynchronous)}, on clients with the speeds of phones, silos or a trace",
            "how-to/devices.html",
        ),
        Fact(
            sections.count("partitions"),
            "partitions",
            "IID, Dirichlet, shards, natural partitions by user, published splits",
            "reference/names.html",
        ),
        Fact(
            len(callbacks.__all__),
            "callbacks",
            "pruning, budgets, targets, energy; most of them for any Lightning project",
            "how-to/callbacks.html",
        ),
    ]


def numbers() -> str:
    """Return the numbers as one block of HTML."""
    items = "".join(
        f'<li><a href="{fact.page}"><b>{fact.count}</b> {fact.title}</a><p>{fact.text}</p></li>' for fact in facts()
    )
    return f'<div class="inside"><ul>{items}</ul></div>'


def setup(app: Sphinx) -> dict[str, bool]:
    """Put the numbers into pages when Sphinx reads them."""
    app.connect("source-read", lambda app, page, text: text.__setitem__(0, MARKER.sub(lambda _: numbers(), text[0])))
    return {"parallel_read_safe": True}

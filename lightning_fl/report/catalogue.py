"""The catalogue of classes for reports, read from a file so that a report need not import the classes."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

TRAINER = "FederatedTrainer"


@cache
def parameters() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the parameters of the trainer and of every class that a configuration may name, by class and name."""
    lines = files("lightning_fl").joinpath("catalogue.jsonl").read_text(encoding="utf-8").splitlines()
    return {entry["name"]: entry["parameters"] for entry in map(json.loads, lines)}


@cache
def incidental_flags() -> tuple[str, ...]:
    """Return the flags of the trainer that decide where and how a run executes, but not its results."""
    flags = parameters()[TRAINER]
    return tuple(f"trainer.{name}" for name, facts in flags.items() if facts.get("decides") == "execution")

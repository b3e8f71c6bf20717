"""Turns the parser's messages, which run over many lines, into one sentence with the nearest match."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from lightning_fl.cli_names import classes_under
from lightning_fl.errors import nearest


def root_sentence(error: BaseException, kinds: tuple[type[BaseException], ...]) -> str | None:
    """The message of the first exception of `kinds` behind `error`, on one line; None if there is none."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, kinds):
            return " ".join(str(seen).split())
        seen = seen.__cause__ or seen.__context__
    return None


def explain(message: str, parser: ArgumentParser) -> str:
    """One sentence for a message of jsonargparse, as `parser` was about to print it."""
    key_match = re.search(r'[Kk]ey "([^"]+)"', message)
    key = key_match[1] if key_match else ""
    given_match = re.search(r"Given value: (.*)", message)
    given = given_match[1] if given_match else ""
    if match := re.search(r"[Uu]nrecognized arguments: (\S+)", message):
        return f"there is no flag {match[1].split('=')[0]}; {_nearest_key(match[1].split('=')[0].lstrip('-'), parser)}."
    if match := re.search(r"Subcommand '(\w+)' does not accept option '([^']+)'", message):
        return f"there is no parameter {match[2]!r}; {_nearest_key(match[2], _subparser(parser, match[1]))}."
    if match := re.search(r"Option '([^']+)' is not accepted", message):
        return f"{_class_of(parser)} has no parameter {match[1]!r}; {_nearest_key(match[1], parser)}."
    if match := re.search(r"arguments are required: (.*)", message):
        return f"{_class_of(parser)} needs {match[1]}."
    if match := re.search(r"Expected a dot import path string: (\S+)", message):
        return f"{key} {match[1]!r} is unknown; {nearest(match[1], classes_under(key))}."
    if match := re.search(r"Problem with given class_path '([^']+)'", message):
        return f"{key} {match[1]!r} is unknown; {_members_of(match[1]) or _nearest_class(match[1], key)}."
    if match := re.search(r"not correspond to a subclass of (\w+)", message):
        return f"{key} {given!r} is no {match[1]}; {_nearest_class(given, key)}."
    if match := re.search(r"NestedArg\(key='([\w.]+)'", given):
        return (
            f"--{key}.{match[1]} comes before the class of {key} is named; give --{key} first, or its class in a file."
        )
    if match := re.search(r"Subtypes: \[(.*?)\]\s", message):
        plain = re.sub(r"typing\.Literal\[(.*?)\]", r"\1", match[1])
        names = [name.strip("<>' ").removeprefix("class '") for name in plain.split(",")]
        return f"{key} must be {' or '.join(names)}, got {given}."
    if match := re.search(r"Expected an? (?:typing\.)?Literal\[(.*?)\]\. Got value: (.*)", message):
        allowed = [name.strip("' ") for name in match[1].split(",")]
        return f"{key} {match[2]!r} is unknown; {nearest(match[2], allowed)}."
    if match := re.search(r"Expected an? (.+?)\. Got value: (.*)", message):
        expected = re.sub(r"<class '([\w.]+)'>", r"\1", match[1]).replace("typing.Literal", "one of ")
        return f"{key} must be {expected}, got {match[2]}."
    if "Problems parsing config" in message:
        return f"{_broken_file()} is no YAML: {_flat(message.partition(':')[2])}."
    return _flat(re.sub(r'Parser key "([^"]+)":', r"\1:", message))


def _flat(message: str) -> str:
    return " ".join(line.strip(" -") for line in message.splitlines() if line.strip())


def _class_of(parser: ArgumentParser) -> str:
    """The class whose parameters an inner parser reads, or the command."""
    return next(iter(getattr(parser, "groups", None) or {}), "") if hasattr(parser, "_inner_parser") else "the command"


def _broken_file() -> str:
    """The first configuration file of the command line that is no YAML."""
    words = [part for word in sys.argv for part in word.split("=", 1)]
    for flag, path in pairwise(words):
        if flag in ("--config", "-c") and Path(path).is_file():
            try:
                yaml.safe_load(Path(path).read_text())
            except yaml.YAMLError:
                return path
    return "the configuration"


def _members_of(path: str) -> str:
    """For an import path of the user's own whose module is there: what it has; "" for any other."""
    place, _, name = path.rpartition(".")
    if not place or place.partition(".")[0] == "lightning_fl" or place not in sys.modules:
        return ""
    found = sys.modules[place]
    members = [n for n, x in vars(found).items() if isinstance(x, type) and x.__module__ == place]
    return f"the module {place!r} has no {name!r}, {nearest(name, members) if members else 'and no class at all'}"


def _nearest_class(given: str, key: str) -> str:
    names = classes_under(key)
    match = get_close_matches(given.rpartition(".")[2], names, n=1)
    return nearest(match[0] if match else given, names)


def _nearest_key(given: str, parser: ArgumentParser) -> str:
    """The nearest of a parser's keys; all of them only where they are few."""
    keys = sorted({a.dest for a in parser._actions} - {"help", "config", "print_config"})
    group, _, leaf = given.rpartition(".")
    siblings = [key for key in keys if key.rpartition(".")[0] == group] if leaf else keys
    few = siblings or [key for key in keys if "." not in key]
    if not keys:
        return "allowed: none"
    if len(few) <= 15:
        return nearest(given, few)
    match = get_close_matches(given, few, n=1)
    return (f"did you mean {match[0]!r}? " if match else "") + "lightning-fl fit --help lists all"


def _subparser(parser: ArgumentParser, command: str) -> ArgumentParser:
    choices: list[Any] = [action.choices for action in parser._actions if isinstance(action.choices, dict)]
    return next((c[command] for c in choices if command in c), parser)

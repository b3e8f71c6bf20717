"""Rewrite the parser's messages, which span many lines, as one sentence with the nearest match.

Only the key and the value are read from a message about a value; the key's type determines what is allowed.
"""

from __future__ import annotations

import re
from argparse import ArgumentParser
from ast import literal_eval
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import Any

from lightning_fl.cli.class_names import CLASS_PACKAGES, COMMANDS, class_misfit, classes_under
from lightning_fl.cli.refused_flags import STOCK_FLAGS
from lightning_fl.cli.type_descriptions import choices_of, in_words, shown
from lightning_fl.errors import nearest

GIVEN = (
    r"Given value: (.*)",
    r"Got value: (.*)",
    r"Expected a path but (.*) either not accessible",
    r"import path string: (.*)",
    r"Import path (\S+)",
    r"class_path '([^']*)'",
)
SLOTS = ("rule", "uplink", "downlink", "exchange", "aggregator", "steps", "personal")


def explain(message: str, parser: ArgumentParser) -> str:
    """Return one sentence for a message of jsonargparse that `parser` was about to print."""
    for pattern, sentence in SENTENCES.items():
        if match := re.search(pattern, message):
            return sentence(match, parser)
    key = re.search(r'[Kk]ey "([^"]+)"', message)
    values = [match[1] for pattern in GIVEN if (match := re.search(pattern, message)) and "Namespace(" not in match[1]]
    misfit = _value_misfit(key[1], _read(values[0]), parser) if key and values else None
    lines = re.sub(r'Parser key "([^"]+)"', r"\1", message).splitlines()
    return misfit or " ".join(line.strip(" -") for line in lines if line.strip())


def root_sentence(error: BaseException, kinds: tuple[type[BaseException], ...]) -> str | None:
    """Return on one line the message of the first exception of `kinds` among `error` and its causes; None without."""
    return next((" ".join(str(cause).split()) for cause in _causes(error) if isinstance(cause, kinds)), None)


def missing_package(error: BaseException) -> str | None:
    """Return which package to install if Lightning reports a missing one among `error` and its causes; None if not."""
    causes = list(_causes(error))
    commands = [
        c for e in causes if isinstance(e, ImportError) for c in re.findall(r"pip install (?:-U )?['\w][^`\s]*", str(e))
    ]
    named = re.search(r"class_path '(?:\w+\.)*(\w+)'|`([A-Z]\w+)`", "\n".join(map(str, causes)))
    owner = (named[1] or named[2]) if named else "a class of the configuration"
    return f"{owner} needs a package that is not installed: {commands[-1]}." if commands else None


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


# -------------------------------------------------------------------------------------------- names that do not exist


def _unknown_flag(match: re.Match[str], parser: ArgumentParser) -> str:
    flag = match[1].split("=")[0]
    name = flag.lstrip("-")
    if hasattr(parser, "_inner_parser"):
        return _no_parameter(name, parser)
    if not flag.startswith("-"):
        return f"{flag!r} is not a flag: commands take only flags, such as --config FILE."
    return _stock_flag(name) or f"there is no flag {flag}; {_nearest_key(name, parser)}."


def _unknown_key(name: str, parser: ArgumentParser) -> str:
    commands: list[Any] = [action.choices for action in parser._actions if isinstance(action.choices, dict)]
    # All commands share the keys of `fit`.
    command = next((choices["fit"] for choices in commands if "fit" in choices), parser)
    return _stock_flag(name) or f"there is no parameter {name!r}; {_nearest_key(name, command)}."


def _missing(match: re.Match[str], parser: ArgumentParser) -> str:
    if hasattr(parser, "_inner_parser"):
        return f"{_class_of(parser)} needs {match[1]}."
    command = match[1].partition(".")[0]
    flags = match[1].replace(f"{command}.", "--").replace(", ", " and ")
    return f"{command} needs {flags}: name a class, or use a file that names one, such as --config FILE."


def _stock_flag(name: str) -> str | None:
    group, _, flag = name.rpartition(".")
    reason = STOCK_FLAGS.get(flag) if group == "trainer" else None
    return f"{name} is a flag of lightning.Trainer that FederatedTrainer does not have: {reason}." if reason else None


def _no_parameter(name: str, parser: ArgumentParser) -> str:
    if not hasattr(parser, "_inner_parser"):
        return _unknown_key(name, parser)
    owner, (first, _, rest) = _class_of(parser), name.partition(".")
    classes = {known for key in CLASS_PACKAGES for known in classes_under(key)}
    if first in {"name", "type", "class"} | classes or get_close_matches(
        first, ("class_path", "init_args"), cutoff=0.8
    ):
        return f"a class takes only the keys class_path and, for its parameters, init_args; got {name!r}."
    if first in SLOTS and owner in classes_under("algorithm"):
        return (
            f"{owner} has no parameter {name!r}, because its slots are fixed: use --algorithm Algorithm, which takes "
            f"--algorithm.{first} and every other slot; a slot that is not given is FedAvg's."
        )
    if rest and first in {a.dest for a in parser._actions}:
        return f"{first} of {owner} has no parameter {rest!r}."
    return f"{owner} has no parameter {name!r}; {_nearest_key(name, parser)}."


def _class_of(parser: ArgumentParser) -> str:
    """Return the name of the class whose parameters an inner parser reads."""
    return next(iter(getattr(parser, "groups", None) or {}), "the class")


def _nearest_key(given: str, parser: ArgumentParser) -> str:
    """Return the nearest of a parser's keys, with all of them only if they are few."""
    keys = sorted({a.dest for a in parser._actions} - {"help", "print_completion", "subcommand"})
    group, _, leaf = given.rpartition(".")
    siblings = [key for key in keys if key.rpartition(".")[0] == group] if leaf else keys
    few = siblings or [key for key in keys if "." not in key]
    if not keys:
        return "allowed: none"
    if len(few) <= 15:
        return nearest(given, few)
    match = get_close_matches(given, few, n=1)
    return (f"did you mean {match[0]!r}? " if match else "") + "lightning-fl fit --help lists all"


# ------------------------------------------------------------------------------------------------ values that do not fit


def _read(given: str) -> Any:
    try:
        return literal_eval(given)
    except (ValueError, SyntaxError):
        return None if given == "null" else given


def _value_misfit(key: str, given: Any, parser: ArgumentParser) -> str | None:
    """Return what is wrong with a value, by the type of its key; None if the type is unknown."""
    shown_key = f"{key} of {_class_of(parser)}" if hasattr(parser, "_inner_parser") else key
    hint = next((getattr(a, "_typehint", None) or a.type for a in parser._actions if a.dest == key), None)
    if hint is None:
        return None
    _, base = CLASS_PACKAGES.get(key.rpartition(".")[2], ([], None))
    if base is not None and base.__name__ in in_words(hint):
        return class_misfit(given, key, shown_key)
    if isinstance(given, str) and (choices := choices_of(hint)):
        return f"{shown_key} {given!r} is unknown; {nearest(given, choices)}."
    return f"{shown_key} must be {in_words(hint)}, got {shown(given)}."


def _no_group(match: re.Match[str], parser: ArgumentParser) -> str:
    names = [a.dest.removeprefix(f"{match[1]}.") for a in parser._actions if a.dest.startswith(f"{match[1]}.")]
    inner = [name for name in names if "." not in name and name != "help"]
    parameters = ", ".join(inner) if len(inner) <= 15 else f"the parameters of the {match[1]}"
    return f"{match[1]} must be a mapping with {parameters}, or a file with one, got {match[2]}."


def _no_class_to_explain(match: re.Match[str], parser: ArgumentParser) -> str:
    key, name = match.groups()
    misfit = class_misfit(name, key, f"--{key}.help") if key.rpartition(".")[2] in CLASS_PACKAGES else None
    return misfit or f"--{key}.help needs the name of a class for {key}, got {name!r}."


SENTENCES: dict[str, Callable[[re.Match[str], ArgumentParser], str]] = {
    r"[Uu]nrecognized arguments: (\S+)": _unknown_flag,
    r"Subcommand '\w+' does not accept option '([^']+)'": lambda match, parser: _unknown_key(match[1], parser),
    r"Group '([\w.]+)' does not accept option '([^']+)'": lambda match, parser: _unknown_key(
        ".".join(match.groups()), parser
    ),
    r"is not accepted before subcommand": lambda *_: (
        "put --config after the command, as in lightning-fl fit --config FILE."
    ),
    r"Option '([^']+)' is not accepted": lambda match, parser: _no_parameter(match[1], parser),
    r"expected \"subcommand\"": lambda *_: f"no command is given; allowed: {', '.join(COMMANDS)}.",
    r"arguments are required: (.*)": _missing,
    r"argument (?:-\w/)?(--[\w.]+)\S*: expected one argument": lambda match, _: f"{match[1]} needs a value after it.",
    r"--([\w.]+)\.help: (?:.*string: |.*named '|\")([\w.]*)": _no_class_to_explain,
    r"(?s)key \"([\w.]+)\".*NestedArg\(key='([\w.]+)'": lambda match, _: (
        f"--{match[1]}.{match[2]} stands before the class of {match[1]}; give --{match[1]} first, or name its class in a file."
    ),
    r"class_path '([^']*)':\s+'\w+' object has no attribute 'keys'": lambda match, _: (
        f"init_args of {match[1]} must be a mapping with its parameters."
    ),
    r"key \"([\w.]+)\":\s+Unable to load config '(.*)'\n": _no_group,
    r"key \"config\":\s+(.*)": lambda match, _: f"--config: {match[1]}.",
}
"""Function that builds the sentence, for each pattern of a message."""

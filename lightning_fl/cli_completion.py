"""What the shell offers after TAB: every flag, the names of classes, and the parameters of those classes.

jsonargparse writes the script (`--print_completion`). On its own it would offer each class that a type allows with the
parameters of each, and of the classes that those allow, which for a network goes through all of torch without end. Here the
classes are those that have a name in a configuration, and their flags are made first, which it then leaves alone.
"""

from __future__ import annotations

import inspect
from argparse import ArgumentParser
from typing import Any, Literal, get_args, get_origin, get_type_hints

from lightning_fl.cli_names import classes_under
from lightning_fl.modules import NETWORKS
from lightning_fl.settings import PRECISION_ALIASES, PRECISIONS, PROFILERS

VALUES = {
    "trainer.accelerator": ["auto", "cpu", "gpu", "cuda"],
    "trainer.strategy": ["auto", "ddp"],
    "trainer.precision": [*PRECISIONS, *PRECISION_ALIASES],
    "trainer.profiler": [*PROFILERS],
    "trainer.client_states": ["memory", "disk"],
    "ckpt_path": ["last", "best"],
}


def offer_names(parser: ArgumentParser) -> None:
    """Give a command's flags the names that they may take, and the parameters of named classes flags of their own."""
    for action in list(parser._actions):
        if action.dest in VALUES:
            action.choices = VALUES[action.dest]
        elif action.dest.endswith(".help"):
            action.choices = [*classes_under(action.dest.removesuffix(".help"))] or None
        elif classes := classes_under(action.dest):
            action.choices = [*classes]
            _offer_parameters(parser, action.option_strings[0], classes)


def _offer_parameters(
    parser: ArgumentParser, flag: str, classes: dict[str, type], around: tuple[type, ...] = ()
) -> None:
    """Flags for the parameters of `classes`; of a class inside itself, as codecs may be, none."""
    for offered in classes.values():
        if offered in around:
            continue
        for name, hint in _parameters(offered).items():
            if f"{flag}.{name}" in parser._option_string_actions:
                continue
            inner = classes_under(name)
            choices = [*NETWORKS] if name == "network" else [*inner] or _values(hint)
            options: dict[str, Any] = {"choices": choices} if choices else {}
            parser.add_argument(f"{flag}.{name}", **options)
            _offer_parameters(parser, f"{flag}.{name}", inner, (*around, offered))


def _parameters(offered: type) -> dict[str, Any]:
    """Parameters of a class with their types, also those that it hands on to its bases in `**kwargs`."""
    found: dict[str, Any] = {}
    for base in offered.__mro__:
        init = vars(base).get("__init__")
        if init is None or base is object:
            continue
        try:
            hints = get_type_hints(init)
        except Exception:  # names that a library imports for type checkers alone
            hints = {}
        parameters = inspect.signature(init).parameters.values()
        named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        found |= {name: hints.get(name) for name in named[1:] if name not in found}
        if not any(p.kind == p.VAR_KEYWORD for p in parameters):
            break
    return found


def _values(hint: Any) -> list[str]:
    if hint is bool:
        return ["true", "false"]
    return [str(value) for value in get_args(hint)] if get_origin(hint) is Literal else []

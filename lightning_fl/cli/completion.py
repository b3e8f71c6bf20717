"""Shell completion: every flag, the names of classes, and the parameters of those classes.

jsonargparse writes the script (`--print_completion`). By itself it would offer every class that a type allows, with its
parameters, and in turn every class that these allow; for a network this recursion through torch does not end. This module
therefore first adds flags for the classes that a configuration may name; jsonargparse leaves existing flags unchanged.
"""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from lightning.pytorch.cli import LightningArgumentParser

from lightning_fl.checks import parameters_of
from lightning_fl.cli import catalogue
from lightning_fl.cli.class_names import classes_under
from lightning_fl.cli.type_descriptions import choices_of
from lightning_fl.modules import NETWORKS
from lightning_fl.trainer.lightning_parts import PRECISION_ALIASES, PRECISIONS, PROFILERS, STRATEGIES

VALUES = {
    "trainer.accelerator": ["auto", "cpu", "gpu", "cuda"],
    "trainer.strategy": [*STRATEGIES],
    "trainer.precision": [*PRECISIONS, *PRECISION_ALIASES],
    "trainer.profiler": [*PROFILERS],
    "trainer.client_states": ["memory", "disk"],
    "ckpt_path": ["last", "best"],
}


def offer_names(parser: ArgumentParser) -> None:
    """Add the allowed names to a command's flags, and flags for the parameters of named classes."""
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
    """Add flags for the parameters of `classes`; skip a class inside itself, and parameters inside the base of a base method."""
    for offered in classes.values():
        if offered in around:
            continue
        for name, parameter in parameters_of(offered).items():
            if f"{flag}.{name}" in parser._option_string_actions:
                continue
            inner = classes_under(name)
            choices = [*NETWORKS] if name == "network" else [*inner] or choices_of(parameter.annotation)
            options: dict[str, Any] = {"choices": choices} if choices else {}
            parser.add_argument(f"{flag}.{name}", **options)
            enclosing = (*around, offered)
            if sum(outer in inner.values() for outer in enclosing) < 2:
                _offer_parameters(parser, f"{flag}.{name}", inner, enclosing)


def flags_of(other: ArgumentParser) -> LightningArgumentParser:
    """Return the flags of a command without a run in a parser for which jsonargparse can write a script."""
    parser, sections = LightningArgumentParser(), {"algorithm": "algorithms", "data": "data", "model": "networks"}
    for action in other._actions:
        if not action.option_strings or action.dest == "help":
            continue
        if action.nargs == 0:
            parser.add_argument(*action.option_strings, action="store_true")
        else:
            names = [entry.name for entry in catalogue.entries() if entry.section == sections.get(action.dest)]
            options: dict[str, Any] = {"choices": names} if names else {}
            parser.add_argument(*action.option_strings, **options)
    return parser

"""Help of a command: the meaning and the values of each flag, under headings. jsonargparse's own help also shows internals."""

from __future__ import annotations

import re
from argparse import SUPPRESS, Action
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any, Literal, get_args, get_origin

from jsonargparse import DefaultHelpFormatter

from lightning_fl.cli.class_names import CLASS_PACKAGES, classes_under
from lightning_fl.cli.type_descriptions import in_words, members_of, shown
from lightning_fl.trainer.flag_facts import flags_of
from lightning_fl.trainer.flags import TrainerFlags

GROUPS = {name: flag.group for name, flag in flags_of(TrainerFlags).items()}
"""Heading of each flag of the trainer."""
TITLES = {
    "algorithm": "Method",
    "model": "Model; num_classes, in_channels and image_size are taken from the data",
    "data": "Data, divided over clients and a server",
    "optimizer": "Optimiser of the clients, in place of the module's configure_optimizers",
    "lr_scheduler": "Scheduler of its learning rate, which steps after each round",
    **{f"trainer.{name}": heading for name, heading in GROUPS.items()},
}
"""Titles of the groups of flags."""
FIRST = ("algorithm", "model", "data", "optimizer", "lr_scheduler")
"""Groups in front of the trainer's."""
TEXTS = {
    "config": (
        "FILE",
        "Configuration in YAML or JSON: a file, or one of `lightning-fl list configs`. Each --config overrides earlier ones.",
    ),
    "print_config": (
        "[=skip_default]",
        "Print the configuration that results from all arguments, or only its differences from the defaults, and exit.",
    ),
    "seed_everything": (
        "INT|false",
        "Seed of the initial model and of every draw, such as the clients of a round; false for an initial model without a seed.",
    ),
}
"""Value and text of flags that Lightning describes otherwise."""
INTERNAL = ("ActionLink", "_ActionConfigLoad", "_ActionHelpClassPath")
"""Kinds of entries that are not flags by themselves."""
TYPES = {bool: "{true,false}", int: "INT", float: "FLOAT", str: "TEXT", PathLike: "PATH"}
NOT_SAID = "One or more arguments specifying"
"""Start of jsonargparse's text for a class without a description."""


class PlainHelpFormatter(DefaultHelpFormatter):
    """Formatter that lists flags with types and defaults, and classes by the names that a configuration may use."""

    def start_section(self, heading: str | None) -> None:
        """Start a section with a capital letter."""
        super().start_section(heading and heading[:1].upper() + heading[1:])

    def add_arguments(self, actions: Iterable[Action]) -> None:
        """Add the flags of a section; the trainer's flags get sections of their own."""
        heading = None
        for action in actions:
            group, _, name = action.dest.rpartition(".")
            if group == "trainer" and GROUPS.get(name, heading) != heading and not _is_internal(action):
                heading = GROUPS[name]
                self.end_section()
                self.start_section(heading)
            self.add_argument(action)

    def add_argument(self, action: Action) -> None:
        """Add a flag; leave out links between parameters, and files and helps of single groups."""
        if not _is_internal(action):
            super().add_argument(action)

    def _format_action_invocation(self, action: Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        value = "" if action.nargs == 0 else _value_of(action)
        return f"{', '.join(action.option_strings)} {value}".rstrip()

    def _get_help_string(self, action: Action) -> str:
        text = (action.help or "").strip()
        if action.dest.rpartition(".")[0] != "trainer":  # whose texts may begin with a value, such as norm
            text = text[:1].upper() + text[1:]
        if not hasattr(action, "_typehint"):
            return text
        classes = _classes_of(action)
        if classes:
            ask = f"--{action.dest}.help NAME shows its parameters"
            names = f"One of {', '.join(classes)}, or your own by its import path; {ask}."
            text = names if text.startswith(NOT_SAID) else f"{text.rstrip('.')}. {names}"
        default = action.default
        if isinstance(default, Mapping) or hasattr(default, "class_path"):
            default = str(default["class_path"]).rpartition(".")[2]
        if action.required:
            return f"{text} (required)"
        return text if default in (None, SUPPRESS) or "(default: " in text else f"{text} (default: {_short(default)})"


def arrange(parser: Any) -> None:
    """Give the help of a command readable titles and texts, and put method, model and data in front of the trainer."""
    command = parser.prog.split()[-1]
    parser.usage = f"lightning-fl {command} [--config FILE] [--FLAG VALUE] ..."
    parser.epilog = (
        "Each flag is also a key of a configuration file and an environment variable: --trainer.max_rounds is the key max_rounds "
        f"under trainer, and PL_{command.upper()}__TRAINER__MAX_ROUNDS. A default that is not shown is null."
    )
    for action in parser._actions:
        action.metavar, action.help = TEXTS.get(action.dest, (action.metavar, action.help))
    for key, group in parser.groups.items():
        group.title = TITLES.get(key, "Checkpoint" if key == command else group.title)
    first = [parser._optionals, *(parser.groups[key] for key in FIRST if key in parser.groups)]
    parser._action_groups.sort(key=lambda group: first.index(group) if group in first else len(first))


def inner_usage(description: str, has_parameters: bool = True) -> tuple[str, str]:
    """Return usage and description for the help of one class.

    >>> inner_usage("Help for --algorithm.help=lightning_fl.algorithms.FedDU")
    ('lightning-fl fit --algorithm FedDU [--algorithm.NAME VALUE] ...', 'Parameters of lightning_fl.algorithms.FedDU.')
    """
    key, path = re.findall(r"--([\w.]+)\.help=([\w.]+)", description)[0]
    name = path.rpartition(".")[2]
    command = f"lightning-fl fit --{key} {name if name in classes_under(key) else path}"
    if not has_parameters:
        return command, f"{path} has no parameters."
    return f"{command} [--{key}.NAME VALUE] ...", f"Parameters of {path}."


def _is_internal(action: Action) -> bool:
    return type(action).__name__ in INTERNAL


def _hint_of(action: Action) -> Any:
    return getattr(action, "_typehint", None) or action.type


def _classes_of(action: Action) -> list[str]:
    """Return the names of the classes that a flag takes; empty if it takes none."""
    _, base = CLASS_PACKAGES.get(action.dest.rpartition(".")[2], ([], None))
    hint = _hint_of(action)
    return [*classes_under(action.dest)] if base and hint and base.__name__ in in_words(hint) else []


def _value_of(action: Action) -> str:
    """Return the placeholder for the value of a flag, such as INT."""
    if _classes_of(action):
        return "CLASS"
    if isinstance(action.metavar, str):
        return action.metavar
    words = []
    for member in members_of(_hint_of(action)):
        if get_origin(member) is Literal:
            words.append("{" + ",".join(map(str, get_args(member))) + "}")
        words += [word for kind, word in TYPES.items() if kind in (member, get_origin(member))]
    return "|".join(dict.fromkeys(words)) or "VALUE"


def _short(value: Any) -> str:
    """Return a value as YAML writes it, a float without needless zeros.

    >>> _short(1e11), _short(0.5), _short("auto")
    ('1e+11', '0.5', 'auto')
    """
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else shown(value)

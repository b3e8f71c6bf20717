"""Write the texts that the command line prints without importing the library: names with their parameters, and flags.

python docs/kept_texts.py

It writes catalogue.jsonl and flags.jsonl anew, for a class or a flag that is new or has other parameters or texts. Both are
kept in the repository, because making them builds every method and every parser: it takes seconds, and needs PyTorch, which
the isolated build of a package does not have.
"""

from __future__ import annotations

import inspect
import json
from argparse import Action
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import FunctionType
from typing import Any
from unittest.mock import MagicMock

import numpy as np
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningModule
from torch import nn

from lightning_fl import aggregators, algorithms, callbacks, codecs, data, exchanges, modules, personal, rules, steps
from lightning_fl.algorithms import Algorithm
from lightning_fl.callbacks.pruning._pruning_callback import PruningCallback, StructuredPruning
from lightning_fl.checks import parameters_of
from lightning_fl.cli import catalogue, kept_help
from lightning_fl.cli.federated_cli import FederatedCLI
from lightning_fl.cli.help_formatter import PlainHelpFormatter
from lightning_fl.cli.type_descriptions import in_words
from lightning_fl.errors import UserError
from lightning_fl.features import attacks, privacy, selection
from lightning_fl.features.privacy.mechanism import Privacy
from lightning_fl.personal.personal_gates import ClientGates
from lightning_fl.slots import Aggregator, Codec, Exchange, Personal, Rule, Step
from lightning_fl.trainer import FederatedTrainer
from lightning_fl.trainer.flag_facts import flags_of

RUNNING = ("fit", "validate", "test", "predict")


def contents() -> list[dict[str, Any]]:
    """Return every name that `lightning-fl list` knows, with its first line and its parameters."""
    groups: dict[str, dict[str, Any]] = {
        "algorithms": classes(algorithms),
        "models": classes(modules, LightningModule),
        "networks": dict(modules.NETWORKS),
        "data": classes(data, data.FederatedDataModule),
        "partitions": classes(data, data.Partition),
        "shifts": classes(data, data.Shift),
        "attacks": classes(attacks, attacks.Attack),
        "callbacks": classes(callbacks),
        "privacy": classes(privacy, Privacy),
        "selections": classes(selection, selection.ClientSelection),
        "rules": classes(rules, Rule),
        "codecs": classes(codecs, Codec),
        "exchanges": classes(exchanges, Exchange),
        "aggregators": classes(aggregators, Aggregator),
        "steps": classes(steps, Step),
        "personal": classes(personal, Personal),
        "trainer": {"FederatedTrainer": FederatedTrainer},
    }
    return [
        {
            "section": section,
            "name": name,
            "about": (inspect.getdoc(members[name]) or "").splitlines()[0],
            "module": members[name].__module__,
            "parameters": {} if section == "networks" else parameters(members[name]),
            **traits(section, name, members[name]),
            **({"slots": slots(members[name]())} if section == "algorithms" else {}),
        }
        for section, members in groups.items()
        for name in sorted(members)
    ]


def traits(section: str, name: str, member: Any) -> dict[str, Any]:
    """Return what `lightning-fl init` reads of a method or a network, if it is not the default."""
    found: dict[str, Any] = {}
    if section == "algorithms":
        found["uses_server"] = uses_server(member())
        found["sum_only"] = sum_only(member())
    elif section == "networks":
        found["incompatible"] = incompatible(name, member)
    return {trait: value for trait, value in found.items() if value}


def incompatible(network: str, build: Callable[..., nn.Module]) -> dict[str, str]:
    """Return the methods and data that a network does not fit, each with the reason."""
    found = {}
    if not any(isinstance(layer, nn.Conv2d) for layer in build().modules()):
        for name, method in classes(algorithms).items():
            if any(isinstance(one, StructuredPruning | ClientGates) for one in method().configure_callbacks()):
                found[name] = f"{name} prunes filters of convolutions, and {network} has none"
    if sum(isinstance(layer, nn.Conv2d | nn.Linear) for layer in build().modules()) < 2:
        for name, method in classes(algorithms).items():
            if method().exchange.cuts:
                found[name] = f"{name} cuts hidden layers, and {network} has none"
    for name, images in classes(data, data.ImageDataModule).items():
        size = images.image_size  # a number where all images of a data set have one size
        try:
            build(10, images.in_channels, size) if isinstance(size, int) else None
        except UserError as error:
            found[name] = str(error).partition(";")[0]
    return found


def uses_server(method: Algorithm) -> bool:
    """Return True for a method that refuses a server without samples, or that prunes by them."""

    def refuse() -> None:
        raise UserError("server_fraction")

    try:
        method.arrange_data(MagicMock(server_indices=[], client_sizes=np.ones(9)))
        server = MagicMock(num_samples=0, require_samples=refuse)
        buffers = MagicMock(names=())
        context = MagicMock(num_rounds=100, num_clients=100, local_epochs=5, learning_rate=0.05, buffer_layout=buffers)
        method.check(context, server, 100)
    except UserError as error:
        if "server_fraction" not in str(error):  # any other refusal is an error of this program
            raise
        return True
    return any(isinstance(callback, PruningCallback) for callback in method.configure_callbacks())


def sum_only(method: Algorithm) -> str:
    """Return yes or no, and why: whether sums over the clients of a round suffice for a method, as its parts declare."""
    readers = ", ".join(f"{slot} ({name})" for slot, name in method.readers_of_single_clients())
    if method.setup_reads_clients:
        return f"yes + set-up, because {method.name} reads single clients before the first round"
    return f"no, because these parts read single clients: {readers}" if readers else "yes"


def parameters(found: type) -> dict[str, dict[str, Any]]:
    """Return the parameters of a class with the descriptions that `--help` prints and their defaults."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(found, "it")
    actions = {action.dest.removeprefix("it."): action for action in parser._actions}
    described: dict[str, dict[str, Any]] = {}
    for name, parameter in parameters_of(found).items():
        inner = [dest for dest in actions if dest.startswith(f"{name}.") and not dest.endswith(".help")]
        for dest in inner:  # of a group, such as the trainer's clock
            kind = in_words(getattr(actions[dest], "_typehint", None) or actions[dest].type)
            described[dest] = {"about": text_of(actions[dest]), "type": kind, "default": plain(actions[dest].default)}
        if inner:
            continue
        about = text_of(actions[name]) if name in actions else ""
        described[name] = {"about": about, "type": in_words(parameter.annotation)}
        if parameter.default is not inspect.Parameter.empty:
            is_function = isinstance(parameter.default, FunctionType)  # in a configuration, the class of what it makes
            described[name]["default"] = actions[name].default if is_function else plain(parameter.default)
    if found is FederatedTrainer:  # reports leave out what decides no results
        for name, flag in flags_of(found).items():
            if flag.decides == "execution":
                described[name]["decides"] = flag.decides
    return described


def slots(method: Algorithm) -> dict[str, list[str]]:
    """Return the import paths of the parts in each slot of a method, each part before those inside it."""
    filled = {slot: getattr(method, slot) for slot in inspect.signature(Algorithm).parameters}
    return {slot: paths for slot, found in filled.items() if (paths := paths_of(found))}


def paths_of(part: Any) -> list[str]:
    """Return the import paths of a part and those inside it, or of several."""
    if isinstance(part, tuple):
        return [path for one in part for path in paths_of(one)]
    if not is_dataclass(part):
        return []
    inner = [path for field in fields(part) for path in paths_of(getattr(part, field.name))]
    return [f"{type(part).__module__}.{type(part).__name__}", *inner]


def text_of(action: Action) -> str:
    """Return the description of a parameter in one line with a capital letter, unless it begins with a value."""
    text = " ".join((action.help or "").split())
    begins_with_value = text.startswith(("norm ", "simple,")) or text[1:2] == " "  # a symbol, such as ε
    return text if begins_with_value else text[:1].upper() + text[1:]


def plain(value: Any) -> Any:
    """Return a default as JSON can hold it, a part by the name of its class."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [plain(one) for one in value]
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    return value if isinstance(value, str | int | float | None) else type(value).__name__


def catalogue_text() -> str:
    """Return the content of catalogue.jsonl."""
    return "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in contents())


class ParserBuilt(Exception):  # noqa: N818
    """Parser of the command line, before it has parsed anything."""


class BuiltParser(FederatedCLI):
    """Command line that ends as soon as its parser is built."""

    def parse_arguments(self, parser: Any, args: Any) -> None:
        """Hand the parser over."""
        raise ParserBuilt(parser)


class RecordingFormatter(PlainHelpFormatter):
    """Formatter of `--help` that records its headings, flags and texts."""

    rows: dict[str, list[tuple[str, str]]]
    owners: dict[int, str | None]

    def _format_action(self, action: Action) -> str:
        heading = self.owners[id(action)] or ""
        row = self._format_action_invocation(action), self._expand_help(action)
        self.rows.setdefault(heading, []).append(row)
        return super()._format_action(action)

    def add_argument(self, action: Action) -> None:
        """Note the heading that an action stands under."""
        self.owners[id(action)] = self._current_section.heading
        super().add_argument(action)


@cache
def parser_of(command: str) -> Any:
    """Return the parser of a command."""
    try:
        BuiltParser(args=[command])
    except ParserBuilt as built:
        return built.args[0]._subcommands_action.choices[command]


def flags_text() -> str:
    """Return the content of flags.jsonl: the classes of other packages, what stands around the flags of each command, and the
    sections, a line each.
    """
    around, owners, places = {}, {}, {}
    for command in RUNNING:
        parser = parser_of(command)
        recorded: Any = type("Recorded", (RecordingFormatter,), {"rows": {}, "owners": {}})
        before, parser.formatter_class = parser.formatter_class, recorded
        parser.format_help()
        parser.formatter_class = before
        around[command] = {name: getattr(parser, name) for name in ("usage", "description", "epilog")}
        for place, (heading, rows) in enumerate(recorded.rows.items()):
            owners.setdefault((heading, tuple(rows)), []).append(command)
            places.setdefault((heading, tuple(rows)), place)
    others = {module: kept_help.classes_of(module) for module in kept_help.OTHERS}
    sections = (
        {"heading": head, "flags": rows, "commands": owners[head, rows]}
        for head, rows in sorted(owners, key=places.__getitem__)
    )
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in (others, around, *sections))


def classes(package: Any, kind: type = object) -> dict[str, type]:
    """Return by name the public classes of a package that are of a kind and not abstract."""
    found = {name: getattr(package, name) for name in package.__all__}
    kept = {name: c for name, c in found.items() if isinstance(c, type) and issubclass(c, kind)}
    return {name: c for name, c in kept.items() if not inspect.isabstract(c)}


if __name__ == "__main__":
    catalogue.FILE.write_text(catalogue_text(), encoding="utf-8")
    kept_help.FILE.write_text(flags_text(), encoding="utf-8")

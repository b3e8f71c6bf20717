"""Test that the texts which the command line prints without importing the library say what the library says.

`python tests/cli/test_texts.py` writes catalogue.jsonl anew, for a class that is new or has other parameters or texts.
"""

import inspect
import json
import re
from argparse import Action
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningModule
from torch import nn

from lightning_fl import algorithms, callbacks, cli, data, modules
from lightning_fl.algorithms import Algorithm
from lightning_fl.callbacks.pruning._pruning_callback import PruningCallback, StructuredPruning
from lightning_fl.checks import parameters_of
from lightning_fl.cli import catalogue
from lightning_fl.cli.commands import COMMANDS, FLAGS
from lightning_fl.cli.federated_cli import DESCRIPTION, FederatedCLI
from lightning_fl.cli.type_descriptions import in_words
from lightning_fl.errors import UserError
from lightning_fl.personal.personal_gates import ClientGates
from lightning_fl.trainer import FederatedTrainer

HELP = Path(cli.__file__).with_name("help.txt")


def contents() -> list[dict[str, Any]]:
    """Return every name that `lightning-fl list` knows, with its first line and its parameters."""
    groups: dict[str, dict[str, Any]] = {
        "algorithms": classes(algorithms),
        "models": classes(modules, LightningModule),
        "networks": dict(modules.NETWORKS),
        "data": classes(data, data.FederatedDataModule),
        "partitions": classes(data, data.Partition),
        "shifts": classes(data, data.Shift),
        "callbacks": classes(callbacks),
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
    elif section == "networks":
        found["misfits"] = misfits(name, member)
    return {trait: value for trait, value in found.items() if value}


def misfits(network: str, build: Callable[..., nn.Module]) -> dict[str, str]:
    """Return the methods and data that a network does not fit, each with the reason."""
    found = {}
    if not any(isinstance(layer, nn.Conv2d) for layer in build().modules()):
        for name, method in classes(algorithms).items():
            if any(isinstance(one, StructuredPruning | ClientGates) for one in method().configure_callbacks()):
                found[name] = f"{name} prunes filters of convolutions, and {network} has none"
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
        method.check(MagicMock(num_rounds=100, num_clients=100, local_epochs=5, learning_rate=0.05), server, 10)
    except UserError as error:
        assert "server_fraction" in str(error)  # noqa: PT017 -- any other refusal is an error of this test
        return True
    return any(isinstance(callback, PruningCallback) for callback in method.configure_callbacks())


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
    return described


def slots(method: Algorithm) -> dict[str, list[str]]:
    """Return the import paths of the parts in each slot of a method, each part before those inside it."""
    filled = {slot: getattr(method, slot) for slot in inspect.signature(Algorithm).parameters}
    return {slot: paths for slot, found in filled.items() if (paths := paths_of(found))}


def paths_of(part: Any) -> list[str]:
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
    return value if isinstance(value, str | int | float | None) else type(value).__name__


def lines() -> str:
    return "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in contents())


def classes(package: Any, kind: type = object) -> dict[str, type]:
    """Return by name the public classes of a package that are of a kind and not abstract."""
    found = {name: getattr(package, name) for name in package.__all__}
    kept = {name: c for name, c in found.items() if isinstance(c, type) and issubclass(c, kind)}
    return {name: c for name, c in kept.items() if not inspect.isabstract(c)}


def test_the_list_is_that_of_the_code() -> None:
    assert catalogue.FILE.read_text(encoding="utf-8") == lines(), "run: python tests/cli/test_texts.py"


def test_the_help_says_what_the_parser_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("shtab", reason="needs shtab: pip install -e '.[completion]'")
    monkeypatch.setenv("JSONARGPARSE_ADD_PRINT_COMPLETION_ARGUMENT", "true")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.argv", ["lightning-fl", "--help"])
    with pytest.raises(SystemExit):
        FederatedCLI()
    said, written = capsys.readouterr().out, HELP.read_text(encoding="utf-8")
    flags = re.compile(r"--[a-z_]+")
    assert set(flags.findall(said)) <= set(flags.findall(written)) == set(FLAGS)
    commands = written.partition("commands:")[2].partition("\n\n")[0].splitlines()
    described = dict(line.split(None, 1) for line in commands if line[4:5].strip())
    assert sorted(described) == sorted(COMMANDS)
    of_parser = said.partition("subcommands:")[2]
    for command in ("fit", "validate", "test", "predict"):
        assert re.search(rf"^ +{command} +{re.escape(described[command])}$", of_parser, re.MULTILINE)
    assert DESCRIPTION in written


if __name__ == "__main__":
    catalogue.FILE.write_text(lines(), encoding="utf-8")

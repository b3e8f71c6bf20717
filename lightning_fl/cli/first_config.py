"""`lightning-fl init`: write a first configuration, in which a comment explains every value."""

from __future__ import annotations

import shlex
import textwrap
from argparse import ArgumentParser
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_fl.cli import catalogue
from lightning_fl.cli.catalogue import Entry
from lightning_fl.errors import CommandParser, UserError, require

NAME = "experiment.yaml"
WIDTH, ONE_LINE = 100, 10**6
"""Longest line of a comment, and of a value."""
TRAINER_KEYS = ("max_rounds", "clients_per_round", "local_epochs", "default_root_dir")
MODEL_KEYS = ("network", "learning_rate", "momentum", "weight_decay", "lr_decay")
DATA_KEYS = (
    "path",
    "root",
    "download",
    "datamodule",
    "image_size",
    "num_clients",
    "batch_size",
    "partition",
    "server_fraction",
    "val_fraction",
)
"""Keys that a first configuration has, if the class has them; all parameters of the method are written."""
SERVER_FRACTION = 0.05
RATE_OF_ADAM = 0.001
RATES = {"PFedMe": 0.05}
"""Learning rates of methods that refuse the default."""
CLIENTS_PER_ROUND = {"Scaffnew": 1.0}
"""Shares of the clients in a round of methods that refuse the default."""
OF_DATA = {"Digits": {"num_clients": 20}}
"""Values for data with so few samples that the default number of clients leaves too few for some partition."""
SHORT_SETUP = {"FedKT": {"preset": "light", "num_clients": 10, "server_fraction": 0.2}}
"""Values for methods that otherwise train for long before the first round."""
TO_FILL_IN = {
    "Arrays": {"path": "my_data.npz"},
    "CelebA": {"root": "my_celeba"},
    "Federated": {"datamodule": "my_module.MyDataModule"},
    "HuggingFace": {"path": "my_dataset", "test_split": "test"},
    "ImageFolder": {"root": "my_images"},
    "Leaf": {"train": "data/train", "test": "data/test"},
}
"""Values that users replace by their own, by the class of the data."""


def build_parser() -> ArgumentParser:
    """Return the parser of the command's flags."""
    parser = CommandParser(
        prog="lightning-fl init",
        description=f"Write {NAME}, a first configuration in which a comment explains every value.",
    )
    parser.add_argument("folder", nargs="?", default=".", metavar="DIR", help="folder for it (default: this one)")
    for flag, section, default, thing in (
        ("--algorithm", "algorithms", "FedAvg", "method"),
        ("--data", "data", "Digits", "data"),
        ("--model", "networks", "lenet5", "network"),
    ):
        text = f"{thing}, one of `lightning-fl list {section}` (default: {default})"
        parser.add_argument(flag, default=default, metavar="NAME", help=text)
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    return parser


def init(words: Sequence[str]) -> str:
    """Write a first configuration.

    Args:
        words: command line after `init`.

    Returns:
        Text to print: the file, and the command that runs it.

    Raises:
        UserError: a name is unknown, the network does not fit the method or the data, or the file exists or cannot be written.
    """
    parsed = build_parser().parse_args(words)
    method, data = catalogue.entry("algorithms", parsed.algorithm), catalogue.entry("data", parsed.data)
    network, path = catalogue.entry("networks", parsed.model), Path(parsed.folder) / NAME
    _check_fit(network, (method.name, data.name))
    require(parsed.overwrite or not path.exists(), f"{path} exists: give --overwrite to replace it, or another folder.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(first_config(method, data, network, str(path)), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}).") from error
    to_fill_in = "".join(f"Set data.{key} in it to your own.\n" for key in TO_FILL_IN.get(data.name, {}))
    command = f"lightning-fl fit --config {shlex.quote(str(path))}"
    return f"Wrote {path}: {method.name}, {network.name}, {data.name}.\n{to_fill_in}Run it with\n  {command}"


def _check_fit(network: Entry, others: Collection[str]) -> None:
    """Raise `UserError` with the reason if a network does not fit one of these other names."""
    networks = [entry for entry in catalogue.entries() if entry.section == "networks"]
    fitting = ", ".join(entry.name for entry in networks if not entry.incompatible.keys() & {*others})
    for name in others:
        require(
            name not in network.incompatible,
            f"--model {network.name} does not fit: {network.incompatible.get(name)}; allowed with {' and '.join(others)}: "
            f"{fitting}.",
        )


def first_config(method: Entry, data: Entry, network: Entry, path: str) -> str:
    """Return the text of a configuration; values are the defaults of the classes unless a first run needs others."""
    (trainer,) = [entry for entry in catalogue.entries() if entry.section == "trainer"]
    (model,) = [entry for entry in catalogue.entries() if entry.section == "models"]
    folder = f"runs/{method.name}_{network.name}_{data.name}".lower()
    model_values: dict[str, Any] = {"network": network.name}
    if "beta2" in method.parameters:
        model_values["learning_rate"] = RATE_OF_ADAM
    elif method.name in RATES:
        model_values["learning_rate"] = RATES[method.name]
    shorter, user_values = SHORT_SETUP.get(method.name, {}), TO_FILL_IN.get(data.name, {})
    data_values: dict[str, Any] = {"image_size": 32, "download": True, **OF_DATA.get(data.name, {}), **user_values}
    if method.uses_server:
        data_values["server_fraction"] = SERVER_FRACTION
    data_values |= shorter
    trainer_values: dict[str, Any] = {"local_epochs": 5, "default_root_dir": folder}
    if method.name in CLIENTS_PER_ROUND:
        trainer_values["clients_per_round"] = CLIENTS_PER_ROUND[method.name]
    keys = [*user_values, *(key for key in DATA_KEYS if key not in user_values)]
    if "ByGroup" in str(data.parameters["partition"].get("default")):  # which never cuts a user
        keys[keys.index("server_fraction")] = "server_groups"
        data_values["server_groups"] = data_values.get("server_fraction", 0.0)
    paragraphs = [
        [
            *_comment(f"{method.name} with the network {network.name} on {data.name}. Run it with", 0),
            f"#   lightning-fl fit --config {shlex.quote(path)}",
            *_comment(
                "Change values here, or in one run on the command line: --trainer.max_rounds 20. More keys: "
                "lightning-fl fit --help. Another method: lightning-fl list algorithms.",
                0,
            ),
        ],
        [
            *_comment("Seed of the initial model and of every draw, such as the clients of a round.", 0),
            "seed_everything: 0",
        ],
        ["trainer:", *_values(trainer, 1, TRAINER_KEYS, trainer_values)],
        ["algorithm:", *_class(method, tuple(method.parameters), shorter)],
        ["model:", *_class(model, MODEL_KEYS, model_values, {"network": network.about})],
        ["data:", *_class(data, keys, data_values)],
    ]
    return "\n\n".join("\n".join(lines) for lines in paragraphs) + "\n"


def _class(
    entry: Entry, keys: Sequence[str], values: dict[str, Any], texts: dict[str, str] | None = None
) -> Iterator[str]:
    """Yield the lines of a class with its parameters."""
    yield from _comment(entry.about, 1)
    yield f"  class_path: {entry.name}"
    lines = [*_values(entry, 2, keys, values, texts)]
    if lines:
        yield "  init_args:"
    yield from lines


def _values(
    entry: Entry, level: int, keys: Sequence[str], values: dict[str, Any], texts: dict[str, str] | None = None
) -> Iterator[str]:
    """Yield a comment and a line for each of the keys that a class has."""
    for key in keys:
        if key not in entry.parameters:
            continue
        parameter = entry.parameters[key]
        yield from _comment((texts or {}).get(key, parameter["about"]), level)
        value = values.get(key, parameter.get("default"))
        if isinstance(value, dict):  # JSON has kept numbers as texts
            value = {yaml.safe_load(name): one for name, one in value.items()}
        written = yaml.safe_dump(value, default_flow_style=True, width=ONE_LINE).partition("\n")[0]
        yield f"{'  ' * level}{key}: {written}"


def _comment(text: str, level: int) -> list[str]:
    start = "  " * level + "# "
    return textwrap.wrap(text[:1].upper() + text[1:], WIDTH, initial_indent=start, subsequent_indent=start)

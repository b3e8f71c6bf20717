"""Checks of wrong input that the parser accepts: files that are not configurations, and null for types that do not allow it.

The parser reads null as "not given", and ignores a value of a group such as `trainer` that is not a mapping. The first error
would stop a run in the middle; the second would start a run with other settings than the user's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pydoc import locate
from types import NoneType
from typing import Any

import yaml

from lightning_fl.checks import parameters_of
from lightning_fl.cli.failures import causes_of
from lightning_fl.cli.shipped_configs import is_yaml
from lightning_fl.cli.type_descriptions import allows_null, group_of, in_words, members_of, shown
from lightning_fl.errors import UserError, nearest, require
from lightning_fl.outputs.yaml_files import MAX_DEPTH, is_misread, is_too_deep, parse_strictly, read_strictly

KEYS = "seed_everything, trainer, model, data, algorithm, optimizer, lr_scheduler and ckpt_path"


def check_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Check that a file can be a configuration, and return its content.

    Raises:
        UserError: `read_strictly` refuses it, or it is empty, not a mapping, names another configuration, or its trainer is
            neither a mapping nor a text.
    """
    return _checked(read_strictly(path, f"a configuration is YAML with the keys {KEYS}"), path)


def check_given(value: str) -> dict[str, Any] | None:
    """Check a value of --config that is a file, or YAML itself, and return its content; None for standard input and addresses.

    Raises:
        UserError: as `check_file`.
    """
    path = os.path.expanduser(value)
    if os.path.isfile(path):
        return check_file(path)
    name = "the YAML after --config"
    return _checked(parse_strictly(value, name), name) if is_yaml(value) else None


def _checked(content: Any, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of a configuration if it can be one."""
    require(content not in (None, {}), f"{path} is empty: a configuration has the keys {KEYS}.")
    require(isinstance(content, dict), f"{path} must be a mapping with the keys {KEYS}, got {shown(content)}.")
    require(
        "config" not in content,  # the parser would drop the other's trainer as a whole, and ignore a list
        f"{path} has the key config, but a configuration cannot contain another: give both to the command, as in "
        f"--config OTHER --config {path}.",
    )
    without = [key for key, value in content.items() if value is None]
    require(len(without) < len(content), f"{path} has no value under {', '.join(map(str, without))}.")
    trainer = content.get("trainer", {})
    require(  # the parser would drop all earlier values of the trainer, and perhaps this one
        isinstance(trainer, Mapping | str),
        f"trainer of {path} must be a mapping with the parameters of the trainer, or a file with one, got {shown(trainer)}.",
    )
    return content


def check_inner_files(config: Any) -> None:
    """Check the files that a configuration has in place of mappings, as in `--trainer FILE`.

    Raises:
        UserError: `read_strictly` refuses one of them.
    """
    if isinstance(config, Mapping) and "__path__" in config:
        read_strictly(config["__path__"].absolute, "it has the parameters of a class or a group in YAML")
    inner = config.values() if isinstance(config, Mapping) else config if isinstance(config, list) else ()
    for one in inner:
        check_inner_files(one)


def check_depth(words: Sequence[str]) -> None:
    """Check that no value of a command line is nested so deeply that the parser would take seconds to refuse it.

    Raises:
        UserError: there is such a value.
    """
    for flag, value in _flags(words):
        if flag not in CONFIG and value.count("[") + value.count("{") > MAX_DEPTH and is_too_deep(value):
            raise UserError(f"the value of {flag} is nested more than {MAX_DEPTH} levels deep.")


def check_numbers(words: Sequence[str], config: Any) -> None:
    """Check that a command line has no number that YAML reads differently from most readers, such as 010 or 1:30.

    Args:
        words: the command line.
        config: result of the parser; a value that it keeps as a text is accepted.

    Raises:
        UserError: there is such a number.
    """
    texts = {leaf for leaf in _leaves(config) if isinstance(leaf, str)}
    for flag, value in _flags(words):
        if flag in CONFIG:
            continue
        with suppress(yaml.YAMLError, RecursionError):
            for node in _nodes(yaml.compose(value, Loader=yaml.SafeLoader)):
                if is_misread(node) and node.value not in texts:
                    number = yaml.safe_load(node.value)
                    raise UserError(
                        f"{flag} has {node.value}, which YAML reads as {number}: write the number that you mean."
                    )


def _flags(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the flags of a command line with their values."""
    split = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    yield from ((flag, value) for flag, value in pairwise(split) if flag.startswith("-"))


def _nodes(node: yaml.Node | None) -> Iterator[yaml.Node]:
    for part in getattr(node, "value", ()) if isinstance(node, yaml.CollectionNode) else ():
        for inner in part if isinstance(part, tuple) else (part,):
            yield from _nodes(inner)
    if node is not None:
        yield node


def _leaves(config: Any) -> Iterator[Any]:
    inner = config.values() if isinstance(config, Mapping) else config if isinstance(config, list) else None
    if inner is None:
        yield config
    for one in inner or ():
        yield from _leaves(one)


CONFIG, COMMAND_LINE = ("-c", "--config"), "the command line"
WORK = ("local_epochs", "local_steps")


def replaced_work(words: Sequence[str], environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the flag that drops the earlier of local_epochs and local_steps, and a sentence about it; None to drop neither.

    If the two come from different sources, the later one replaces the earlier. The order of the sources is: the environment's
    file, its variables, and the command line, with its files in their order. The trainer refuses two values of one file, two
    variables or two flags.

    Args:
        words: the command line, from the name of the command on.
        environment: the environment variables.
    """
    last_mentions: dict[str, tuple[str, Any]] = {}  # by key, the file or flag that gives it last, and the value
    for flag, value, source in _sources(words, environment):
        if flag in CONFIG:
            trainer = (check_given(value) or {}).get("trainer")
            mentions = {key: trainer[key] for key in WORK if key in trainer} if isinstance(trainer, Mapping) else {}
        else:
            key = flag.removeprefix("--trainer.")
            mentions = {key: None if value == "null" else value} if key in WORK else {}
        for key, work in mentions.items():
            last_mentions.pop(key, None)  # so that the mapping is in the order of the last mentions
            if work is not None:
                last_mentions[key] = (source, work)
    if len({source for source, _ in last_mentions.values()}) < 2:
        return None
    (dropped, (source, _)), (last, (_, work)) = last_mentions.items()
    return f"--trainer.{dropped}=null", f"trainer.{last} {work} replaces trainer.{dropped} of {source}."


def _sources(words: Sequence[str], environment: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield flags with their values and the names of their sources, the environment's first."""
    prefix = f"PL_{words[0].upper()}__" if words and not words[0].startswith("-") else None
    if prefix is not None:
        of_environment = {"--config": "CONFIG"} | {f"--trainer.{key}": f"TRAINER__{key.upper()}" for key in WORK}
        for flag, variable in of_environment.items():
            if (value := environment.get(prefix + variable)) is not None:
                yield flag, value, value if flag in CONFIG else "the environment"
    for flag, value in _flags(words):
        yield flag, value, value if flag in CONFIG else COMMAND_LINE


def check_group(values: Any, owner: Any, key: str) -> None:
    """Check that the parsed parameters of a class contain no null where their types do not allow it.

    Args:
        values: values of the parameters; classes as mappings with class_path and init_args.
        owner: class with these parameters.
        key: key of the class in the configuration.

    Raises:
        UserError: a parameter is null, or is not a mapping where it must be one.
    """
    allowed = f"a mapping with the parameters of {owner.__name__}"
    require(isinstance(values, Mapping), f"{key} must be {allowed}, got {shown(values)}.")
    for name, parameter in parameters_of(owner).items():
        if name not in values:
            continue
        value, hint, shown_key = values[name], parameter.annotation, f"{key}.{name}"
        group = group_of(hint)
        is_null = value is None and parameter.default is not None and not allows_null(hint)
        require(
            not is_null and not _lacks_mapping(value, hint),
            f"{shown_key} must be {in_words(hint)}, got {shown(value)}.",
        )
        if group is not None and isinstance(value, Mapping) and "class_path" not in value:
            check_group(value, group, shown_key)
        for inner in value if isinstance(value, list) else [value]:
            check_class(inner, shown_key)


def _lacks_mapping(value: Any, hint: Any) -> bool:
    """True if a value stands where only a mapping may, such as one for the trainer's clock."""
    group = group_of(hint)
    if group is None or value is None or not {*members_of(hint)} <= {group, NoneType}:
        return False
    return not isinstance(value, Mapping | group)


def check_class(value: Any, key: str) -> None:
    """Check the parameters of a class in a mapping with class_path; accept any other value."""
    value_class = locate(value["class_path"]) if isinstance(value, Mapping) and value.get("class_path") else None
    if isinstance(value_class, type):
        check_group(value.get("init_args") or {}, value_class, key)


def free_parameters(config: Any) -> dict[str, str]:
    """Return by name the classes of a configuration that get a parameter under `dict_kwargs`, which the parser does not check.

    >>> free_parameters({"model": {"class_path": "Net", "init_args": {}, "dict_kwargs": {"x": 3}}})
    {'x': 'Net'}
    """
    if isinstance(config, list):
        config = dict(enumerate(config))
    if not isinstance(config, Mapping):
        return {}
    free = (
        {name: str(config["class_path"]) for name in config.get("dict_kwargs") or {}} if "class_path" in config else {}
    )
    return {name: owner for inner in config.values() for name, owner in free_parameters(inner).items()} | free


def check_free_parameters(error: BaseException, free: Mapping[str, str]) -> None:
    """Explain the error of a class that does not take a parameter under `dict_kwargs`; return for any other error.

    Raises:
        UserError: a class does not have the parameter.
    """
    for cause in causes_of(error):
        refused = re.search(r"got an unexpected keyword argument '(\w+)'", str(cause))
        if refused and (owner := free.get(refused[1])):
            raise UserError(_no_free_parameter(owner, refused[1])) from error


def _no_free_parameter(owner: str, name: str) -> str:
    names = nearest(name, set(parameters_of(locate(owner))) - {"params", "optimizer"})
    return f"{owner.rpartition('.')[2]} has no parameter {name!r}, given under dict_kwargs; {names}."


def check_optimizer(config: Mapping[str, Any]) -> None:
    """Check that the optimiser, its scheduler and the trainer's choice of an optimiser go together.

    Raises:
        UserError: there is a scheduler without an optimiser, the trainer replaces the optimiser, or one of them has a parameter
            under `dict_kwargs`, which LightningCLI ignores.
    """
    for name, owner in free_parameters([config.get("optimizer"), config.get("lr_scheduler")]).items():
        raise UserError(_no_free_parameter(owner, name))
    optimizer, scheduler = (
        str(part.get("class_path", key)).rpartition(".")[2] if (part := config.get(key)) else None
        for key in ("optimizer", "lr_scheduler")
    )
    require(
        optimizer is not None or scheduler is None,
        f"lr_scheduler {scheduler} needs an optimizer: also give --optimizer, such as --optimizer SGD --optimizer.lr 0.1.",
    )
    require(
        optimizer is None or config["trainer"]["client_optimizer"] == "module",
        f"optimizer {optimizer} and trainer.client_optimizer sgd exclude each other: both replace the module's optimiser; "
        "give only --optimizer SGD with its learning rate, or leave --optimizer out.",
    )

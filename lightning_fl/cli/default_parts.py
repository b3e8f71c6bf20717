"""Default parts of parameters: a class that the user names instead starts from its own defaults.

The parser merges the user's values into the default. FedOpt, whose default is SGD(lr=1.0, momentum=0.9), would then train with
momentum 0.9 if the user names SGD with another learning rate, and with lr 1.0 if the user names Adam. Parameters without a class
still change the default part: `--algorithm.server_optimizer.lr 0.5` keeps its momentum.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from jsonargparse import Namespace, dict_to_namespace


def named_parts(parameters: Any) -> frozenset[str]:
    """Return the parameters whose value names a class."""
    return frozenset(key for key, value in _top(parameters) if isinstance(value, str) or "class_path" in _keys(value))


def with_default_init_args(parser: ArgumentParser, parameters: Any, earlier: Any) -> Any:
    """Return parameters of a class, in which a part without a class is completed by the default part.

    Args:
        parser: parser of the class.
        parameters: parameters by name.
        earlier: parameters that were given before, which the parser merges itself.
    """
    earlier_keys = {key for key, _ in _top(earlier)}
    for key, value in _top(parameters):
        default = _default_part(parser, key)
        if default is None or key in earlier_keys or "class_path" in _keys(value) or not _keys(value):
            continue
        init_args = value["init_args"] if _keys(value) == {"init_args"} else value
        default["init_args"].update(
            init_args if isinstance(init_args, Namespace) else dict_to_namespace(dict(init_args))
        )
        parameters = deepcopy(parameters)
        parameters[key] = default
    return parameters


def with_default_parts(parser: ArgumentParser, words: Sequence[str], earlier: Any) -> Any:
    """Return the parameters that were given before, and the default part of which a flag now gives a parameter.

    Args:
        parser: parser of a class.
        words: flags with the parameters of the class.
        earlier: parameters that were given before; None without.
    """
    for word in words:
        key, _, inner = word.partition("=")[0].removeprefix("--").partition(".")
        default = _default_part(parser, key)
        if default is not None and inner and inner != "class_path" and key not in {name for name, _ in _top(earlier)}:
            earlier = Namespace() if earlier is None else deepcopy(earlier)
            earlier[key] = default
    return earlier


def _default_part(parser: ArgumentParser, key: str) -> Namespace | None:
    """Return a copy of the class and the parameters of a default part; None if there is none, or it has no parameters."""
    default = next((action.default for action in parser._actions if action.dest == key), None)
    if not {"class_path", "init_args"} <= _keys(default):
        return None
    return dict_to_namespace(default) if isinstance(default, Mapping) else deepcopy(default)


def _top(parameters: Any) -> list[tuple[str, Any]]:
    """Return the parameters with their values, without parameters of inner parts."""
    if isinstance(parameters, Namespace):
        return list(vars(parameters).items())
    return list(parameters.items()) if isinstance(parameters, Mapping) else []


def _keys(value: Any) -> set[str]:
    return {key for key, _ in _top(value)}

"""Parts as users give them: an object, a class, its name, or a mapping with class_path and init_args, as in a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from inspect import Parameter, isabstract
from pydoc import locate
from types import ModuleType
from typing import Any

from lightning_fl import aggregators, codecs, exchanges, personal, rules, steps
from lightning_fl.checks import parameters_of
from lightning_fl.checks.other_names import unknown_class
from lightning_fl.errors import nearest, require
from lightning_fl.personal import PersonalLayers
from lightning_fl.slots import Aggregator, Codec, Exchange, Personal, Rule, Step

KINDS: dict[str, tuple[type, ModuleType]] = {
    "rule": (Rule, rules),
    "uplink": (Codec, codecs),
    "downlink": (Codec, codecs),
    "exchange": (Exchange, exchanges),
    "aggregator": (Aggregator, aggregators),
    "steps": (Step, steps),
    "personal": (Personal, personal),
}
"""Interface and package of a slot's parts."""


def made(slot: str, part: Any) -> Any:
    """Return the part that a user gives for a slot: an object, a class, the name of one of the package's classes, or a mapping.

    Raises:
        UserError: the value is no part of this slot, or its class needs arguments.

    >>> made("uplink", "Dense"), made("rule", rules.Proximal)
    (Dense(), Proximal(mu=0.001))
    >>> made("rule", {"class_path": "Proximal", "init_args": {"mu": 0.1}})
    Proximal(mu=0.1)
    >>> made("uplink", codecs.ErrorFeedback)
    Traceback (most recent call last):
    lightning_fl.errors.UserError: uplink needs an object of ErrorFeedback, which has to know codec: give ErrorFeedback(codec=…).
    """
    kind, package = KINDS[slot]
    if isinstance(part, kind):
        return part
    names = [name for name in package.__all__ if _is_part(getattr(package, name), kind)]
    arguments: dict[str, Any] = {}
    if isinstance(part, Mapping):
        part, arguments = _class_and_arguments(slot, part)
    if isinstance(part, str):
        found = getattr(package, part) if part in names else locate(part) if "." in part else None
        require(_is_part(found, kind), f"{slot} {part!r} is unknown; {unknown_class(part, names)}.")
        part = found
    shown = part.__name__ if isinstance(part, type) else repr(part)
    require(
        _is_part(part, kind),
        f"{slot} must be of kind {kind.__name__}, an object, a class or its name, got {shown}; {nearest(shown, names)}.",
    )
    parameters = parameters_of(part)
    for argument in arguments:
        require(argument in parameters, f"{shown} has no parameter {argument!r}; {nearest(argument, parameters)}.")
    needed = [name for name, one in parameters.items() if one.default is Parameter.empty and name not in arguments]
    listed = ", ".join(needed)
    require(
        not needed,
        f"{slot} needs an object of {shown}, which has to know {listed}: give {shown}({'=…, '.join(needed)}=…).",
    )
    return part(**{name: _inner(value) for name, value in arguments.items()})


def _class_and_arguments(slot: str, given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the class's name and the arguments of a mapping that stands for a part."""
    require(
        "class_path" in given and given.keys() <= {"class_path", "init_args"},
        f"{slot} as a mapping has the keys class_path and init_args, got {', '.join(map(str, given))}.",
    )
    arguments = given.get("init_args") or {}
    require(
        isinstance(arguments, Mapping),
        f"init_args of {given['class_path']} must be a mapping with its parameters, got {arguments!r}.",
    )
    return str(given["class_path"]), {str(name): value for name, value in arguments.items()}


def _inner(value: Any) -> Any:
    """Return an argument of a part in which mappings that stand for parts are these parts."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_inner, value))
    if not isinstance(value, Mapping) or "class_path" not in value:
        return value
    name = str(value["class_path"])
    found = locate(name) if "." in name else None
    for slot, (kind, package) in KINDS.items():
        if name in package.__all__ or _is_part(found, kind):
            return made(slot, value)
    return value


def made_steps(steps: Any) -> tuple[Step, ...]:
    """Return the server's steps that a user gives, one or several.

    Raises:
        UserError: one of them is no step, or its class needs arguments.
    """
    several = isinstance(steps, Iterable) and not isinstance(steps, (str, Mapping))
    return tuple(made("steps", step) for step in (steps if several else [steps]))


def made_personal(parts_or_names: Any) -> tuple[Personal, ...]:
    """Return the parts that say what clients keep; names of layers become `PersonalLayers`.

    Raises:
        UserError: one of them is neither, or its class needs arguments.

    >>> made_personal(["network.fc", "KeptModel", "network.bias"])
    (PersonalLayers(names=('network.fc', 'network.bias')), KeptModel())
    """
    require(
        isinstance(parts_or_names, Iterable) and not isinstance(parts_or_names, (str, Mapping)),
        f"personal is a list of parts, or of names of layers, got {parts_or_names!r}: give [{parts_or_names!r}].",
    )
    several = list(parts_or_names)
    layers = [name for name in several if isinstance(name, str) and name not in personal.__all__]
    for name in layers:
        meant = get_close_matches(name, personal.__all__, 1, 0.8)
        require(not meant, f"personal {name!r} is unknown; did you mean {''.join(meant)!r}?")
    parts = [made("personal", part) for part in several if part not in layers]
    return (*([PersonalLayers(layers)] if layers else []), *parts)


def _is_part(value: Any, kind: type) -> bool:
    return isinstance(value, type) and issubclass(value, kind) and not isabstract(value)

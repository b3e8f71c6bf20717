"""Parts as users give them: objects, or classes and their names, as on the command line."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from inspect import Parameter, isabstract
from types import ModuleType
from typing import Any

from lightning_fl import aggregators, codecs, exchanges, personal, rules, steps
from lightning_fl.checks import parameters_of
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
    """Return the part that a user gives for a slot: an object, a class, or the name of one of the package's classes.

    Raises:
        UserError: it is no part of this slot, or its class needs arguments.

    >>> made("uplink", "Dense"), made("rule", rules.Proximal)
    (Dense(), Proximal(mu=0.001))
    >>> made("uplink", codecs.ErrorFeedback)
    Traceback (most recent call last):
    lightning_fl.errors.UserError: uplink needs an object of ErrorFeedback, which has to know codec: give ErrorFeedback(codec=…).
    """
    kind, package = KINDS[slot]
    if isinstance(part, kind):
        return part
    names = [name for name in package.__all__ if _is_part(getattr(package, name), kind)]
    if isinstance(part, str):
        require(part in names, f"{slot} {part!r} is unknown; {nearest(part, names)}.")
        part = getattr(package, part)
    shown = part.__name__ if isinstance(part, type) else repr(part)
    require(
        _is_part(part, kind),
        f"{slot} must be of kind {kind.__name__}, an object, a class or its name, got {shown}; {nearest(shown, names)}.",
    )
    needed = [name for name, parameter in parameters_of(part).items() if parameter.default is Parameter.empty]
    listed = ", ".join(needed)
    require(
        not needed,
        f"{slot} needs an object of {shown}, which has to know {listed}: give {shown}({'=…, '.join(needed)}=…).",
    )
    return part()


def made_steps(steps: Any) -> tuple[Step, ...]:
    """Return the server's steps that a user gives, one or several.

    Raises:
        UserError: one of them is no step, or its class needs arguments.
    """
    several = isinstance(steps, Iterable) and not isinstance(steps, str)
    return tuple(made("steps", step) for step in (steps if several else [steps]))


def made_personal(parts_or_names: Any) -> tuple[Personal, ...]:
    """Return the parts that say what clients keep; names of layers become `PersonalLayers`.

    Raises:
        UserError: one of them is neither, or its class needs arguments.

    >>> made_personal(["network.fc", "KeptModel", "network.bias"])
    (PersonalLayers(names=('network.fc', 'network.bias')), KeptModel())
    """
    require(
        isinstance(parts_or_names, Iterable) and not isinstance(parts_or_names, str),
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

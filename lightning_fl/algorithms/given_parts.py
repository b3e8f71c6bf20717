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


def made(slot: str, given: Any) -> Any:
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
    if isinstance(given, kind):
        return given
    known = [name for name in package.__all__ if _is_part(getattr(package, name), kind)]
    if isinstance(given, str):
        require(given in known, f"{slot} {given!r} is unknown; {nearest(given, known)}.")
        given = getattr(package, given)
    shown = given.__name__ if isinstance(given, type) else repr(given)
    require(
        _is_part(given, kind),
        f"{slot} must be of kind {kind.__name__}, an object, a class or its name, got {shown}; {nearest(shown, known)}.",
    )
    needed = [name for name, parameter in parameters_of(given).items() if parameter.default is Parameter.empty]
    listed = ", ".join(needed)
    require(
        not needed,
        f"{slot} needs an object of {shown}, which has to know {listed}: give {shown}({'=…, '.join(needed)}=…).",
    )
    return given()


def made_steps(given: Any) -> tuple[Step, ...]:
    """Return the server's steps that a user gives, one or several.

    Raises:
        UserError: one of them is no step, or its class needs arguments.
    """
    several = isinstance(given, Iterable) and not isinstance(given, str)
    return tuple(made("steps", step) for step in (given if several else [given]))


def made_personal(given: Any) -> tuple[Personal, ...]:
    """Return the parts that say what clients keep; names of layers become `PersonalLayers`.

    Raises:
        UserError: one of them is neither, or its class needs arguments.

    >>> made_personal(["network.fc", "KeptModel", "network.bias"])
    (PersonalLayers(names=('network.fc', 'network.bias')), KeptModel())
    """
    require(
        isinstance(given, Iterable) and not isinstance(given, str),
        f"personal is a list of parts, or of names of layers, got {given!r}: give [{given!r}].",
    )
    several = list(given)
    layers = [name for name in several if isinstance(name, str) and name not in personal.__all__]
    for name in layers:
        meant = get_close_matches(name, personal.__all__, 1, 0.8)
        require(not meant, f"personal {name!r} is unknown; did you mean {''.join(meant)!r}?")
    parts = [made("personal", part) for part in several if part not in layers]
    return (*([PersonalLayers(layers)] if layers else []), *parts)


def _is_part(given: Any, kind: type) -> bool:
    return isinstance(given, type) and issubclass(given, kind) and not isabstract(given)

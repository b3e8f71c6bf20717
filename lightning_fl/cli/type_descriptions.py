"""Types of a class's parameters, in words for error sentences."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import InitVar, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin


def members_of(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or any other type as the only member; without the ranges that annotations have.

    >>> members_of(Annotated[int, "at least 1"] | None)
    (<class 'int'>, <class 'NoneType'>)
    """
    if get_origin(hint) is Annotated:
        return members_of(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return tuple(inner for member in get_args(hint) for inner in members_of(member))
    return (hint,)


def choices_of(hint: Any) -> list[str]:
    """Return the values of a bool or a Literal as text; empty for any other type."""
    if get_origin(hint) is Annotated:
        return choices_of(get_args(hint)[0])
    if hint is bool:
        return ["true", "false"]
    return [str(value) for value in get_args(hint)] if get_origin(hint) is Literal else []


def group_of(hint: Any) -> type | None:
    """Return the dataclass that a mapping fills without naming it, such as the trainer's clock; None if there is none."""
    plain = [member for member in members_of(hint) if is_dataclass(member) and not inspect.isabstract(member)]
    return next((member for member in plain if isinstance(member, type) and fields(member)), None)


def allows_null(hint: Any) -> bool:
    """True if null is a value of a type.

    >>> allows_null(float | None), allows_null(float)
    (True, False)
    """
    return any(member in (None, NoneType, Any, object) or not _is_known(member) for member in members_of(hint))


def in_words(hint: Any) -> str:
    """Return a type as the end of "must be …".

    >>> in_words(int | float), in_words(dict[str, list[int]]), in_words(Literal["norm", "value"] | None)
    ('int or float', 'a mapping from str to a list of int', 'norm or value or null')
    """
    return " or ".join(dict.fromkeys(_in_words(member) for member in members_of(hint)))


def shown(value: Any) -> str:
    """Return a value as YAML writes it.

    >>> shown(None), shown("many"), shown(True)
    ('null', 'many', 'true')
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value) or "nothing"


def _is_known(hint: Any) -> bool:
    return isinstance(hint, type) or get_origin(hint) is not None


def _in_words(hint: Any) -> str:
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if hint in (None, NoneType):
        return "null"
    if isinstance(hint, InitVar):
        return in_words(hint.type)
    if origin is Literal:
        return " or ".join(map(str, inner))
    if not isinstance(origin, type):
        return str(hint).removeprefix("typing.")
    if group := group_of(origin):
        return f"a mapping with {', '.join(field.name for field in fields(group))}"
    made = inner[-1] if origin is Callable and inner else Any
    if made is not Any and isinstance(made, type) and made.__module__ != "builtins":
        return in_words(made)  # given by class_path and init_args, from which the parser makes the function
    if origin is Callable or origin in (str, int, float, bool):
        return origin.__name__.lower()
    if issubclass(origin, Mapping):
        return f"a mapping from {in_words(inner[0])} to {in_words(inner[1])}" if len(inner) == 2 else "a mapping"
    if issubclass(origin, Iterable):
        return f"a list of {in_words(inner[0])}" if inner else "a list"
    return origin.__name__

"""Allowed values of parameters, given by their annotations.

    alpha: Annotated[float, Interval(gt=0, le=1), Called("alpha, the share of numbers that are sent,")] = 0.01
    index_bits: Literal["log", "golomb"] = "log"

The bounds come from the package annotated-types. They apply to the numbers of a union; an `int` with bounds allows only whole
numbers. A `Literal` and a bool allow their values. Other annotations allow everything; a default is always allowed.
Annotations are read when the first object of a class is made, not when it is imported.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, fields
from functools import lru_cache, partial, wraps
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Interval, Le, Lt

from lightning_fl.checks import values

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Called:
    """Name of a parameter in the error about its value. In `words`, {} is its own name and {kind} the name of its class."""

    words: str


@dataclass(frozen=True)
class Rounds:
    """Mark of a parameter that is a number of rounds: a count of at least 1, or a fraction of the run in (0, 1]."""


class Checked:
    """Base class of dataclasses whose annotations give the allowed values of their fields.

    The values are checked before the `__post_init__` of a derived class, which need not call the one of its bases.

    Raises:
        UserError: a value is not allowed.
    """

    _called = "{}"
    """Name of a field in the error about its value, unless its annotation has `Called`; see there."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if own := vars(cls).get("__post_init__"):
            cls.__post_init__ = _after_checks(own)  # type: ignore[method-assign]

    def __post_init__(self, *_: Any) -> None:
        check_fields(self)


def check_fields(part: Any) -> None:
    """Raise `UserError` if a field of a dataclass has a value that its annotation does not allow.

    Dataclasses with command-line flags of their own, such as the trainer's clock, call this in `__post_init__`: the parser gives
    a dataclass flags only if all its bases are dataclasses.
    """
    kind: Any = type(part)
    parameters = _fields_of(kind)
    given = {name: getattr(part, name) for name in parameters}
    _check(given, parameters, getattr(part, "_called", "{}"), kind.__name__)


def checked(function: Function) -> Function:
    """Return the function with a check of the given arguments by their annotations.

    >>> @checked
    ... def take(share: Annotated[float, Interval(ge=0, lt=1)] = 0.5) -> None: ...
    >>> take(share=1.0)
    Traceback (most recent call last):
    lightning_fl.errors.UserError: share must lie in [0, 1), got 1.0.
    """

    @wraps(function)
    def check_first(*arguments: Any, **options: Any) -> Any:
        check_arguments(function, arguments, options)
        return function(*arguments, **options)

    return check_first  # type: ignore[return-value]


def check_arguments(function: Callable[..., Any], arguments: Iterable[Any], options: Mapping[str, Any]) -> None:
    """Raise `UserError` if an argument of a function is not allowed by its annotation."""
    names, parameters = _parameters_of(function)
    _check({**dict(zip(names, arguments, strict=False)), **options}, parameters, "{}", function.__qualname__)


def check_ranges(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise `UserError` if a value is not allowed by the annotation of the parameter of its name; a bool may be any object."""
    _, parameters = _parameters_of(function)
    known = {
        name: (default, members)
        for name, (default, members) in parameters.items()
        if name in given and any(member.check and member.kind is not bool for member in members)
    }
    _check(given, known, "{}", function.__qualname__)


def check_value(name: str, value: Any, hint: Any) -> None:
    """Raise `UserError` if a type with its ranges does not allow a value."""
    if members := _members(hint):
        _check({name: value}, {name: (inspect.Parameter.empty, members)}, "{}", "")


def _after_checks(own: Callable[..., None]) -> Callable[..., None]:
    """Return a `__post_init__` that checks the fields first."""

    @wraps(own)
    def check_first(self: Any, *arguments: Any) -> None:
        check_fields(self)
        own(self, *arguments)

    return check_first


# ------------------------------------------------------------------------------------------------- reading annotations


class _Member(NamedTuple):
    """One type of a union, with the check of its values (None if all are allowed) and the parameter's name in errors."""

    kind: Any
    check: Callable[[str, Any], None] | None
    called: str | None

    def takes(self, value: Any) -> bool:
        """True if the value is of this type, so that its check decides."""
        kind = get_origin(self.kind) or self.kind
        if kind is Literal:
            choices = get_args(self.kind)
            return value in choices or (
                isinstance(value, str) and len(choices) > 1
            )  # what looks like a misspelt choice
        if kind in (int, float):
            return values.is_whole(value) if kind is int else values.is_number(value)
        try:
            return isinstance(value, kind)
        except TypeError:  # no class, or one such as a protocol, which does not know its objects
            return True


Members = tuple[_Member, ...]
Parameters = dict[str, tuple[Any, Members]]
"""Default and types of each parameter that does not allow all values."""


def _check(given: Mapping[str, Any], parameters: Parameters, called: str, owner: str) -> None:
    """Check each value by its type in the union; a value of none of the types as the number in the union, if there is one."""
    for name, (default, members) in parameters.items():
        value = given.get(name, default)
        if value is not default:
            checks = sorted((one for one in members if one.check), key=lambda one: one.kind in (int, float))
            takers = [one for one in members if one.takes(value)] or checks[-1:]
            member = min(takers, key=lambda one: one.check is not None)
            if member.check:
                member.check((member.called or called).format(name, kind=owner), value)


@lru_cache(maxsize=1024)
def _fields_of(kind: type) -> Parameters:
    """Return the fields of a dataclass that do not allow all values.

    A field that a derived class declares again without a range keeps the range of its base.
    """
    ranges: dict[str, Members] = {}
    for base in reversed(kind.__mro__):
        module = sys.modules.get(base.__module__)
        ranges |= _ranges_of(base, vars(module) if module else {})
    return {one.name: (one.default, ranges[one.name]) for one in fields(kind) if one.init and one.name in ranges}


@lru_cache(maxsize=1024)
def _parameters_of(function: Callable[..., Any]) -> tuple[list[str], Parameters]:
    """Return the names of a function's positional parameters, and the parameters that do not allow all values."""
    parameters = inspect.signature(function).parameters
    names = [name for name, one in parameters.items() if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    function = inspect.unwrap(function)
    ranges = _ranges_of(function, function.__globals__)
    return names, {name: (parameters[name].default, ranges[name]) for name in parameters if name in ranges}


def _ranges_of(annotated: Any, known: dict[str, Any]) -> dict[str, Members]:
    """Return the types of the names that a function, or a class itself, annotates, if they do not allow all values.

    Args:
        annotated: the class or function.
        known: names of its module, by which annotations are resolved.
    """
    hints: dict[str, Any] = {}
    for name, annotation in inspect.get_annotations(annotated).items():
        try:
            hints |= get_type_hints(SimpleNamespace(__annotations__={name: annotation}), known, include_extras=True)
        except Exception as error:  # noqa: PERF203 -- a name that only a type checker knows must not spoil the others
            if any(mark in str(annotation) for mark in ("Annotated[", "Literal[")):
                # Lightning takes seconds, and commands that need no run import this file.
                from lightning.pytorch.utilities.rank_zero import rank_zero_warn

                rank_zero_warn(
                    f"{name} of {annotated.__name__} may have any value, because its annotation cannot be read in its module: "
                    f"{error}."
                )
    found = {name: _members(hint) for name, hint in hints.items()}
    return {name: members for name, members in found.items() if members}


def _members(hint: Any) -> Members:
    """Return the types of a union with their checks; () if all values are allowed."""
    marked = list(_marked(hint, ()))
    choices = [choice for kind, _ in marked for choice in _choices_of(kind)]
    members = tuple(
        _Member(kind, _check_of(kind, marks, choices), next((m.words for m in marks if isinstance(m, Called)), None))
        for kind, marks in marked
    )
    return members if any(member.check for member in members) else ()


def _marked(hint: Any, marks: tuple[Any, ...]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield each type of a union with its marks and the marks of the whole union."""
    origin = get_origin(hint)
    if origin is Annotated:
        inner, *own = get_args(hint)
        yield from _marked(inner, (*own, *marks))
    elif origin in (Union, UnionType):
        for inner in get_args(hint):
            yield from _marked(inner, marks)
    else:
        yield hint, marks


def _choices_of(kind: Any) -> tuple[Any, ...]:
    if get_origin(kind) is Literal:
        return get_args(kind)
    return {NoneType: (None,), bool: (True, False)}.get(kind, ())


def _check_of(kind: Any, marks: tuple[Any, ...], choices: list[Any]) -> Callable[[str, Any], None] | None:
    """Return the check of a type with its marks, given the choices of the whole union; None if it allows all its values."""
    if kind is bool or get_origin(kind) is Literal:
        return partial(values.check_choice, allowed=choices)
    if kind in (int, float) and any(isinstance(mark, Rounds) for mark in marks):
        return values.check_rounds
    single = [bound for mark in marks for bound in (mark if isinstance(mark, Interval) else (mark,))]
    bounds = {type(one).__name__.lower(): astuple(one)[0] for one in single if isinstance(one, Ge | Gt | Le | Lt)}
    if not bounds or kind not in (int, float):
        return None
    low: Any = bounds.get("ge", bounds.get("gt"))
    high: Any = bounds.get("le", bounds.get("lt"))
    if kind is int:
        least = -values.MOST if low is None else low + ("gt" in bounds)
        most = values.MOST if high is None else high - ("lt" in bounds)
        return partial(values.check_whole, minimum=least, maximum=most)
    if high is None:
        if "ge" in bounds:
            return partial(values.check_at_least, minimum=low)
        return values.check_positive if low == 0 else partial(values.check_above, minimum=low)
    ends: Any = ("(" if "gt" in bounds else "[") + (")" if "lt" in bounds else "]")
    return partial(values.check_between, low=-values.LARGEST if low is None else low, high=high, ends=ends)

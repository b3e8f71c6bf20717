"""Checks of user input, float comparisons with a tolerance for rounding, and the parameters of a class.

A check raises a `UserError` with the value received and what is allowed.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
import tokenize
from collections.abc import Callable, Iterable, Mapping
from functools import cache, lru_cache, wraps
from inspect import Parameter
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, Literal, TypeGuard, TypeVar, get_type_hints

from lightning_fl.errors import nearest, require

ROUNDING = 1e-6
"""Largest relative distance of a computed number from the exact one; float32 has some 6e-8 for each operation."""
T = TypeVar("T")
HOOK_OWNERS = ("core.module.LightningModule", "core.datamodule.LightningDataModule", "callbacks.callback.Callback")
NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


LARGEST, SMALLEST = 3.4e38, 1.2e-38
"""Bounds of positive numbers: in float32, in which models are trained, larger ones are infinite and smaller ones are 0."""
MOST = 10**9
"""Largest count of anything."""
LARGEST_SEED = 2**32 - 1
"""Largest seed, as in Lightning's `seed_everything`."""


def is_whole(value: Any) -> bool:
    """True if `value` is a whole number (Python's or NumPy's, and not a bool)."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_real(value: Any) -> bool:
    """True if `value` is a real number (and not a bool) that is finite in float32.

    >>> [is_real(value) for value in (1.5, 1e300, float("nan"), 10**400)]
    [True, False, False, False]
    """
    return _is_number(value) and bool(abs(value) <= LARGEST)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def check_whole(name: str, value: Any, minimum: int, maximum: int = MOST) -> None:
    """Raise `UserError` unless `value` is a whole number from `minimum` to `maximum`.

    >>> check_whole("max_rounds", True, 0)
    Traceback (most recent call last):
    lightning_fl.errors.UserError: max_rounds must be a whole number of at least 0, got True.
    """
    too_large = is_whole(value) and value > maximum
    allowed = f"from {minimum} to {maximum}" if too_large or maximum != MOST else f"of at least {minimum}"
    inside = is_whole(value) and minimum <= value <= maximum
    require(inside, f"{name} must be a whole number {allowed}, got {value!r}.")


def check_between(name: str, value: Any, low: float, high: float, ends: Literal["[]", "[)", "(]", "()"] = "[]") -> None:
    """Raise `UserError` unless `value` is a number between `low` and `high`; `ends` says which of them are allowed.

    A `low` of 0 that is not allowed itself excludes numbers that are 0 in float32.

    >>> check_between("dropout_rate", 1.0, 0, 1, "[)")
    Traceback (most recent call last):
    lightning_fl.errors.UserError: dropout_rate must lie in [0, 1), got 1.0.
    """
    inside = (
        is_real(value)
        and (value >= low if ends[0] == "[" else value > low)
        and (value <= high if ends[1] == "]" else value < high)
        and (value >= SMALLEST or low != 0 or ends[0] == "[")
    )
    require(inside, f"{name} must lie in {ends[0]}{low}, {high}{ends[1]}, got {value!r}.")


def check_at_least(name: str, value: Any, minimum: float) -> None:
    """Raise `UserError` unless `value` is a number of at least `minimum` that is finite in float32."""
    allowed = f"from {minimum} to {LARGEST}" if _is_number(value) and value > LARGEST else f"at least {minimum}"
    require(is_real(value) and value >= minimum, f"{name} must be {allowed}, got {value!r}.")


def check_positive(name: str, value: Any) -> None:
    """Raise `UserError` unless `value` is a number above 0 that is neither infinite nor 0 in float32.

    >>> check_positive("epsilon", 1e300)
    Traceback (most recent call last):
    lightning_fl.errors.UserError: epsilon must be positive, from 1.2e-38 to 3.4e+38, got 1e+300.
    """
    allowed = f"positive, from {SMALLEST} to {LARGEST}" if _is_number(value) and value > 0 else "positive"
    require(is_real(value) and value >= SMALLEST, f"{name} must be {allowed}, got {value!r}.")


def check_rounds(name: str, value: Any) -> None:
    """Raise `UserError` unless `value` is a count of rounds of at least 1, or a fraction of the run in (0, 1]."""
    inside = 1 <= value <= MOST if is_whole(value) else is_real(value) and SMALLEST <= value <= 1
    require(
        inside, f"{name} must be a count of rounds of at least 1, or a fraction of the run in (0, 1], got {value!r}."
    )


def check_choice(name: str, value: Any, allowed: Iterable[Any]) -> None:
    """Raise `UserError` unless `value` is one of the allowed values; the sentence names the nearest one.

    >>> check_choice("runner", "stackd", ("auto", "serial", "stacked"))
    Traceback (most recent call last):
    lightning_fl.errors.UserError: runner 'stackd' is unknown; did you mean 'stacked'? Allowed: auto, serial, stacked.
    """
    choices = tuple(allowed)
    require(value in choices, f"{name} {value!r} is unknown; {nearest(str(value), map(str, choices))}.")


def reaches(value: Any, target: float, falls: bool = False) -> Any:
    """True where a value has reached the target to within rounding: 0.9 in float32, which is below 0.9, reaches 0.9.

    Args:
        value: a number, or an array of numbers; nan reaches nothing.
        target: the value to reach.
        falls: True if lower is better.

    >>> reaches(0.8999999762, 0.9), reaches(0.8999, 0.9), reaches(0.30000000000000004, 0.3, falls=True)
    (True, False, True)
    """
    slack = ROUNDING * abs(target)
    return value <= target + slack if falls else value >= target - slack


def whole_share(share: float, count: int) -> int:
    """Return ⌊share · count⌋ without rounding error: a share of 0.29 of 100 is 29, although 0.29 · 100 is 28.999… in floats.

    >>> whole_share(0.29, 100), whole_share(0.5, 3), whole_share(1.0, 7)
    (29, 1, 7)
    """
    return math.floor(share * count + 1e-9)


def needs_closure(optimizer: Any) -> bool:
    """True if a step of a torch optimiser needs the loss several times, as that of LBFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is Parameter.empty


def is_a(value: Any, *kinds: type[T]) -> TypeGuard[T]:
    """True if a value is an object of one of these classes, of Lightning's also by their name in `pytorch_lightning`.

    `pytorch_lightning` and `lightning.pytorch` are one library installed twice: the same code under two names.
    """
    return isinstance(value, kinds) or any(is_lightnings(type(value), kind) for kind in kinds)


def listed(given: T | Iterable[T], kind: type[T]) -> list[T]:
    """Return objects of a class of Lightning, of either name, as a list, whether one is given or several."""
    return [given] if is_a(given, kind) else list(given)  # type: ignore[arg-type]


def is_lightnings(found: type, kind: type) -> bool:
    """True if a class is derived from a class of Lightning, of either name."""
    return _lightning_name(kind) in _lightning_names(found)


def overrides(hook: str, owner: Any) -> bool:
    """True if a LightningModule, a LightningDataModule or a Callback, of either name of Lightning, has a hook of its own.

    Other objects have it if they have a method of this name.
    """
    parent = hook_owner(type(owner))
    if parent is None:
        return callable(getattr(owner, hook, None))
    from lightning.pytorch.utilities.model_helpers import is_overridden

    return is_overridden(hook, owner, parent)


def hook_owner(kind: Any) -> type | None:
    """Return the class of Lightning, of either name, from which a module, data module or callback has its hooks; else None."""
    return next((base for base in kind.__mro__ if _lightning_name(base) in HOOK_OWNERS), None)


@cache
def _lightning_names(kind: Any) -> frozenset[str]:
    """Return the names in Lightning of a class and of its bases."""
    return frozenset(name for base in kind.__mro__ if (name := _lightning_name(base)))


def _lightning_name(kind: type) -> str:
    """Return the name in Lightning of one of its classes, "" of others.

    >>> from lightning.pytorch import LightningModule
    >>> _lightning_name(LightningModule), _lightning_name(int)
    ('core.module.LightningModule', '')
    """
    for package in ("lightning.pytorch.", "pytorch_lightning."):
        if kind.__module__.startswith(package):
            return f"{kind.__module__.removeprefix(package)}.{kind.__qualname__}"
    return ""


class Remembering:
    """Base class whose objects keep the arguments of their constructor, because reports say how a run was set up.

    Attributes:
        given_arguments: value of each parameter by name, its default if none was given.
    """

    given_arguments: Mapping[str, Any] = MappingProxyType({})

    @classmethod
    def _refuse(cls, given: Iterable[str]) -> None:
        """Raise `UserError` if an argument is given that the class decides itself; called with the names of all arguments."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls.__init__ = _remembering(vars(cls)["__init__"])  # type: ignore[method-assign]


def _remembering(init: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor that first keeps its arguments, unless that of a subclass has kept its own."""

    @wraps(init)
    def remember(self: Any, *arguments: Any, **options: Any) -> None:
        if "given_arguments" not in vars(self):
            parameters = parameters_of(type(self))
            defaults = {name: p.default for name, p in parameters.items() if p.default is not Parameter.empty}
            given = dict(zip(parameters, arguments, strict=False)) | options
            self._refuse(given)
            vars(self)["given_arguments"] = defaults | given
        init(self, *arguments, **options)

    return remember


def parameters_of(found: Any) -> dict[str, Parameter]:
    """Return the parameters of a class with their types, including those that its bases take in its `**kwargs`.

    Those that its constructor passes to its bases by name are not among them.

    A type that a library imports only for type checkers becomes `Any`.
    """
    bases = [base for base in getattr(found, "__mro__", ()) if base is not object]
    return dict(_parameters_of(tuple(vars(base)["__init__"] for base in bases if "__init__" in vars(base))))


@lru_cache(maxsize=1024)  # every method that is made asks, and its source is read
def _parameters_of(constructors: tuple[Callable[..., None], ...]) -> dict[str, Parameter]:
    """Return the parameters of the constructors of a class and its bases."""
    named: dict[str, Parameter] = {}
    passed: set[str] = set()
    for init in constructors:
        try:
            hints = get_type_hints(init)
        except Exception:
            hints = {}
        given = list(inspect.signature(init).parameters.values())[1:]
        new = [p for p in given if p.kind in NAMED and p.name not in named and p.name not in passed]
        named |= {parameter.name: parameter.replace(annotation=hints.get(parameter.name, Any)) for parameter in new}
        if not any(parameter.kind == Parameter.VAR_KEYWORD for parameter in given):
            break
        passed |= _passed_on(init)
    return named


def _passed_on(init: Callable[..., None]) -> set[str]:
    """Return the names of the arguments that a constructor passes to its bases' constructors, besides `**kwargs`."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(init)))
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):  # without its source
        return set()
    calls = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "super().__init__"
    ]
    return {keyword.arg for call in calls for keyword in call.keywords if keyword.arg}

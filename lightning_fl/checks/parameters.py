"""Parameters of classes: the parameters of a constructor, and the arguments that it was given."""

from __future__ import annotations

import ast
import inspect
import textwrap
import tokenize
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from functools import lru_cache, wraps
from inspect import Parameter
from types import MappingProxyType
from typing import Any, get_type_hints

from lightning_fl.checks.ranges import check_arguments
from lightning_fl.errors import UserError, nearest

NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
"""Kinds of parameters that may be given by name."""


def needs_closure(optimizer: Any) -> bool:
    """True if a step of a torch optimiser needs the loss several times, like LBFGS."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is Parameter.empty


class Remembering:
    """Base class whose objects keep the arguments of their constructor, because reports say how a run was set up.

    Every constructor first checks its arguments by their annotations, as a function that is `checked` does.

    Attributes:
        given_arguments: value of each parameter by name, its default if none was given.
    """

    given_arguments: Mapping[str, Any] = MappingProxyType({})

    @classmethod
    def _refuse(cls, names: Iterable[str]) -> None:
        """Raise `UserError` if an argument is given that the class decides itself; called with the names of all arguments."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls.__init__ = _remembering(vars(cls)["__init__"])  # type: ignore[method-assign]


def _remembering(init: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor that first keeps its arguments, unless a subclass's constructor has kept its own, and checks them."""

    @wraps(init)
    def remember(self: Any, *arguments: Any, **options: Any) -> None:
        is_outermost = "given_arguments" not in vars(self)
        if is_outermost:
            parameters = parameters_of(type(self))
            defaults = {name: p.default for name, p in parameters.items() if p.default is not Parameter.empty}
            named_arguments = dict(zip(parameters, arguments, strict=False)) | options
            self._refuse(named_arguments)
            vars(self)["given_arguments"] = defaults | named_arguments
        check_arguments(init, (self, *arguments), options)
        try:
            init(self, *arguments, **options)
        except TypeError as error:  # which names the constructor of a base class
            name = next((name for name in options if f"unexpected keyword argument {name!r}" in str(error)), None)
            if not is_outermost or name is None or name in parameters:
                raise
            raise UserError(f"{type(self).__name__} has no parameter {name!r}; {nearest(name, parameters)}.") from error

    return remember


def parameters_of(function: Any) -> dict[str, Parameter]:
    """Return the parameters of a class with their types, including parameters of its bases that it takes in its `**kwargs`.

    Parameters of its bases that its constructor passes on by name are left out.

    A type that a library imports only for type checkers becomes `Any`.
    """
    bases = [base for base in getattr(function, "__mro__", ()) if base is not object]
    return dict(_parameters_of(tuple((base, vars(base)["__init__"]) for base in bases if "__init__" in vars(base))))


@lru_cache(maxsize=1024)  # every new method calls this, and it reads source files
def _parameters_of(constructors: tuple[tuple[type, Callable[..., None]], ...]) -> dict[str, Parameter]:
    """Return the parameters of a class and its bases, given with their constructors."""
    named: dict[str, Parameter] = {}
    passed: set[str] = set()
    for owner, init in constructors:
        hints = _hints(owner) if is_dataclass(owner) else {}
        hints |= _hints(init)
        own_parameters = list(inspect.signature(init).parameters.values())[1:]
        new = [p for p in own_parameters if p.kind in NAMED and p.name not in named and p.name not in passed]
        named |= {parameter.name: parameter.replace(annotation=hints.get(parameter.name, Any)) for parameter in new}
        if not any(parameter.kind == Parameter.VAR_KEYWORD for parameter in own_parameters):
            break
        passed |= _passed_on(init)
    return named


def _hints(annotated: Any) -> dict[str, Any]:
    """Return the types of a constructor's parameters or of a dataclass's fields, which the modules of its bases may define."""
    try:
        return get_type_hints(annotated)
    except Exception:
        return {}


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

"""Wrappers of parts and methods, which define only what differs from the part inside."""

from __future__ import annotations

from abc import ABC, update_abstractmethods
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

OWN = frozenset({"changeable", "given_arguments", "name"})
"""Names by which an object says what it is itself: its class, its own arguments. A wrapper answers to them for itself."""


def forwards(field: str) -> Callable[[type[T]], type[T]]:
    """Class decorator of a wrapper: look up in the part inside whatever the class does not define itself.

    It covers every public attribute and method of the base classes, those that are added to them later too, except `OWN`.

    Args:
        field: name of the attribute that holds the part inside.

    >>> class Codec:
    ...     lossy = True
    ...     changeable = frozenset()
    ...     def title(self): return "codec"
    >>> class Exact(Codec):
    ...     lossy = False
    ...     changeable = frozenset({"bits"})
    >>> @forwards("inner")
    ... class Titled(Codec):
    ...     def __init__(self, inner): self.inner = inner
    ...     def title(self): return f"the {self.inner.title()}"
    >>> Titled(Exact()).lossy, Titled(Exact()).title(), Titled(Exact()).changeable
    (False, 'the codec', frozenset())
    """

    def decorate(cls: type[T]) -> type[T]:
        bases = [base for base in cls.__mro__[1:] if base not in (ABC, object)]
        names = {name for base in bases for name in vars(base) if not name.startswith("_")}
        for name in sorted(names - vars(cls).keys() - OWN):
            setattr(cls, name, property(partial(_of_inner, field, name)))
        return update_abstractmethods(cls)

    return decorate


def _of_inner(field: str, name: str, wrapper: Any) -> Any:
    return getattr(getattr(wrapper, field), name)

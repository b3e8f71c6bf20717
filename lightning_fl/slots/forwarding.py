"""Wrappers of parts and methods, which define only what differs from the part inside."""

from __future__ import annotations

from abc import ABC, update_abstractmethods
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


def forwards(field: str) -> Callable[[type[T]], type[T]]:
    """Class decorator of a wrapper: look up in the part inside whatever the class does not define itself.

    It covers every public attribute and method of the base classes, those that are added to them later too.

    Args:
        field: name of the attribute that holds the part inside.

    >>> class Codec:
    ...     lossy = True
    ...     def name(self): return "codec"
    >>> class Exact(Codec):
    ...     lossy = False
    >>> @forwards("inner")
    ... class Named(Codec):
    ...     def __init__(self, inner): self.inner = inner
    ...     def name(self): return f"named {self.inner.name()}"
    >>> Named(Exact()).lossy, Named(Exact()).name()
    (False, 'named codec')
    """

    def decorate(cls: type[T]) -> type[T]:
        bases = [base for base in cls.__mro__[1:] if base not in (ABC, object)]
        names = {name for base in bases for name in vars(base) if not name.startswith("_")}
        for name in sorted(names - vars(cls).keys()):
            setattr(cls, name, property(partial(_of_inner, field, name)))
        return update_abstractmethods(cls)

    return decorate


def _of_inner(field: str, name: str, wrapper: Any) -> Any:
    return getattr(getattr(wrapper, field), name)

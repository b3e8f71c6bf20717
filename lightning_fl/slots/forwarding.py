"""Wrappers of parts, which define only what differs from the part inside."""

from __future__ import annotations

from abc import ABC, update_abstractmethods
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

OWN = frozenset({"changeable", "partners", "size_depends_on_values"})
"""Names that describe a part itself. A wrapper has its own values for them."""


def forwards(field: str, names: str) -> Callable[[type[T]], type[T]]:
    """Class decorator of a wrapper: look these names up in the part inside.

    Args:
        field: name of the attribute that holds the part inside.
        names: attributes and methods, separated by spaces: all public ones of the base classes that the class does not define.

    Raises:
        TypeError: a public name of the base classes is neither defined nor listed, or a name is listed that is not one of them.

    >>> class Codec:
    ...     lossy = True
    ...     def title(self): return "codec"
    >>> class Exact(Codec):
    ...     lossy = False
    >>> @forwards("inner", "lossy")
    ... class Titled(Codec):
    ...     def __init__(self, inner): self.inner = inner
    ...     def title(self): return f"the {self.inner.title()}"
    >>> Titled(Exact()).lossy, Titled(Exact()).title()
    (False, 'the codec')
    """

    def decorate(cls: type[T]) -> type[T]:
        bases = [base for base in cls.__mro__[1:] if base not in (ABC, object)]
        public = {name for base in bases for name in vars(base) if not name.startswith("_")}
        listed, wanted = set(names.split()), public - vars(cls).keys() - OWN
        if listed != wanted:
            raise TypeError(
                f"{cls.__name__} must forward exactly what it does not define: missing {sorted(wanted - listed)}, "
                f"not to be forwarded {sorted(listed - wanted)}"
            )
        for name in listed:
            setattr(cls, name, property(partial(_of_inner, field, name), doc=f"Forwarded from `{field}`."))
        return update_abstractmethods(cls)

    return decorate


def _of_inner(field: str, name: str, wrapper: Any) -> Any:
    return getattr(getattr(wrapper, field), name)

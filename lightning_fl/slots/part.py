"""Declarations of the parts of every slot, by which an algorithm checks that neighbours fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lightning_fl.checks import Checked
from lightning_fl.errors import require


class Part(Checked):
    """Base class of the six slots' base classes.

    A part declares names of message entries besides `model` and `buffers`, which every message has. An algorithm is refused if
    a part needs what no other provides, or provides what no other uses.
    """

    _promises = frozenset[str]()
    """Names of the attributes by which the parts of a slot make promises."""
    _kept_by = frozenset[str]()
    """Names of the methods on which the promises rest. A part that overrides one must make the promises again."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Withdraw the inherited promises of a part that overrides a method on which they rest.

        Raises:
            UserError: a set of names is a text.
        """
        super().__init_subclass__(**arguments)
        for name in ("changeable", "needs", "omits", "partners", "provides", "uses"):
            value = vars(cls).get(name)
            require(not isinstance(value, str), f"{cls.__name__}.{name} must be a set of names: write {{{value!r}}}.")
        slot: Any = next(base for base in cls.__mro__[1:] if "_promises" in vars(base))
        for name in slot._promises - vars(cls).keys() if slot._kept_by & vars(cls).keys() else ():
            if getattr(cls, name) is not getattr(slot, name):
                setattr(cls, name, vars(slot)[name])

    changeable = frozenset[str]()
    """Names of the hyper-parameters that a resumed run may change; the states in a checkpoint depend on the others."""

    partners = frozenset[str]()
    """Class names of the parts that the same algorithm must also have, such as the other half of one formula."""

    @property
    def size_depends_on_values(self) -> bool:
        """True if the bits of its messages depend on the numbers in them, so that a rehearsal cannot predict the bits of a run.

        A part inside this one has its own value.
        """
        return False

    @property
    def needs(self) -> frozenset[str]:
        """Names of the entries that the part reads; other parts must provide them."""
        return frozenset()

    @property
    def uses(self) -> frozenset[str]:
        """Names of the entries that the part reads if a message has them: all that it `needs`, and any optional ones."""
        return self.needs

    @property
    def in_common(self) -> Mapping[str, Any]:
        """Hyper-parameters by name, which must have the same value in all parts that list them."""
        return {}

    @property
    def provides(self) -> frozenset[str]:
        """Names of the entries that the part adds for other parts; each must be used by one of them."""
        return frozenset()


def to_declare(part: Part, promise: str) -> str:
    """Return a hint, in brackets, at a promise that the author of a part may declare.

    The hint is empty for parts of this package, which declare all their promises.

    >>> class Own(Part): __module__ = "own_parts"
    >>> to_declare(Own(), "sums_suffice = True")
    ' (or declare sums_suffice = True in Own, if that is true)'
    """
    kind = type(part)
    return (
        ""
        if kind.__module__.startswith("lightning_fl.")
        else f" (or declare {promise} in {kind.__name__}, if that is true)"
    )


def parts_in(value: Any) -> Iterator[Part]:
    """Yield a part and, recursively, all parts in its fields, also those inside tuples and lists."""
    if isinstance(value, (tuple, list)):
        for one in value:
            yield from parts_in(one)
    elif isinstance(value, Part):
        yield value
        for name in getattr(value, "__dataclass_fields__", ()):
            yield from parts_in(getattr(value, name))


def check_inner(outer: Part, name: str, kind: type, example: str) -> None:
    """Raise `UserError` unless the part inside another part is an object. Only slots also take a class or its name.

    Args:
        outer: the outer part.
        name: name of its field with the inner part.
        kind: base class that the inner part must have.
        example: a suitable inner part, for the error.
    """
    part = getattr(outer, name)
    require(
        isinstance(part, kind),
        f"{type(outer).__name__} needs an object of kind {kind.__name__}, such as {example}, got {name}={part!r}.",
    )

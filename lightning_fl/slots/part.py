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
    """Names of the promises of a slot's parts."""
    _kept_by = frozenset[str]()
    """Names of the methods that keep them: a part that defines one anew has to promise anew."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Forget the promises of a base class whose methods the part replaces."""
        super().__init_subclass__(**arguments)
        slot: Any = next(base for base in cls.__mro__[1:] if "_promises" in vars(base))
        for name in slot._promises - vars(cls).keys() if slot._kept_by & vars(cls).keys() else ():
            if getattr(cls, name) is not getattr(slot, name):
                setattr(cls, name, vars(slot)[name])

    changeable = frozenset[str]()
    """Names of the hyper-parameters that a resumed run may change; the others give the states in a checkpoint their meaning."""

    partners = frozenset[str]()
    """Names of the classes of parts that must stand in the same algorithm, as two halves of one formula do."""

    @property
    def size_depends_on_values(self) -> bool:
        """True if the bits of its messages depend on the numbers in them, so that no rehearsal can tell those of a run.

        Parts inside this one answer for themselves.
        """
        return False

    @property
    def needs(self) -> frozenset[str]:
        """Names of the entries that the part reads; other parts must provide them."""
        return frozenset()

    @property
    def uses(self) -> frozenset[str]:
        """Names of the entries that the part reads if they are there: those that it needs, and perhaps more."""
        return self.needs

    @property
    def in_common(self) -> Mapping[str, Any]:
        """Hyper-parameters by name, which must have the same value in all parts that list them."""
        return {}

    @property
    def provides(self) -> frozenset[str]:
        """Names of the entries that the part adds for other parts; one of them must use each."""
        return frozenset()


def to_declare(part: Part, promise: str) -> str:
    """Return what the author of a part may declare, in brackets; nothing for parts of this package, which say all.

    >>> class Own(Part): __module__ = "own_parts"
    >>> to_declare(Own(), "sums_suffice = True")
    ' (or declare sums_suffice = True in Own, if it is so)'
    """
    kind = type(part)
    return (
        ""
        if kind.__module__.startswith("lightning_fl.")
        else f" (or declare {promise} in {kind.__name__}, if it is so)"
    )


def parts_in(value: Any) -> Iterator[Part]:
    """Yield a part and all parts in its fields, also in tuples and lists, and in those of these parts."""
    if isinstance(value, (tuple, list)):
        for one in value:
            yield from parts_in(one)
    elif isinstance(value, Part):
        yield value
        for name in getattr(value, "__dataclass_fields__", ()):
            yield from parts_in(getattr(value, name))


def check_inner(outer: Part, name: str, kind: type, example: str) -> None:
    """Raise `UserError` unless the part inside another is an object: only the slots take classes and their names, too.

    Args:
        outer: part with the other one inside.
        name: name of the field that has it.
        kind: base class of the slot's parts.
        example: an object that would do.
    """
    part = getattr(outer, name)
    require(
        isinstance(part, kind),
        f"{type(outer).__name__} needs an object of kind {kind.__name__}, such as {example}, got {name}={part!r}.",
    )

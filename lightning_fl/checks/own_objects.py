"""Objects of the user's own classes in the attributes of a module, such as an AverageMeter, and generators of random numbers."""

from __future__ import annotations

import random
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from types import MemberDescriptorType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

LIBRARIES = frozenset({"torch", "lightning", "pytorch_lightning", "lightning_fl", "torchmetrics"})
"""Packages whose objects training does not change, also objects of derived classes such as data sets."""
FOREIGN = (
    LIBRARIES
    | sys.stdlib_module_names
    | {"builtins", "numpy", "pandas", "polars", "pyarrow", "scipy", "sklearn", "PIL"}
)
MOST_ELEMENTS = 100
"""Most elements of a container that does not count as long."""
OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes in which torch keeps parameters, buffers, submodules and hooks."""
PRIMITIVE = (bool, int, float, complex, str, bytes, type(None))


def own_objects(named: Iterable[tuple[str, Any]], known: Iterable[Any] = ()) -> dict[str, Any]:
    """Return the objects in these values by their place: direct ones, those in containers and those in other objects, each once.

    A module that is found there counts as one object with its parts.

    Args:
        named: values by name, as attributes of a module.
        known: objects to leave out.

    >>> list(own_objects([("meters", {"loss": Namespace(count=0)}), ("name", "text")]))
    ["meters['loss']"]
    """
    found: dict[str, Any] = {}
    seen, waiting = {id(one) for one in known}, deque(named)
    while waiting:
        name, value = waiting.popleft()
        if isinstance(value, PRIMITIVE) or id(value) in seen:
            continue
        seen.add(id(value))
        if is_module(value):
            found[name] = value
            parts = [part for part in value.modules() if part is value or id(part) not in seen]
            seen.update(map(id, parts))
            waiting.extend((f"{name}.{inner}", x) for inner, x in attributes_of(parts))
        elif _is_own(value) or generator_state(value) is not None:
            found[name] = value
            waiting.extend((f"{name}.{inner}", x) for inner, x in content(value).items())
        waiting.extend((f"{name}{place}", x) for place, x in _elements(value))
    return found


def is_module(value: Any) -> bool:
    """True for a module that is no metric."""
    return isinstance(value, nn.Module) and not isinstance(value, Metric)


def attributes_of(parts: Iterable[nn.Module]) -> Iterator[tuple[str, Any]]:
    """Return names and values of the attributes of modules, without those of torch."""
    return (item for part in parts for item in vars(part).items() if item[0] not in OF_TORCH)


def content(owner: Any) -> dict[str, Any]:
    """Return the attributes of an object, also those in slots."""
    kind: Any = type(owner)
    slots = {name: getattr(owner, name) for name in _slots(kind) if hasattr(owner, name)}
    return slots | getattr(owner, "__dict__", {})


@lru_cache
def _slots(kind: type) -> tuple[str, ...]:
    """Return the names of the slots of a class, which every stack of clients reads."""
    return tuple(
        name
        for base in kind.__mro__
        for name, slot in vars(base).items()
        if isinstance(slot, MemberDescriptorType) and "__slots__" in vars(base)
    )


def set_content(owner: Any, attributes: Mapping[str, Any]) -> None:
    """Give an object exactly these attributes, even if it is frozen."""
    for name in content(owner).keys() - attributes.keys():
        object.__delattr__(owner, name)
    slots = content(owner).keys() - getattr(owner, "__dict__", {}).keys()
    for name, value in attributes.items():
        if name in slots or not hasattr(owner, "__dict__"):
            object.__setattr__(owner, name, value)
        else:
            vars(owner)[name] = value


def generator_state(value: Any) -> tuple[Any, Callable[[Any], Any]] | None:
    """Return the state of a generator of random numbers, and the function that sets it; None for any other value."""
    if isinstance(value, torch.Generator):
        return value.get_state(), value.set_state
    if isinstance(value, np.random.RandomState):
        return value.get_state(), value.set_state
    if isinstance(value, random.Random):
        return value.getstate(), value.setstate
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return bits.state, lambda state: setattr(bits, "state", state)
    return None


def has_numbers(container: Any) -> bool:
    """True if a long container begins with a number or a text; most likely it contains nothing else."""
    if len(container) <= MOST_ELEMENTS:
        return False
    return isinstance(next(iter(container.values() if isinstance(container, dict) else container)), PRIMITIVE)


def _is_own(value: Any) -> bool:
    """True for objects of the user's classes, and for metrics, which a container hides from the module."""
    if isinstance(value, (Metric, SimpleNamespace, Namespace)):
        return True
    if isinstance(value, (type, nn.Module, Tensor)) or _package(type(value)) in FOREIGN:
        return False
    return not any(_package(kind) in LIBRARIES for kind in type(value).__mro__)


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _elements(value: Any) -> Iterable[tuple[str, Any]]:
    """Return the elements of a container with their places; no elements for a long container of numbers or texts."""
    if not isinstance(value, (dict, list, tuple, set, deque)) or has_numbers(value):
        return ()
    places = value.items() if isinstance(value, dict) else enumerate(value)
    return [(f"[{place!r}]", element) for place, element in places]

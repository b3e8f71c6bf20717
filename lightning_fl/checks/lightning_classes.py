"""Classes of Lightning under both of its names: `pytorch_lightning` and `lightning.pytorch` are one library installed twice."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, TypeGuard, TypeVar

T = TypeVar("T")
HOOK_OWNERS = ("core.module.LightningModule", "core.datamodule.LightningDataModule", "callbacks.callback.Callback")
"""Names in Lightning of the classes that have hooks."""


def is_a(value: Any, *kinds: type[T]) -> TypeGuard[T]:
    """True if a value is an object of one of these classes; classes of Lightning also count by their `pytorch_lightning` name.

    `pytorch_lightning` and `lightning.pytorch` are one library installed twice: the same code under two names.
    """
    return isinstance(value, kinds) or any(is_lightnings(type(value), kind) for kind in kinds)


def listed(objects: T | Iterable[T], kind: type[T]) -> list[T]:
    """Return objects of a class of Lightning, of either name, as a list, whether one is given or several."""
    is_one = is_a(objects, kind) or isinstance(objects, str) or not isinstance(objects, Iterable)
    return [objects] if is_one else list(objects)  # type: ignore[list-item, arg-type]


def is_lightnings(checked: type, kind: type) -> bool:
    """True if a class is derived from a class of Lightning, of either name."""
    return _lightning_name(kind) in _lightning_names(checked)


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

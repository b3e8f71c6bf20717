"""Attributes of a module that training may change besides parameters and buffers: numbers, texts, containers, arrays, tensors.

No message carries them, and stacks cannot hold them for each client. Clients that train one after the other share them,
unless the run is private: then they would reveal one client to the others, and to whatever reads the module later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import numpy as np
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_fl.checks.evaluation_mode import MOST_COPIED, keeping_attributes
from lightning_fl.checks.hidden_modules import HiddenModules
from lightning_fl.checks.own_objects import attributes_of, content, generator_state, is_module, own_objects, set_content

KINDS = (bool, int, float, str, list, dict, set, tuple, type(None), Tensor, np.ndarray)


class PlainAttributes:
    """The user's plain attributes of a module, its parts and the user's own objects in them, as they are now."""

    def __init__(self, module: nn.Module, most_copied: int = 0) -> None:
        """Copy at most so many numbers of modules in lists, tuples and own objects."""
        objects = own_objects(attributes_of(filter(is_module, module.modules())), module.modules())
        self._hidden = HiddenModules(objects, module.modules(), most_copied)
        self._owners = _owners(module, objects, self._hidden)
        values = _values(self._owners)
        # Elements stay alive, so that no new object takes the identity of an old one.
        self._values = {key: _shallow(value) for key, value in values.items()}
        self._marks = _marks(values)

    def changed(self, recomputed: bool = True) -> list[str]:
        """Return the names of the attributes that are others now or have other content, also those that torch has `recomputed`.

        Those of parts are without the part, those of other objects with where they are; of a module in a list, tuple or own
        object it is the place.
        """
        attributes = self._changed_attributes()
        if not recomputed:
            attributes = [key for key in attributes if key[1] not in _recomputed(self._owners[key[0]][1])]
        return self._names_of(attributes)

    def _changed_attributes(self) -> list[tuple[int, str]]:
        """Return these attributes as an owner's identity and a name, without tensors of hidden modules."""
        marks = _marks(_values(self._owners))
        return [key for key in {**self._marks, **marks} if self._marks.get(key) != marks.get(key)]

    def _names_of(self, attributes: Iterable[tuple[int, str]]) -> list[str]:
        """Return the names of changed attributes, and the places of hidden modules that have changed."""
        names = {f"{self._owners[owner][0]}{name}" for owner, name in attributes}
        return sorted(names.union(self._hidden.changed()))


class RestorableAttributes(PlainAttributes):
    """The same, with copies of tensors."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, MOST_COPIED)
        self._copies = {key: x.detach().clone() for key, x in self._values.items() if isinstance(x, Tensor)}

    def differing(self) -> list[str]:
        """Return the names of the attributes that have another value now, and not only an equal object in its place."""
        present = _values(self._owners)
        pairs = {
            key: (self._copies.get(key, self._values.get(key)), present.get(key)) for key in self._changed_attributes()
        }
        return self._names_of(key for key, (earlier, now) in pairs.items() if not _are_equal(earlier, now))

    def restore(self) -> list[str]:
        """Set the attributes to what they were, and return the names of those that had changed."""
        attributes = self._changed_attributes()
        changed = self._names_of(attributes)
        for key in attributes:
            name, owner = key[1], self._owners[key[0]][1]
            others = {n: x for n, x in content(owner).items() if n != name}
            set_content(owner, others | ({name: self._values[key]} if key in self._values else {}))
            if key in self._copies:
                self._values[key].detach().copy_(self._copies[key])
        self._hidden.restore()
        return changed


class SharedByClients:
    """Names, once in a run, the attributes that a client's training changes and leaves to the next client.

    It watches the second training of a run, because attributes that a module makes only once appear in the first.

    Attributes:
        restores: True if every client begins with the attributes as they were before the first, and leaves them so.
    """

    def __init__(self, module: nn.Module) -> None:
        self.restores = False
        self._module = module
        self._num_trainings = 0

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Restore the module's attributes after a client's part of a round, if that is wanted."""
        with keeping_attributes(self._module.modules()) if self.restores else nullcontext():
            yield

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch a client's training."""
        self._num_trainings += 1
        before = PlainAttributes(self._module) if self._num_trainings == 2 else None
        yield
        if before is None or not (changed := before.changed(recomputed=False)):
            return
        names, them = " and ".join(map(repr, changed)), "it" if len(changed) == 1 else "them"
        if self.restores:
            rank_zero_info(
                f"Each client of this private run begins with {names} of the module as at the start of the round; changes "
                f"of {them} by its training are undone."
            )
        else:
            rank_zero_info(
                f"Clients pass {names} of the module on to the next client as training leaves {them}; a buffer begins for "
                "each client with the server's value."
            )


def _owners(module: nn.Module, objects: Mapping[str, Any], hidden: HiddenModules) -> dict[int, tuple[str, Any]]:
    """Return a module, its parts, the user's own objects and hidden modules by identity, each with the prefix of its names."""
    parts = [("", part) for part in module.modules()] + [(f"{place}.", part) for place, part in hidden.parts]
    return {id(part): (before, part) for before, part in parts if is_module(part)} | {
        id(one): (f"{name}.", one)
        for name, one in objects.items()
        if not is_module(one) and generator_state(one) is None
    }


def _values(owners: Mapping[int, tuple[str, Any]]) -> dict[tuple[int, str], Any]:
    """Return the plain attributes of these owners, without those that every LightningModule has."""
    return {
        (identity, name): value
        for identity, (_, owner) in owners.items()
        for name, value in content(owner).items()
        if isinstance(value, KINDS) and not (is_module(owner) and name in _names_of_lightning())
    }


@cache
def _names_of_lightning() -> frozenset[str]:
    """Return the names of the attributes that every LightningModule has."""
    return frozenset(vars(LightningModule()))


def _recomputed(owner: Any) -> set[str]:
    """Return the attributes that torch computes anew in each forward: of `weight_norm`, `spectral_norm`, and prunings."""
    hooks = getattr(owner, "_forward_pre_hooks", {}).values()
    torchs = [hook for hook in hooks if type(hook).__module__.startswith("torch.nn.utils.")]
    return {getattr(hook, "name", getattr(hook, "_tensor_name", "")) for hook in torchs}


def _are_equal(one: Any, other: Any) -> bool:
    """True if two values are equal, element by element; a tensor that was changed in place equals nothing."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one is not other and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_are_equal(one[key], other[key]) for key in one)
    return np.array_equal(one, other)


def _shallow(value: Any) -> Any:
    return value.copy() if isinstance(value, (list, dict, set)) else value


def _marks(values: Mapping[tuple[int, str], Any]) -> dict[tuple[int, str], Any]:
    """Return marks that differ if a value or an element was replaced, or a tensor, but no array, was changed in place."""

    def mark(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: mark_of(element) for key, element in value.items()}
        if isinstance(value, (list, tuple, set)):
            return [mark_of(element) for element in value]
        is_compared_by_identity = isinstance(value, (Tensor, np.ndarray))
        return mark_of(value) if is_compared_by_identity else (value,)  # in a tuple NaN equals itself

    def mark_of(element: Any) -> Any:
        if not isinstance(element, Tensor) or isinstance(element, nn.Parameter) or element.is_inference():
            return id(element)  # training changes parameters, as in a list of them
        return id(element), element._version

    return {key: mark(value) for key, value in values.items()}

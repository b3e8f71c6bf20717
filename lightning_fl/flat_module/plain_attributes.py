"""Attributes of a module that training may change besides parameters and buffers: numbers, texts, containers, tensors.

No message carries them, and stacks cannot hold them for each client. Clients that train one after the other share them,
unless the run is private: then they would reveal one client to the others, and to whatever reads the module later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_fl.checks.evaluation_mode import OF_TORCH, keeping_attributes
from lightning_fl.checks.own_objects import content, generator_state, own_objects, set_content

KINDS = (bool, int, float, str, list, dict, set, tuple, type(None), Tensor)


class PlainAttributes:
    """The user's plain attributes of a module, its parts and the user's own objects in them, as they are now."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._owners = _owners(module)
        values = _values(self._owners)
        # Elements stay alive, so that no new object takes the identity of an old one.
        self._values = {key: _shallow(value) for key, value in values.items()}
        self._marks = _marks(values)

    def changed(self) -> list[tuple[int, str]]:
        """Return the attributes, as an owner's identity and a name, that are others now or have other content."""
        marks = _marks(_values(self._owners))
        return [key for key in {**self._marks, **marks} if self._marks.get(key) != marks.get(key)]

    def names_of(self, attributes: Iterable[tuple[int, str]]) -> list[str]:
        """Return the names of attributes: of parts without the part, of other objects with where they are."""
        return sorted({f"{self._owners[owner][0]}{name}" for owner, name in attributes})


class RestorableAttributes(PlainAttributes):
    """The same, with copies of tensors."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._copies = {key: x.detach().clone() for key, x in self._values.items() if isinstance(x, Tensor)}

    def restore(self) -> list[str]:
        """Set the attributes to what they were, and return the names of those that had changed."""
        changed = self.changed()
        for key in changed:
            name, owner = key[1], self._owners[key[0]][1]
            others = {n: x for n, x in content(owner).items() if n != name}
            set_content(owner, others | ({name: self._values[key]} if key in self._values else {}))
            if key in self._copies:
                self._values[key].detach().copy_(self._copies[key])
        return self.names_of(changed)


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
        if before is None or not (changed := before.names_of(before.changed())):
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


def _owners(module: nn.Module) -> dict[int, tuple[str, Any]]:
    """Return a module, its parts and the user's own objects in them by identity, each with the prefix of its names."""
    parts = [part for part in module.modules() if not isinstance(part, Metric)]
    held = ((name, x) for part in parts for name, x in vars(part).items() if name not in OF_TORCH)
    objects = own_objects(held, module.modules())
    return {id(part): ("", part) for part in parts} | {
        id(one): (f"{name}.", one) for name, one in objects.items() if generator_state(one) is None
    }


def _values(owners: Mapping[int, tuple[str, Any]]) -> dict[tuple[int, str], Any]:
    """Return the plain attributes of these owners, without those that every LightningModule has."""
    return {
        (identity, name): value
        for identity, (before, owner) in owners.items()
        for name, value in content(owner).items()
        if isinstance(value, KINDS) and (before or name not in _names_of_lightning())
    }


@cache
def _names_of_lightning() -> frozenset[str]:
    """Return the names of the attributes that every LightningModule has."""
    return frozenset(vars(LightningModule()))


def _shallow(value: Any) -> Any:
    return value.copy() if isinstance(value, (list, dict, set)) else value


def _marks(values: Mapping[tuple[int, str], Any]) -> dict[tuple[int, str], Any]:
    """Return marks that differ if a value or an element was replaced, or a tensor was changed in place."""

    def mark(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: mark_of(element) for key, element in value.items()}
        if isinstance(value, (list, tuple, set)):
            return [mark_of(element) for element in value]
        return mark_of(value) if isinstance(value, Tensor) else (value,)  # in a tuple NaN equals itself

    def mark_of(element: Any) -> Any:
        if not isinstance(element, Tensor) or isinstance(element, nn.Parameter) or element.is_inference():
            return id(element)  # training changes parameters, as in a list of them
        return id(element), element._version

    return {key: mark(value) for key, value in values.items()}

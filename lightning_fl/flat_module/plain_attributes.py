"""Attributes of a module that training may change besides parameters and buffers: numbers, texts, containers, tensors.

No message carries them, and stacks cannot hold them for each client. One after the other, the clients share them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torchmetrics import Metric

KINDS = (bool, int, float, str, list, dict, set, tuple, type(None), Tensor)


class PlainAttributes:
    """The user's plain attributes of a module and its parts, as they are now."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # Elements stay alive, so that no new object takes the identity of an old one.
        self._values = {key: _shallow(value) for key, value in _values(module).items()}
        self._marks = _marks(module)

    def changed(self) -> list[tuple[nn.Module, str]]:
        """Return the attributes, as a part and a name, that are others now or have other content."""
        marks = _marks(self._module)
        return [key for key in {**self._marks, **marks} if self._marks.get(key) != marks.get(key)]


class RestorableAttributes(PlainAttributes):
    """The same, with copies of tensors."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._copies = {key: x.detach().clone() for key, x in self._values.items() if isinstance(x, Tensor)}

    def restore(self) -> list[str]:
        """Set the attributes to what they were, and return the names of those that had changed."""
        changed = self.changed()
        for key in changed:
            part, name = key
            if key not in self._values:
                del vars(part)[name]
                continue
            vars(part)[name] = self._values[key]
            if key in self._copies:
                self._values[key].detach().copy_(self._copies[key])
        return names_of(changed)


class SharedByClients:
    """Says once which attributes a client's training leaves to the next client otherwise than it found them.

    It looks at the second training of a run: what a module makes once and keeps, it makes in the first.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._num_trainings = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch a client's training."""
        self._num_trainings += 1
        before = PlainAttributes(self._module) if self._num_trainings == 2 else None
        yield
        if before is not None and (changed := names_of(before.changed())):
            rank_zero_info(
                f"Clients pass {' and '.join(map(repr, changed))} of the module on to the next client as training leaves "
                f"{'it' if len(changed) == 1 else 'them'}; a buffer begins with each client as the server has it."
            )


def names_of(attributes: Iterable[tuple[nn.Module, str]]) -> list[str]:
    """Return the names of attributes, without their parts."""
    return sorted({name for _, name in attributes})


def _values(module: nn.Module) -> dict[tuple[nn.Module, str], Any]:
    """Return the plain attributes of a module and its parts, by part and name, without those that every LightningModule has."""
    lightning_names = vars(LightningModule()).keys()
    return {
        (part, name): value
        for part in module.modules()
        if not isinstance(part, Metric)
        for name, value in vars(part).items()
        if isinstance(value, KINDS) and name not in lightning_names
    }


def _shallow(value: Any) -> Any:
    return value.copy() if isinstance(value, (list, dict, set)) else value


def _marks(module: nn.Module) -> dict[tuple[nn.Module, str], Any]:
    """Return what differs if a value was replaced, a tensor was changed in place, or an element of a container was either."""

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

    return {key: mark(value) for key, value in _values(module).items()}

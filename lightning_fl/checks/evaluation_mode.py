"""Evaluation of a module without side effects on it: the modes of its parts and their attributes are restored."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_fl.checks.hidden_modules import HiddenModules
from lightning_fl.checks.own_objects import (
    MOST_ELEMENTS,
    OF_TORCH,
    attributes_of,
    content,
    generator_state,
    has_numbers,
    is_module,
    own_objects,
    set_content,
)
from lightning_fl.errors import require

CONTAINERS = (list, dict, set, deque, Counter, OrderedDict, defaultdict)
MOST_COPIED = 2**20
"""Most numbers in a tensor that is copied, and of the modules that lists and objects hide."""
MUST_NOT_CHANGE = (
    "a training that must not change the module, such as the training of a client's own model or of a client in a private"
    " run"
)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Set evaluation mode inside the context, and restore every part's mode afterwards."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


@contextmanager
def keeping_attributes(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Restore the attributes of these modules afterwards: counts, lists of outputs, torchmetrics objects, the user's own objects.

    Parameters, buffers and hooks are left to the caller, but those of modules in lists, tuples and own objects are restored;
    submodules that were added are removed.

    Raises:
        UserError: a tensor of more than `MOST_COPIED` numbers, or those of a hidden module, which were not copied, have changed.
    """
    parts = list(parts)
    known = {id(one): one for part in parts for one in part.modules()}.values()
    own = own_objects(attributes_of(parts), known)
    hidden = HiddenModules(own, known, MOST_COPIED)
    parts += [part for _, part in hidden.parts]
    before = [
        (vars(part), {n: x for n, x in vars(part).items() if n not in OF_TORCH}, dict(part._modules)) for part in parts
    ]
    kept = _Kept([*known, *parts])
    objects = [_KeptObject(one, kept) for one in own.values() if not is_module(one)]
    for attributes, attributes_before, _ in before:
        attributes.update({name: kept.copied(value, name) for name, value in attributes_before.items()})
    try:
        yield
    finally:
        for one in objects:
            one.restore()
        changed = hidden.changed(copied=False)
        hidden.restore()
        for attributes, attributes_before, children in before:
            for name in attributes.keys() - attributes_before.keys() - OF_TORCH:
                del attributes[name]
            attributes.update(attributes_before)
            for name in attributes["_modules"].keys() - children.keys():
                del attributes["_modules"][name]
    kept.require_unchanged()
    require(
        not changed,
        f"the module in {' and '.join(map(repr, changed))}, which torch does not find there, changes in {MUST_NOT_CHANGE}; only "
        f"{MOST_COPIED:,} numbers of such modules are restored: register its tensors as buffers, or change it between rounds, in "
        "on_train_epoch_end.",
    )


@contextmanager
def measuring(module: nn.Module) -> Iterator[None]:
    """Begin with empty torchmetrics objects, and restore these and all other plain attributes of the module afterwards.

    The user's own validation then sees neither the samples of a measurement nor tensors of another autograd mode.
    """
    parts = list(module.modules())
    with keeping_attributes(parts):
        for part in parts:
            if isinstance(part, Metric):
                part.reset()
        yield


class _Kept:
    """Copies of values that training may change in place."""

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        """Leave out the parameters and buffers of these modules, wherever they are found."""
        self._bound = {id(x) for part in parts for x in (*part._parameters.values(), *part._buffers.values())}
        self._uncopied: list[tuple[str, Tensor, int]] = []

    def copied(self, value: Any, name: str) -> Any:
        """Return a copy of a tensor, an array, or a container with the containers in it; return any other value itself."""
        if isinstance(value, np.ndarray):
            return value.copy()
        if isinstance(value, Tensor):
            return self._copied_tensor(value, name)
        if type(value) not in CONTAINERS:
            return value
        copied = copy(value)
        if has_numbers(value):
            return copied
        if isinstance(copied, dict):
            for key, element in value.items():
                copied[key] = self._inside(element, name, len(value))
        elif isinstance(copied, (list, deque)):
            for place, element in enumerate(value):
                copied[place] = self._inside(element, name, len(value))
        return copied

    def require_unchanged(self) -> None:
        """Raise `UserError` if a tensor that is too large to be copied has changed."""
        for name, tensor, version in self._uncopied:
            require(
                tensor._version == version,
                f"the attribute {name!r} of the module, a tensor of {tensor.numel():,} numbers, changes in place in "
                f"{MUST_NOT_CHANGE}; only smaller tensors are restored: register it as a buffer.",
            )

    def _inside(self, element: Any, name: str, length: int) -> Any:
        """Return a copy of an element, but a tensor itself if the container is long, such as a list of outputs."""
        return element if isinstance(element, Tensor) and length > MOST_ELEMENTS else self.copied(element, name)

    def _copied_tensor(self, tensor: Tensor, name: str) -> Tensor:
        if id(tensor) in self._bound or tensor.requires_grad:
            return tensor
        if tensor.numel() > MOST_COPIED and not tensor.is_inference():
            self._uncopied.append((name, tensor, tensor._version))
            return tensor
        with torch.no_grad():
            return tensor.clone()


class _KeptObject:
    """Present state of an object of the user's own class, or of a generator."""

    def __init__(self, value: Any, kept: _Kept) -> None:
        self._value, self._generator, self._content = value, generator_state(value), content(value)
        self._kind = next((kind for kind in (dict, list, set, deque) if isinstance(value, kind)), None)
        self._elements = None if self._kind is None else self._kind(value)
        if self._generator is None:
            set_content(value, {name: kept.copied(x, name) for name, x in self._content.items()})

    def restore(self) -> None:
        """Restore its attributes, its elements if it is a container, and its state if it draws random numbers."""
        if self._generator is not None:
            state, set_state = self._generator
            set_state(state)
            return
        set_content(self._value, self._content)
        if self._kind is not None:  # by the functions of Python's class, which the user's may have replaced
            kind: Any = self._kind
            kind.clear(self._value)
            (kind.extend if kind in (list, deque) else kind.update)(self._value, self._elements)

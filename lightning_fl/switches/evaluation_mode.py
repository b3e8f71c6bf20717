"""Evaluation of a module that leaves no trace: its parts' mode of training or evaluation, and their attributes."""

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

CONTAINERS = (list, dict, set, deque, Counter, OrderedDict, defaultdict)
OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes in which torch keeps parameters, buffers, submodules and hooks."""


@contextmanager
def evaluating(module: nn.Module, sets_mode: bool = True, restores_mode: bool = True) -> Iterator[None]:
    """Set evaluation mode inside the context, and restore every part's own mode afterwards; either may be left to the module."""
    modes = {part: part.training for part in module.modules()}
    if sets_mode:
        module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items() if restores_mode else ():
            part.training = mode


@contextmanager
def keeping_attributes(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Restore the plain attributes of these modules afterwards: counts, lists of outputs, states of torchmetrics objects.

    Parameters, buffers and hooks are left to the caller; submodules that were added are removed.
    """
    before = [
        (vars(part), {n: x for n, x in vars(part).items() if n not in OF_TORCH}, dict(part._modules)) for part in parts
    ]
    for attributes, attributes_before, _ in before:
        attributes.update({name: _copied(value) for name, value in attributes_before.items()})
    try:
        yield
    finally:
        for attributes, attributes_before, children in before:
            for name in attributes.keys() - attributes_before.keys() - OF_TORCH:
                del attributes[name]
            attributes.update(attributes_before)
            for name in attributes["_modules"].keys() - children.keys():
                del attributes["_modules"][name]


@contextmanager
def measuring(module: nn.Module) -> Iterator[None]:
    """Begin with empty torchmetrics objects, and restore these and all other plain attributes of the module afterwards.

    So the user's own validation sees neither the samples of a measurement nor tensors of another autograd mode.
    """
    parts = list(module.modules())
    with keeping_attributes(parts):
        for part in parts:
            if isinstance(part, Metric):
                part.reset()
        yield


def _copied(value: Any) -> Any:
    """Return a copy of a container, tensor or array, and any other value itself."""
    if isinstance(value, (Tensor, np.ndarray)):
        with torch.no_grad():
            return value.clone() if isinstance(value, Tensor) else value.copy()
    return _copied_container(value)


def _copied_container(value: Any) -> Any:
    """Return a copy of a container and of those inside it, with the same elements; any other value itself."""
    if type(value) not in CONTAINERS:
        return value
    copied = copy(value)
    if isinstance(copied, dict):
        copied.update({key: _copied_container(element) for key, element in value.items()})
    elif isinstance(copied, list):
        copied[:] = map(_copied_container, value)
    return copied

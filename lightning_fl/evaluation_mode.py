"""Evaluation of a module that leaves no trace: its parts' mode of training or evaluation, and their attributes."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

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
def keeping_attributes(module: nn.Module) -> Iterator[None]:
    """Restore the plain attributes of every part afterwards: counts, lists of outputs, states of torchmetrics objects.

    Parameters, buffers, submodules and hooks are left to the caller.
    """
    before = [(vars(part), {n: x for n, x in vars(part).items() if n not in OF_TORCH}) for part in module.modules()]
    for attributes, own in before:
        attributes.update({name: _copied(value) for name, value in own.items()})
    try:
        yield
    finally:
        for attributes, own in before:
            for name in attributes.keys() - own.keys() - OF_TORCH:
                del attributes[name]
            attributes.update(own)


def _copied(value: Any) -> Any:
    """Return a copy of a container, tensor or array, and any other value itself."""
    if isinstance(value, (Tensor, np.ndarray)):
        with torch.no_grad():
            return value.clone() if isinstance(value, Tensor) else value.copy()
    return copy(value) if type(value) in CONTAINERS else value

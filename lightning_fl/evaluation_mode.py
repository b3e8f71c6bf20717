"""Training and evaluation mode of a module's parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


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

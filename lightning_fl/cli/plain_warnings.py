"""Warnings of this package on the command line: sentences, as its errors are."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import lightning_fl
from lightning_fl import callbacks, modules


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Print this package's own warnings without their place in its source, which means nothing to users of the command line.

    Lightning also sets a format of warnings when it is imported; this comes after it.
    """
    others = warnings.formatwarning
    own = tuple(os.path.join(path, "") for package in (lightning_fl, callbacks, modules) for path in package.__path__)

    def formatted(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if filename.startswith(own):
            return f"Warning: {message}\n"
        return others(message, category, filename, lineno, line)

    warnings.formatwarning = formatted
    try:
        yield
    finally:
        warnings.formatwarning = others

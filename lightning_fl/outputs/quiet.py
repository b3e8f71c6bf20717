"""Loggers that are quiet for a while."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

NOTES = (
    "lightning.pytorch.utilities.rank_zero",
    "lightning.fabric.utilities.rank_zero",
    "lightning.fabric.utilities.seed",
)
"""Loggers of notes on data, devices, runners and seeds, which each fit writes itself."""
PROFILES = "lightning.pytorch.profilers.profiler"
"""Logger of a profiler's report."""


@contextmanager
def quiet(*names: str, level: int = logging.WARNING) -> Iterator[None]:
    """Leave out what these loggers say below a level."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, before in zip(loggers, levels, strict=True):
            logger.setLevel(before)

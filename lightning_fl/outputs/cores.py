"""Cores that this process may use."""

from __future__ import annotations

import os


def usable_cores() -> set[int]:
    """Return the numbers of the cores that this process may use: those of its job, or else all of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))

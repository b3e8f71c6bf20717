"""Width of what commands print."""

from __future__ import annotations

import os
import shutil
import sys

UNLIMITED = 10**6
"""Width of an output that is no terminal, unless the variable COLUMNS gives one."""


def width() -> int:
    """Return the columns of the terminal, or those that the variable COLUMNS gives."""
    return shutil.get_terminal_size().columns if is_terminal() or "COLUMNS" in os.environ else UNLIMITED


def is_terminal() -> bool:
    """True if the output goes to a terminal."""
    return sys.stdout.isatty()

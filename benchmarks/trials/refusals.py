"""Plug-in of pytest: keep the sentences of all refusals that tests provoke; see `same_refusals.py`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from lightning_fl.errors import UserError

CHANGING = re.compile(r"(/[\w.@-]+)+/?|\b0x[0-9a-f]+\b|\b\d+\.\d{3,}\b")
"""Paths, addresses and measured values, which differ from one time to the next."""
sentences: set[str] = set()
initialise = UserError.__init__


def _keeping(self: UserError, *arguments: Any, **named: Any) -> None:
    initialise(self, *arguments, **named)
    sentences.add(CHANGING.sub("…", " ".join(str(self).split())))


def pytest_configure() -> None:
    """Keep the sentence of every error of this kind from now on."""
    UserError.__init__ = _keeping  # type: ignore[method-assign]


def pytest_sessionfinish() -> None:
    """Write the sentences of this process."""
    folder = Path(os.environ["REFUSALS"])
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{sentence}\n" for sentence in sorted(sentences))
    (folder / f"{os.getpid()}.txt").write_text(
        text, encoding="utf-8", errors="backslashreplace"
    )  # a name may be no text

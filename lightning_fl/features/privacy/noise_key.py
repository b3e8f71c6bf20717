"""Key of a private run's noise, which its seed and its configuration decide.

Runs of a study share their seeds. If they shared their noise too, the difference of their models would have none. The number of
rounds is one of the settings: schedules of learning rates and warm-ups depend on it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

LATER = frozenset({"trainer.selection"})
"""Settings that are younger than kept runs: where one is None, the noise is what it was before there was the setting."""


def noise_key(settings: Mapping[str, Any]) -> int:
    """Return a number of 64 bits, above 0, that practically no other settings have; the order of the settings is of no account.

    >>> noise_key({"a": 1, "b": 2.0}) == noise_key({"b": 2.0, "a": 1}) != noise_key({"a": 1, "b": 3.0})
    True
    >>> noise_key({"a": 1, "trainer.selection": None}) == noise_key({"a": 1}) != noise_key({"a": 1, "trainer.selection": 1})
    True
    """
    given = {name: value for name, value in settings.items() if value is not None or name not in LATER}
    decisive = sorted((name, repr(value)) for name, value in given.items())
    return int.from_bytes(hashlib.sha256(repr(decisive).encode()).digest()[:8], "big") | 1

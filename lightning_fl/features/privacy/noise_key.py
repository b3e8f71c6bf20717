"""Key of a private run's noise, from its seed and its configuration.

Runs of a study share their seeds. If they also shared their noise, the noise would cancel in the difference of two models. The
number of rounds is one of the settings: schedules of learning rates and warm-ups depend on it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

LATER = frozenset({"trainer.selection", "trainer.compile"})
"""Settings that were added after the kept runs: if one is None, the noise is the same as before it was added."""


def noise_key(settings: Mapping[str, Any]) -> int:
    """Return a number of 64 bits, above 0, that is practically unique to the settings; their order does not matter.

    >>> noise_key({"a": 1, "b": 2.0}) == noise_key({"b": 2.0, "a": 1}) != noise_key({"a": 1, "b": 3.0})
    True
    >>> noise_key({"a": 1, "trainer.selection": None}) == noise_key({"a": 1}) != noise_key({"a": 1, "trainer.selection": 1})
    True
    """
    given = {name: value for name, value in settings.items() if value is not None or name not in LATER}
    decisive = sorted((name, repr(value)) for name, value in given.items())
    return int.from_bytes(hashlib.sha256(repr(decisive).encode()).digest()[:8], "big") | 1

"""Features around the rounds of a run: privacy, attacks, clocks, secure sums, guards, notes; none imports another.

Names are loaded on first use, because the engine imports some of these modules.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOMES = {
    "LossGuard": "lightning_fl.features.loss_guard",
    "SecureAggregation": "lightning_fl.features.secure_sums",
}
__all__ = ["LossGuard", "SecureAggregation"]

if TYPE_CHECKING:
    from lightning_fl.features.loss_guard import LossGuard as LossGuard
    from lightning_fl.features.secure_sums import SecureAggregation as SecureAggregation


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

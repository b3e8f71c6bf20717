"""Features around the rounds of a run: privacy, attacks, clocks, selection of clients, asynchrony, secure sums, guards, notes.

None imports another.
"""

from lightning_fl.features.loss_guard import LossGuard
from lightning_fl.features.secure_aggregation import SecureAggregation

__all__ = ["LossGuard", "SecureAggregation"]

"""Features around the rounds of a run: privacy, attacks, clocks, secure sums, guards, notes; none imports another."""

from lightning_fl.features.loss_guard import LossGuard
from lightning_fl.features.secure_aggregation import SecureAggregation

__all__ = ["LossGuard", "SecureAggregation"]

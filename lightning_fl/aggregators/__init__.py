"""How uploads merge."""

from lightning_fl.aggregators.members import Members
from lightning_fl.aggregators.weighted_mean import WeightedMean

__all__ = ["Members", "WeightedMean"]

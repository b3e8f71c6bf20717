"""How uploads merge."""

from lightning_fl.aggregators.weighted_mean import WeightedMean

__all__ = ["WeightedMean"]

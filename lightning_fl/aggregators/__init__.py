"""Aggregators: merge the uploads of a round."""

from lightning_fl.aggregators.majority_vote import MajorityVote
from lightning_fl.aggregators.masked_mean import MaskedMean
from lightning_fl.aggregators.members import Members
from lightning_fl.aggregators.normalised_mean import NormalisedMean
from lightning_fl.aggregators.weighted_mean import WeightedMean

__all__ = ["MajorityVote", "MaskedMean", "Members", "NormalisedMean", "WeightedMean"]

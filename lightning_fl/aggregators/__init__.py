"""Aggregators: merge the uploads of a round."""

from typing import TYPE_CHECKING

from lightning_fl.aggregators.keep_uploads import KeepUploads
from lightning_fl.aggregators.majority_vote import MajorityVote
from lightning_fl.aggregators.masked_mean import MaskedMean
from lightning_fl.aggregators.normalised_mean import NormalisedMean
from lightning_fl.aggregators.weighted_mean import WeightedMean
from lightning_fl.slots.former_names import former_names

__all__ = ["KeepUploads", "MajorityVote", "MaskedMean", "NormalisedMean", "WeightedMean"]

if not TYPE_CHECKING:
    __getattr__ = former_names(__name__, Members="KeepUploads")

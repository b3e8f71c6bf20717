"""Aggregators: merge the uploads of a round."""

from lightning_fl.aggregators.bucketing import Bucketing
from lightning_fl.aggregators.bulyan import Bulyan
from lightning_fl.aggregators.coordinate_median import CoordinateMedian
from lightning_fl.aggregators.extrapolation import ExtrapolatedMean
from lightning_fl.aggregators.geometric_median import GeometricMedian
from lightning_fl.aggregators.keep_uploads import KeepUploads
from lightning_fl.aggregators.krum import Krum, MultiKrum
from lightning_fl.aggregators.majority_vote import MajorityVote
from lightning_fl.aggregators.masked_mean import MaskedMean
from lightning_fl.aggregators.mean_of_each import MeanOfEach
from lightning_fl.aggregators.norm_bound import NormBound
from lightning_fl.aggregators.normalised_mean import NormalisedMean
from lightning_fl.aggregators.stale_mean import StaleMean
from lightning_fl.aggregators.trimmed_mean import TrimmedMean
from lightning_fl.aggregators.weighted_mean import WeightedMean

__all__ = [
    "Bucketing",
    "Bulyan",
    "CoordinateMedian",
    "ExtrapolatedMean",
    "GeometricMedian",
    "KeepUploads",
    "Krum",
    "MajorityVote",
    "MaskedMean",
    "MeanOfEach",
    "MultiKrum",
    "NormBound",
    "NormalisedMean",
    "StaleMean",
    "TrimmedMean",
    "WeightedMean",
]

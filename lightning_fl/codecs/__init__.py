"""Codecs: encode a message as bits and decode it."""

from lightning_fl.codecs.blockwise import Blockwise
from lightning_fl.codecs.broadcasts import Changes, Followed
from lightning_fl.codecs.cast import Cast
from lightning_fl.codecs.dense import Dense
from lightning_fl.codecs.differences import Differences
from lightning_fl.codecs.entropy_coded import EntropyCoded
from lightning_fl.codecs.error_feedback import ErrorFeedback
from lightning_fl.codecs.few_bits import OneBit, Quantiser
from lightning_fl.codecs.integers import Integers
from lightning_fl.codecs.low_rank import LowRank
from lightning_fl.codecs.random_k import RandomK
from lightning_fl.codecs.rotated import DRIVE, EDEN
from lightning_fl.codecs.sparse_ternary import STC
from lightning_fl.codecs.stochastic import QSGD, TernGrad
from lightning_fl.codecs.top_k import FairTopK, SharedTopK, TopK
from lightning_fl.codecs.uniform import Uniform

__all__ = [
    "DRIVE",
    "EDEN",
    "QSGD",
    "STC",
    "Blockwise",
    "Cast",
    "Changes",
    "Dense",
    "Differences",
    "EntropyCoded",
    "ErrorFeedback",
    "FairTopK",
    "Followed",
    "Integers",
    "LowRank",
    "OneBit",
    "Quantiser",
    "RandomK",
    "SharedTopK",
    "TernGrad",
    "TopK",
    "Uniform",
]

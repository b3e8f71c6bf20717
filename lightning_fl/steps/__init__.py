"""Steps: the server's work on the merged uploads."""

from lightning_fl.steps.accumulate import Accumulate
from lightning_fl.steps.apply import Apply
from lightning_fl.steps.centred_clipping import CentredClipping
from lightning_fl.steps.compress import Compress
from lightning_fl.steps.corrected_mean import CorrectedMean
from lightning_fl.steps.distillation import Distillation
from lightning_fl.steps.further_models import FurtherModels
from lightning_fl.steps.mean_of_two import MeanOfTwo
from lightning_fl.steps.product_mean import ProductMean
from lightning_fl.steps.reconfiguration import Reconfiguration
from lightning_fl.steps.server_optimizers import Adagrad, Adam, Momentum, MomentumInStages, Yogi
from lightning_fl.steps.server_update import DynamicServerUpdate, ServerAsClient, StaticServerUpdate
from lightning_fl.steps.shared_state import ControlUpdate, GradientMomentum, Moments, SharedMomentum
from lightning_fl.steps.torch_optimizer import ServerOptimizer
from lightning_fl.steps.trust_scores import TrustScores
from lightning_fl.steps.warmed_up_moments import WarmedUpMoments

__all__ = [
    "Accumulate",
    "Adagrad",
    "Adam",
    "Apply",
    "CentredClipping",
    "Compress",
    "ControlUpdate",
    "CorrectedMean",
    "Distillation",
    "DynamicServerUpdate",
    "FurtherModels",
    "GradientMomentum",
    "MeanOfTwo",
    "Moments",
    "Momentum",
    "MomentumInStages",
    "ProductMean",
    "Reconfiguration",
    "ServerAsClient",
    "ServerOptimizer",
    "SharedMomentum",
    "StaticServerUpdate",
    "TrustScores",
    "WarmedUpMoments",
    "Yogi",
]

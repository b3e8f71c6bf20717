"""Rules: a client's use of its gradients, and its upload."""

from lightning_fl.rules.adam import LocalAdam, SharedAdam, WarmedUpAdam
from lightning_fl.rules.best_model import BestModel
from lightning_fl.rules.control_variates import ControlVariates
from lightning_fl.rules.decoupled_momentum import DecoupledMomentum
from lightning_fl.rules.dynamic_regularisation import DynamicRegularisation
from lightning_fl.rules.gradient_step import GradientStep
from lightning_fl.rules.local_optimizer import LocalOptimizer
from lightning_fl.rules.meta_gradient import MetaGradient
from lightning_fl.rules.mime import CorrectedMomentum, FrozenMomentum
from lightning_fl.rules.model_contrast import ModelContrast
from lightning_fl.rules.moreau_envelope import MoreauEnvelope
from lightning_fl.rules.normalised import Normalised
from lightning_fl.rules.prox_skip import ProxSkip
from lightning_fl.rules.proximal import Proximal
from lightning_fl.rules.pulled import Pulled
from lightning_fl.rules.restarted_momentum import RestartedMomentum
from lightning_fl.rules.sharpness_aware import SharpnessAware
from lightning_fl.rules.squared_gradients import SquaredGradients
from lightning_fl.rules.thresholded import Thresholded

__all__ = [
    "BestModel",
    "ControlVariates",
    "CorrectedMomentum",
    "DecoupledMomentum",
    "DynamicRegularisation",
    "FrozenMomentum",
    "GradientStep",
    "LocalAdam",
    "LocalOptimizer",
    "MetaGradient",
    "ModelContrast",
    "MoreauEnvelope",
    "Normalised",
    "ProxSkip",
    "Proximal",
    "Pulled",
    "RestartedMomentum",
    "SharedAdam",
    "SharpnessAware",
    "SquaredGradients",
    "Thresholded",
    "WarmedUpAdam",
]

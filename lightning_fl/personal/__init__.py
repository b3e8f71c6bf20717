"""Personal parts: parameters and models that each client owns, and its model for predictions."""

from lightning_fl.personal.adapted_model import AdaptedModel
from lightning_fl.personal.best_of_models import BestOfModels
from lightning_fl.personal.head_then_body import HeadThenBody
from lightning_fl.personal.kept_model import KeptModel
from lightning_fl.personal.mixed_model import MixedModel
from lightning_fl.personal.personal_gates import PersonalGates
from lightning_fl.personal.personal_layers import PersonalLayers
from lightning_fl.personal.personal_model import PersonalModel
from lightning_fl.personal.personal_norms import PersonalNorms
from lightning_fl.personal.trained_alone import TrainedAlone

__all__ = [
    "AdaptedModel",
    "BestOfModels",
    "HeadThenBody",
    "KeptModel",
    "MixedModel",
    "PersonalGates",
    "PersonalLayers",
    "PersonalModel",
    "PersonalNorms",
    "TrainedAlone",
]

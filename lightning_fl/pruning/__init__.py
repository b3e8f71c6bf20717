"""Parts of the pruning callbacks: rates, scores of filters, plans, cuts and masks.

They are independent of federated learning.
"""

from lightning_fl.pruning.apply_plan import plans_of, prune
from lightning_fl.pruning.curvature.products import trainable
from lightning_fl.pruning.curvature.source_rate import SourceRate
from lightning_fl.pruning.curvature.training_loss import TrainingLoss
from lightning_fl.pruning.graph import plan_for, prunable_layers
from lightning_fl.pruning.importance import feature_map_ranks, filter_magnitudes, filters_to_keep, lowest
from lightning_fl.pruning.loading import Prunable, load_pruned, shrink, shrink_when_loading
from lightning_fl.pruning.masks import Masks, apply_masks, forget_masks, hold_masks, largest, masks_of, prunable
from lightning_fl.pruning.plan import Plan
from lightning_fl.pruning.schedule import Schedule

__all__ = [
    "Masks",
    "Plan",
    "Prunable",
    "Schedule",
    "SourceRate",
    "TrainingLoss",
    "apply_masks",
    "feature_map_ranks",
    "filter_magnitudes",
    "filters_to_keep",
    "forget_masks",
    "hold_masks",
    "largest",
    "load_pruned",
    "lowest",
    "masks_of",
    "plan_for",
    "plans_of",
    "prunable",
    "prunable_layers",
    "prune",
    "shrink",
    "shrink_when_loading",
    "trainable",
]

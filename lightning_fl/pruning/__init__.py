"""What pruning callbacks are made of: what a pruning keeps, and how a network is cut to it. Knows nothing of federations."""

from lightning_fl.pruning.masks import Masks, apply_masks, forget_masks, hold_masks, largest, masks_of, prunable
from lightning_fl.pruning.plan import Plan
from lightning_fl.pruning.surgery import plans_of, prune

__all__ = [
    "Masks",
    "Plan",
    "apply_masks",
    "forget_masks",
    "hold_masks",
    "largest",
    "masks_of",
    "plans_of",
    "prunable",
    "prune",
]

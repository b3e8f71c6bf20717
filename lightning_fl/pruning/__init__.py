"""What pruning callbacks are made of: scores of filters, the plan of a cut and the cut itself. Knows nothing of federations."""

from lightning_fl.pruning.graph import plan_for, prunable_layers
from lightning_fl.pruning.importance import feature_map_ranks, filter_magnitudes, filters_to_keep, lowest
from lightning_fl.pruning.loading import Prunable, load_pruned, shrink, shrink_when_loading
from lightning_fl.pruning.plan import Plan
from lightning_fl.pruning.schedule import Schedule
from lightning_fl.pruning.surgery import plans_of, prune

__all__ = [
    "Plan",
    "Prunable",
    "Schedule",
    "feature_map_ranks",
    "filter_magnitudes",
    "filters_to_keep",
    "load_pruned",
    "lowest",
    "plan_for",
    "plans_of",
    "prunable_layers",
    "prune",
    "shrink",
    "shrink_when_loading",
]

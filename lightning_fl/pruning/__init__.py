"""What pruning callbacks are made of: what a pruning keeps, and how a network is cut to it. Knows nothing of federations."""

from lightning_fl.pruning.plan import Plan
from lightning_fl.pruning.surgery import plans_of, prune

__all__ = ["Plan", "plans_of", "prune"]

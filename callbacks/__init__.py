"""Lightning callbacks that run in `L.Trainer` and in `FederatedTrainer`."""

from lightning_fl.callbacks.adaptive_pruning import AdaptivePruning
from lightning_fl.callbacks.magnitude_pruning import MagnitudePruning
from lightning_fl.callbacks.sparse_updates import SparseUpdates

__all__ = ["AdaptivePruning", "MagnitudePruning", "SparseUpdates"]

"""Lightning callbacks that run in `L.Trainer` and in `FederatedTrainer`."""

from lightning_fl.callbacks.communication_meter import CommunicationMeter
from lightning_fl.callbacks.sparse_updates import SparseUpdates
from lightning_fl.callbacks.target_reached import TargetReached

__all__ = ["CommunicationMeter", "SparseUpdates", "TargetReached"]

"""Lightning callbacks for `L.Trainer` and `FederatedTrainer`. `AdapterError`, `ClientEvaluation`, `CodecError` and
`EnergyMeter` need the clients of a `FederatedTrainer`.
"""

from lightning_fl.callbacks.adapters import AdapterError, AdapterExport
from lightning_fl.callbacks.backdoor_probe import BackdoorProbe
from lightning_fl.callbacks.client_evaluation import ClientEvaluation
from lightning_fl.callbacks.codec_error import CodecError
from lightning_fl.callbacks.communication_meter import CommunicationMeter
from lightning_fl.callbacks.dynamic_gates import DynamicGates
from lightning_fl.callbacks.energy_meter import EnergyMeter
from lightning_fl.callbacks.pruning.adaptive_pruning import AdaptivePruning
from lightning_fl.callbacks.pruning.filter_pruning import FilterPruning
from lightning_fl.callbacks.pruning.magnitude_pruning import MagnitudePruning
from lightning_fl.callbacks.sparse_updates import SparseUpdates
from lightning_fl.callbacks.target_reached import TargetReached

__all__ = [
    "AdapterError",
    "AdapterExport",
    "AdaptivePruning",
    "BackdoorProbe",
    "ClientEvaluation",
    "CodecError",
    "CommunicationMeter",
    "DynamicGates",
    "EnergyMeter",
    "FilterPruning",
    "MagnitudePruning",
    "SparseUpdates",
    "TargetReached",
]

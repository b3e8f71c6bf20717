"""Client selection: which clients take part in a round."""

from lightning_fl.features.selection.by_norm import ByNorm
from lightning_fl.features.selection.by_size import BySize
from lightning_fl.features.selection.fastest import Fastest
from lightning_fl.features.selection.in_turn import InTurn
from lightning_fl.features.selection.power_of_choice import PowerOfChoice
from lightning_fl.features.selection.selection import ClientSelection, Reads, SelectionTurn
from lightning_fl.features.selection.uniform import Uniform

__all__ = [
    "ByNorm",
    "BySize",
    "ClientSelection",
    "Fastest",
    "InTurn",
    "PowerOfChoice",
    "Reads",
    "SelectionTurn",
    "Uniform",
]

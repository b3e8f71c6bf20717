"""Gates that choose, sample by sample, the channels of a convolution to compute. Independent of federated learning."""

from lightning_fl.gates.gate import Gate
from lightning_fl.gates.network import add_gates, describe_gates, gate_parameters, gates_of, remove_gates, without_gates
from lightning_fl.gates.penalty import lasso, observed, penalised
from lightning_fl.gates.sliced import count_sliced_macs, sliced

__all__ = [
    "Gate",
    "add_gates",
    "count_sliced_macs",
    "describe_gates",
    "gate_parameters",
    "gates_of",
    "lasso",
    "observed",
    "penalised",
    "remove_gates",
    "sliced",
    "without_gates",
]

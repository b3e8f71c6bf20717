"""The methods by their papers' names, each a recipe of slots."""

from lightning_fl.algorithms.base import Algorithm
from lightning_fl.algorithms.efficient_adam import EfficientAdam
from lightning_fl.algorithms.fedadam import FairnessTop, FedAdam, FedAdamSSM, FedAdamTop
from lightning_fl.algorithms.fedavg import FedAvg
from lightning_fl.algorithms.fedprox import FedProx
from lightning_fl.algorithms.momentum import DeviceM, ServerM
from lightning_fl.algorithms.one_bit_adam import OneBitAdam

__all__ = [
    "Algorithm",
    "DeviceM",
    "EfficientAdam",
    "FairnessTop",
    "FedAdam",
    "FedAdamSSM",
    "FedAdamTop",
    "FedAvg",
    "FedProx",
    "OneBitAdam",
    "ServerM",
]

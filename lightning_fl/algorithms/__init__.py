"""The methods by their papers' names, each a recipe of slots."""

from lightning_fl.algorithms.base import Algorithm
from lightning_fl.algorithms.fedavg import FedAvg
from lightning_fl.algorithms.fedldf import HDFL, FedADP, FedLDF, RandomLayers
from lightning_fl.algorithms.fedprox import FedProx
from lightning_fl.algorithms.momentum import DeviceM, ServerM

__all__ = ["HDFL", "Algorithm", "DeviceM", "FedADP", "FedAvg", "FedLDF", "FedProx", "RandomLayers", "ServerM"]

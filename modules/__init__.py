"""Networks and LightningModules, independent of federated learning."""

from lightning_fl.modules.classifier import ImageClassifier
from lightning_fl.modules.networks import NETWORKS, network

__all__ = ["NETWORKS", "ImageClassifier", "network"]

"""Networks and LightningModules; they know nothing of federated learning."""

from lightning_fl.modules.classifier import ImageClassifier
from lightning_fl.modules.networks import NETWORKS, network

__all__ = ["NETWORKS", "ImageClassifier", "network"]

"""Differential privacy of clients: clipping and noise at the server or by each client, and the accounting of ε."""

from lightning_fl.features.privacy.adaptive_clip import AdaptiveClip
from lightning_fl.features.privacy.client_privacy import ClientPrivacy
from lightning_fl.features.privacy.local_privacy import LocalPrivacy

__all__ = ["AdaptiveClip", "ClientPrivacy", "LocalPrivacy"]

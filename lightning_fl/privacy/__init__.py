"""Differential privacy of clients: clipping and noise at the server, and the accounting of what they cost."""

from lightning_fl.privacy.adaptive_clip import AdaptiveClip
from lightning_fl.privacy.client_privacy import ClientPrivacy

__all__ = ["AdaptiveClip", "ClientPrivacy"]

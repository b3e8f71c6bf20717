"""Keeps the uploads beside what another aggregator makes of them (FedDF; Lin et al., NeurIPS 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lightning_fl.slots import Aggregator, Message, Upload


@dataclass(frozen=True)
class Members(Aggregator):
    """The inner aggregator's message, and under `members/<name>` all uploads (K, ·) of that name. Memory grows with K.

    Attributes:
        inner: merges the uploads, for instance `WeightedMean()`.
    """

    inner: Aggregator

    def needs(self) -> frozenset[str]:
        """What the inner aggregator needs."""
        return self.inner.needs()

    def add(self, accumulator: dict[str, Any], upload: Upload) -> None:
        """Let the inner aggregator add it, and keep it."""
        self.inner.add(accumulator.setdefault("inner", {}), upload)
        accumulator.setdefault("uploads", []).append(upload.message)

    def finish(self, accumulator: dict[str, Any]) -> Message:
        """The inner message and the stacked uploads."""
        uploads = accumulator["uploads"]
        members = {f"members/{name}": torch.stack([upload[name] for upload in uploads]) for name in uploads[0]}
        return self.inner.finish(accumulator["inner"]) | members

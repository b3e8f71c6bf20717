"""Base of aggregators that some attackers among the clients can only move so far."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_fl.errors import require
from lightning_fl.slots import Aggregator, Merging, Message, Upload


@dataclass(frozen=True)
class Rows:
    """Accepted uploads of a round, one client after the other in the order of their indices.

    Attributes:
        vectors: for each name the clients' vectors (K, ·) in float64.
        sent: for each name bools (K, ·), True for what a client has sent; a name without any is sent by all.
        weights: the clients' numbers of samples (K,), which are claims of theirs, in float64.
    """

    vectors: Message
    sent: Message
    weights: Tensor

    def __len__(self) -> int:
        """Number of clients."""
        return len(self.weights)

    def measured(self, by: str) -> Tensor:
        """Return the vectors by which clients are compared (K, ·): those of the model, or `all` side by side."""
        if by == "model":
            return self.vectors["model"]
        return torch.cat([self.vectors[name] for name in sorted(self.vectors)], dim=1)

    def mixed(self, shares: Tensor) -> Message:
        """Return Σ_k shares_k x_k for every name, given the clients' shares (K,)."""
        return {name: shares @ vectors for name, vectors in self.vectors.items()}


class Robust(Aggregator):
    """Keeps all uploads of a round, K·d numbers, and merges them in the order of the clients' indices.

    Clients have equal weights, since a number of samples is a claim. With fewer uploads than the part needs, the round is
    skipped: the server's model stays as it is, and `robust/skipped` is 1.
    """

    uses = frozenset[str]()

    @property
    def least_uploads(self) -> int:
        """Uploads without which the part has no meaning."""
        return 1

    def check(self, cohort_size: int) -> None:
        """Raise `UserError` if a round has too few clients."""
        require(
            cohort_size >= self.least_uploads,
            f"{self} needs {self.least_uploads} clients in a round, but there are {cohort_size}: increase clients_per_round.",
        )

    def add(self, accumulator: dict[str, Any], upload: Upload) -> None:
        """Keep the upload."""
        entry = (upload.result.client, upload.result.weight, upload.message, upload.sent)
        accumulator.setdefault("uploads", []).append(entry)

    def finish(self, accumulator: dict[str, Any]) -> Message:
        """Return the merged message of enough uploads."""
        return self.merge(rows_of(accumulator["uploads"]))

    def combine(self, accumulator: dict[str, Any], merging: Merging) -> Message:
        """Return the merged message, or {} for a round that is skipped."""
        merging.metrics["robust/skipped"] = int(len(accumulator["uploads"]) < self.least_uploads)
        if merging.metrics["robust/skipped"]:
            merging.is_skipped = True
            return {}
        return self.merge(rows_of(accumulator["uploads"]))

    @abstractmethod
    def merge(self, rows: Rows) -> Message:
        """Return the merged message of enough uploads, in float64."""


def rows_of(uploads: Sequence[tuple[int, float, Message, Message]]) -> Rows:
    """Return uploads, each a client, its weight, its message and what of it was sent, in the order of the clients."""
    ordered = sorted(uploads, key=lambda upload: upload[0])
    messages = [message for _, _, message, _ in ordered]
    vectors = {name: torch.stack([message[name] for message in messages]).double() for name in messages[0]}
    sent = {
        name: torch.stack(
            [sent.get(name, torch.ones_like(message[name], dtype=torch.bool)) for _, _, message, sent in ordered]
        )
        for name in vectors
        if any(name in sent for _, _, _, sent in ordered)
    }
    return Rows(vectors, sent, torch.tensor([weight for _, weight, _, _ in ordered], dtype=torch.float64))

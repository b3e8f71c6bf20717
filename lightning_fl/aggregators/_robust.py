"""Base class of robust aggregators, which bound the influence of attackers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_fl.errors import require
from lightning_fl.slots import Aggregator, Merging, Message, Upload, Uploader, kept_columns


class Entry(NamedTuple):
    """Upload as it is kept: its client, the client's number of samples, the message, and masks of the sent numbers."""

    uploader: Uploader
    weight: float
    message: Message
    sent: Message


@dataclass(frozen=True)
class Rows:
    """Accepted uploads of a round, one client after the other in the order of their indices.

    Attributes:
        vectors: for each name the clients' vectors (K, ·) in float64.
        sent: for each name bools (K, ·), True for what a client has sent; a name without any is sent by all.
        weights: numbers of samples (K,) that the clients claim, in float64.
        uploaders: the clients.
    """

    vectors: Message
    sent: Message
    weights: Tensor
    uploaders: Sequence[Uploader]

    def __len__(self) -> int:
        """Number of clients."""
        return len(self.weights)

    @property
    def main(self) -> str:
        """Name of the vectors that stand for an upload: the model's, or the first if there is no model, as in a gradient turn."""
        return main_name(self.vectors)

    def measured(self, by: str) -> Tensor:
        """Return the vectors by which clients are compared (K, ·): the main ones, or `all` side by side."""
        if by == "model":
            return self.vectors[self.main]
        return torch.cat([self.vectors[name] for name in sorted(self.vectors)], dim=1)

    def mixed(self, shares: Tensor) -> Message:
        """Return Σ_k shares_k x_k for every name, given the clients' shares (K,)."""
        return {name: shares @ vectors for name, vectors in self.vectors.items()}

    @property
    def has_adversary(self) -> bool:
        """True if the run has an adversary, so that the shares of uploads are of interest."""
        return any(uploader.attacking is not None for uploader in self.uploaders)


class Robust(Aggregator):
    """Keeps all uploads of a round, K·d numbers, and merges them in the order of the clients' indices.

    Clients have equal weights, because a client could claim any number of samples. With fewer uploads than the part needs, the
    round is skipped: the server's model stays as it is, and `robust/skipped` is 1. Reports `kept_columns`; coordinate-wise
    parts only in a run with an adversary.
    """

    uses = frozenset[str]()

    @property
    def least_uploads(self) -> int:
        """Smallest number of uploads that the part needs."""
        return 1

    def check(self, cohort_size: int) -> None:
        """Raise `UserError` if a round has too few clients."""
        require(
            cohort_size >= self.least_uploads,
            f"{self} needs {self.least_uploads} clients in a round, but there are {cohort_size}: increase clients_per_round.",
        )

    def add(self, accumulator: dict[str, Any], upload: Upload) -> None:
        """Keep the upload."""
        result = upload.result
        uploader = Uploader(result.client, result.attacking, result.num_uploads)
        entry = Entry(uploader, result.weight, upload.message, upload.sent)
        accumulator.setdefault("uploads", []).append(entry)

    def finish(self, accumulator: dict[str, Any]) -> Message:
        """Return the merged message of enough uploads."""
        return self.merge(rows_of(accumulator["uploads"]))[0]

    def combine(self, accumulator: dict[str, Any], merging: Merging) -> Message:
        """Return the merged message, or {} for a round that is skipped."""
        merging.metrics["robust/skipped"] = int(len(accumulator["uploads"]) < self.least_uploads)
        if merging.metrics["robust/skipped"]:
            merging.is_skipped = True
            return {}
        rows = rows_of(accumulator["uploads"])
        message, shares = self.merge(rows)
        if shares is not None:
            merging.metrics |= kept_columns(shares, rows.uploaders)
        return message

    @abstractmethod
    def merge(self, rows: Rows) -> tuple[Message, Tensor | None]:
        """Return the merged message of enough uploads, in float64, and the share of each upload in the model (K,).

        A coordinate-wise part returns the mean share over the coordinates, or None without an adversary.
        """


def main_name(vectors: Iterable[str]) -> str:
    """Return the name of the vector that stands for an upload: the model, or the first by name if there is no model.

    >>> main_name(["buffers", "model"]), main_name(["moments/gradient"])
    ('model', 'moments/gradient')
    """
    names = sorted(vectors)
    return "model" if "model" in names else names[0]


def rows_of(uploads: Sequence[Entry]) -> Rows:
    """Return uploads in the order of their clients."""
    ordered = sorted(uploads, key=lambda entry: entry.uploader.client)
    vectors = {name: torch.stack([entry.message[name] for entry in ordered]).double() for name in ordered[0].message}
    sent = {
        name: torch.stack(
            [entry.sent.get(name, torch.ones_like(entry.message[name], dtype=torch.bool)) for entry in ordered]
        )
        for name in vectors
        if any(name in entry.sent for entry in ordered)
    }
    weights = torch.tensor([entry.weight for entry in ordered], dtype=torch.float64)
    return Rows(vectors, sent, weights, [entry.uploader for entry in ordered])

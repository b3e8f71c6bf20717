"""The aggregator slot: merging the uploads of a round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_fl.slots.exchange import Upload, Uploader
from lightning_fl.slots.message import SENT, Message
from lightning_fl.slots.part import Part
from lightning_fl.slots.round_context import RoundContext


@dataclass
class Merging:
    """Round whose uploads an aggregator merges: facts for it to read, and values that it reports.

    Attributes:
        context: facts about the run, with the source of random draws.
        metrics: values that it reports, by the name under which they are logged with the round.
        is_skipped: set to True if too few uploads have arrived; the server's model then stays unchanged.
        uploaders: clients of the uploads that it keeps for the steps, in their order.
    """

    context: RoundContext
    metrics: dict[str, float] = field(default_factory=dict)
    is_skipped: bool = False
    uploaders: Sequence[Uploader] = ()


def kept_columns(weights: Tensor, uploaders: Sequence[Uploader]) -> dict[str, float]:
    """Return the columns that a robust part reports about the weights of the uploads.

    Args:
        weights: weights a of the uploads (K,), at least 0, in any scale.
        uploaders: their clients.

    Returns:
        `robust/kept`, the effective number of uploads, (Σa)² / Σa², which is n for n equal weights. With an adversary, also
        `robust/attackers_kept`, the attackers' share of the weights. A mean of n uploads counts as n uploads of weight a/n.

    >>> import torch
    >>> kept_columns(torch.tensor([1.0, 1.0, 0.0, 2.0]), [Uploader(k, float(k == 3)) for k in range(4)])
    {'robust/kept': 2.6666666666666665, 'robust/attackers_kept': 0.5}
    """
    exact = weights.detach().double().cpu()
    counts = exact.new_tensor([uploader.num_uploads for uploader in uploaders])
    total, squares = float(exact.sum()), float((exact.square() / counts).sum())
    columns = {"robust/kept": total**2 / squares if squares else 0.0}
    shares = [uploader.attacking for uploader in uploaders if uploader.attacking is not None]
    if len(shares) == len(uploaders):
        columns["robust/attackers_kept"] = float(exact @ exact.new_tensor(shares)) / total if total else 0.0
    return columns


class Aggregator(Part, ABC):
    """Merges the accepted uploads of a round into one message.

    If clients send parts of a model, the aggregator chooses the divisor of each coordinate: the weights of all clients, so that
    a coordinate that was not sent counts as no change, or the weights of the clients that sent it (`Upload.sent`).

    Every upload must contain the entries that it `needs`. It `provides` entries of the merged message that no upload has.
    By default it `uses` `SENT`. An aggregator that averages zeros where nothing was sent must not use it.
    """

    _promises, _kept_by = frozenset({"is_mean", "sums_suffice"}), frozenset({"add", "finish", "combine"})

    keeps_uploads = True
    """True if the accumulator keeps every upload; False if it holds only tensors, which are then summed over the processes."""

    merges_none = False
    """True if it also merges a round without an accepted upload; otherwise such a round leaves the model unchanged."""

    sums_suffice = False
    """True if it reads only sums over clients: of vectors, each times a number that its client knows, and of these numbers.

    With secure aggregation the server sees nothing else.
    """

    is_mean = False
    """True if it merges each entry into its mean over the clients, weighted by their samples, or equally (`weighs_equally`).

    A private run computes this mean itself, from clipped uploads, with noise.
    """

    is_median = False
    """True if a number becomes 0 when most uploads have 0 there."""

    @property
    def uses(self) -> frozenset[str]:
        """Names of the entries that it reads; `SENT` for the masks of the numbers that each client sent."""
        return self.needs | {SENT}

    def weighs_equally(self, name: str) -> bool:
        """True if it averages an entry of that name with equal weights, whatever the clients' numbers of samples."""
        return True

    def check(self, cohort_size: int) -> None:
        """Raise `UserError` if the part needs more clients than a round has."""

    @abstractmethod
    def add(self, accumulator: dict[str, Any], upload: Upload) -> None:
        """Add one accepted upload to the accumulator, in place.

        Args:
            accumulator: {} at the start of a round.
            upload: decoded upload; each is added once.
        """

    @abstractmethod
    def finish(self, accumulator: dict[str, Any]) -> Message:
        """Return the merged message, in any floating dtype; called after the last of at least one upload."""

    def combine(self, accumulator: dict[str, Any], merging: Merging) -> Message:
        """Return the merged message as `finish` does; for parts that draw numbers, report values or may skip a round."""
        return self.finish(accumulator)

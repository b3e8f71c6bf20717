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
    """What an aggregator may know of the round whose uploads it merges, and what it says of it.

    Attributes:
        context: facts about the run, with the source of random draws.
        metrics: values that it reports, by the name under which they are logged with the round.
        is_skipped: set to True if too few uploads have come: the server's model then stays as it is.
        uploaders: clients of the uploads that it keeps for the steps, in their order.
    """

    context: RoundContext
    metrics: dict[str, float] = field(default_factory=dict)
    is_skipped: bool = False
    uploaders: Sequence[Uploader] = ()


def kept_columns(weights: Tensor, uploaders: Sequence[Uploader]) -> dict[str, float]:
    """Return what a robust part reports of the weights that it gave to the uploads.

    Args:
        weights: weights a of the uploads (K,), at least 0, in any scale.
        uploaders: their clients.

    Returns:
        `robust/kept`, the number of equally weighted uploads with as much weight each, (Σa)² / Σa², and with an adversary
        `robust/attackers_kept`, the share of the attackers' weights. A mean of n uploads gives each of them a/n.

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
    It `uses` `SENT` unless it says otherwise; one that averages zeros where nothing was sent must not.
    """

    _promises, _kept_by = frozenset({"is_mean", "sums_suffice"}), frozenset({"add", "finish", "combine"})

    keeps_uploads = True
    """True if the accumulator keeps every upload; False if it holds only tensors, which are then summed over the processes."""

    merges_none = False
    """True if it merges also a round without an accepted upload, which leaves the model as it is otherwise."""

    sums_suffice = False
    """True if it reads only sums: of the clients' vectors, each times a number that its client knows, and of such numbers.

    With secure sums the server has no more.
    """

    is_mean = False
    """True if it merges each entry into its mean over the clients, weighted by their samples, or equally (`weighs_equally`).

    A private run computes this mean itself, of clipped uploads with noise.
    """

    is_median = False
    """True if a number becomes 0 when most uploads have 0 there."""

    @property
    def uses(self) -> frozenset[str]:
        """Names of the entries that it reads; `SENT` for the masks of what each client sent."""
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

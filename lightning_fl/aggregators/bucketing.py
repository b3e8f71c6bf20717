"""Means of a few uploads each, before another aggregator (Karimireddy et al., Byzantine-Robust Learning on Heterogeneous Datasets
via Bucketing, ICLR 2022, arXiv:2006.09365).

    shuffle the clients; average buckets of s;  Δ = inner(the ⌈K/s⌉ means)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor

from lightning_fl.aggregators._robust import Robust, Rows, rows_of
from lightning_fl.errors import require
from lightning_fl.slots import SENT, Aggregator, Merging, Message, Result, Upload, check_inner, compressible, forwards


@forwards("inner", "in_common is_median merges_none needs provides weighs_equally")
@dataclass(frozen=True)
class Bucketing(Aggregator):
    """Pass the means of buckets of s uploads to another aggregator; with non-IID clients they differ less than uploads.

    A bucket with an attacker counts as an attacker, so the inner part must tolerate as many buckets as there are attackers.
    Clients are shuffled in each round. Within a bucket they have equal weights, or weights by samples if the inner part has.

    Attributes:
        inner: aggregator of the means, for instance `CoordinateMedian()`.
        s: uploads in a bucket, at least 1; the last one may have fewer. 1 leaves the uploads as they are.
    """

    keeps_uploads = True
    is_mean = sums_suffice = False
    inner: Aggregator
    s: Annotated[int, Ge(1)] = 2

    def __post_init__(self) -> None:
        check_inner(self, "inner", Aggregator, "CoordinateMedian()")
        single = sorted(name for name in self.inner.needs if not compressible(name))
        require(
            not single,
            f"Bucketing averages vectors of a few clients, and {type(self.inner).__name__} needs {single} of each client: use "
            "another aggregator inside, such as CoordinateMedian().",
        )

    @property
    def uses(self) -> frozenset[str]:
        """Entries that the inner part uses, except masks: the mean of a bucket counts unsent numbers as 0."""
        return self.inner.uses - {SENT}

    def check(self, cohort_size: int) -> None:
        """Raise `UserError` if the aggregator inside needs more buckets than a round has."""
        self.inner.check(-(-cohort_size // self.s))

    def add(self, accumulator: dict[str, Any], upload: Upload) -> None:
        """Keep the upload."""
        Robust.add(self, accumulator, upload)  # type: ignore[arg-type]

    def finish(self, accumulator: dict[str, Any]) -> Message:
        """Return the message of buckets in the order of the clients."""
        return self.inner.finish(self._buckets(accumulator, torch.arange(len(accumulator["uploads"]))))

    def combine(self, accumulator: dict[str, Any], merging: Merging) -> Message:
        """Return the message of the shuffled clients' buckets."""
        generator = torch.Generator().manual_seed(merging.context.draw.seed("buckets", common=True))
        order = torch.randperm(len(accumulator["uploads"]), generator=generator)
        return self.inner.combine(self._buckets(accumulator, order), merging)

    def _buckets(self, accumulator: dict[str, Any], order: Tensor) -> dict[str, Any]:
        """Return the inner part's accumulator with the means of the buckets, of clients in this order."""
        rows: Rows = rows_of(accumulator["uploads"])
        inner: dict[str, Any] = {}
        for place, bucket in enumerate(order.split(self.s)):
            weights, shares = rows.weights[bucket], [rows.uploaders[k].attacking for k in bucket.tolist()]
            means = {name: self._mean(name, vectors[bucket], weights) for name, vectors in rows.vectors.items()}
            known = [share for share in shares if share is not None]
            is_known = len(known) == len(shares)
            attacking = float(self._mean(rows.main, weights.new_tensor(known), weights)) if is_known else None
            weight = float(weights.sum())
            result = Result(place, {}, weight, {}, {}, {}, 0, attacking=attacking, num_uploads=len(bucket))
            self.inner.add(inner, Upload(result, means))
        return inner

    def _mean(self, name: str, numbers: Tensor, weights: Tensor) -> Tensor:
        """Return the mean of a bucket's entries of a name (s, …), given the clients' numbers of samples (s,)."""
        if self.weighs_equally(name):
            return numbers.mean(0)
        return (weights / weights.sum()).to(numbers.device) @ numbers

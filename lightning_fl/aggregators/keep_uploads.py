"""Keep the uploads next to another aggregator's result (FedDF; Lin et al., NeurIPS 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lightning_fl.slots import (
    UPLOAD_WEIGHTS,
    UPLOADS,
    Aggregator,
    Merging,
    Message,
    Upload,
    Uploader,
    check_inner,
    forwards,
)


@forwards("inner", "check in_common is_median merges_none needs uses weighs_equally")
@dataclass(frozen=True)
class KeepUploads(Aggregator):
    """Return the inner aggregator's message, and all uploads (K, ·) of a name as `uploads/<name>`. Memory grows with K.

    The clients' weights n_k (K,) are `uploads/weight`, or all 1 if the inner aggregator weighs their models equally.

    Attributes:
        inner: aggregator that merges the uploads, for instance `WeightedMean()`.
    """

    keeps_uploads = True
    is_mean = sums_suffice = False
    inner: Aggregator

    def __post_init__(self) -> None:
        check_inner(self, "inner", Aggregator, "WeightedMean()")

    @property
    def provides(self) -> frozenset[str]:
        """The uploads, and what the inner aggregator provides."""
        return self.inner.provides | {UPLOADS}

    def add(self, accumulator: dict[str, Any], upload: Upload) -> None:
        """Add the upload to the inner aggregator, and keep it."""
        self.inner.add(accumulator.setdefault("inner", {}), upload)
        accumulator.setdefault("uploads", []).append(upload.message)
        accumulator.setdefault("uploaders", []).append(Uploader(upload.result.client, upload.result.attacking))
        accumulator.setdefault("weights", []).append(
            1.0 if self.inner.weighs_equally("model") else upload.result.weight
        )

    def finish(self, accumulator: dict[str, Any]) -> Message:
        """Return the inner message and the stacked uploads."""
        return self.inner.finish(accumulator["inner"]) | self._stacked(accumulator)

    def combine(self, accumulator: dict[str, Any], merging: Merging) -> Message:
        """Return the inner message and the stacked uploads, and report their clients."""
        merging.uploaders = accumulator["uploaders"]
        return self.inner.combine(accumulator["inner"], merging) | self._stacked(accumulator)

    def _stacked(self, accumulator: dict[str, Any]) -> Message:
        uploads = accumulator["uploads"]
        stacked = {f"uploads/{name}": torch.stack([upload[name] for upload in uploads]) for name in uploads[0]}
        stacked[UPLOAD_WEIGHTS] = torch.tensor(accumulator["weights"], dtype=torch.float64)
        return stacked

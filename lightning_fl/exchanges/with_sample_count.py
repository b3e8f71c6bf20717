"""Let every selected client upload once, with its number of samples (FedNova; Wang et al., NeurIPS 2020)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from lightning_fl.slots import Channel, Exchange, Result, Upload

SAMPLES = "scalars/samples"
"""Name of n_k in an upload."""


@dataclass(frozen=True)
class WithSampleCount(Exchange):
    """Send each result up whole with n_k, an integer of 32 bits, in one turn, as soon as it is ready."""

    sums_suffice = sends_whole = True

    def collect(self, results: Iterable[Result], channel: Channel) -> Iterator[Upload]:
        """Stream the uploads: only one result is in memory at a time."""

        def upload(result: Result) -> Upload:
            count = torch.tensor([int(result.weight)], dtype=torch.int32)
            return Upload(result, channel.send_up(result.client, {**result.message, SAMPLES: count}))

        return map(upload, results)

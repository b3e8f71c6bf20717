"""Let every selected client upload once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lightning_fl.slots import Channel, Exchange, Result, Upload


@dataclass(frozen=True)
class OneShot(Exchange):
    """Send each result up whole in one turn, as soon as it is ready."""

    sums_suffice = one_message = sends_whole = True

    def collect(self, results: Iterable[Result], channel: Channel) -> Iterator[Upload]:
        """Stream the uploads: only one result is in memory at a time."""

        def upload(result: Result) -> Upload:
            return Upload(result, channel.send_up(result.client, result.message))

        return map(upload, results)  # a loop's variable would keep a result while the next client trains

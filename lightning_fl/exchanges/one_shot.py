"""Every selected client uploads once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lightning_fl.slots import Channel, Exchange, Result, Upload


@dataclass(frozen=True)
class OneShot(Exchange):
    """One turn: each result is sent up whole, as soon as it is there."""

    sends_whole = True

    def collect(self, results: Iterable[Result], channel: Channel) -> Iterator[Upload]:
        """Streams: only one result is alive at a time."""
        for result in results:
            yield Upload(result, channel.send_up(result.client, result.message))

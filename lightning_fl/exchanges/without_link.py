"""Rounds without messages, for the bounds of a comparison: all samples in one place, or each client alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_fl.slots import Channel, Exchange, Result, RoundContext, Upload


class WithoutLink(Exchange):
    """Base class of exchanges that send nothing, so that the codecs have nothing to encode."""

    uses_link = False

    def recipients(self, cohort: Sequence[int], context: RoundContext) -> Sequence[int]:
        """Return no client, because the model is sent to nobody."""
        return ()


@dataclass(frozen=True)
class InPlace(WithoutLink):
    """Let the server use every result without a message, as if clients and server were one."""

    sends_whole = True

    def collect(self, results: Iterable[Result], channel: Channel) -> Iterator[Upload]:
        """Stream the results: only one is in memory at a time."""

        def upload(result: Result) -> Upload:
            return Upload(result, result.message)

        return map(upload, results)  # a loop's variable would keep a result while the next client trains


@dataclass(frozen=True)
class NoUploads(WithoutLink):
    """Leave every result with its client; the server's model stays the initial one."""

    sends_whole = keeps_changes = True

    def collect(self, results: Iterable[Result], channel: Channel) -> Iterator[Upload]:
        """Yield zeros in place of every change, which take no storage."""

        def upload(result: Result) -> Upload:
            zeros = {name: entry.new_zeros(1).expand_as(entry) for name, entry in result.message.items()}
            return Upload(replace(result, counters={}), zeros)

        return map(upload, results)

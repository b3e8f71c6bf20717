"""Partial training: each client receives, trains and sends a smaller network, with some of the units of every hidden layer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lightning_fl.errors import require
from lightning_fl.slots import SENT, Channel, Exchange, Result, RoundContext, Upload, Width


@dataclass(frozen=True)
class PartialTraining(Exchange):
    """Let each client receive, train and send a smaller network, which a subclass chooses.

    Every upload has vectors of the whole model, 0 outside the client's network, and the masks of what was sent.
    """

    cuts = one_message = True
    provides = frozenset({SENT})

    @abstractmethod
    def width(self, client: int, context: RoundContext) -> Width | None:
        """Return the width of the network that a client trains in the present round; None for the whole one."""

    def level_in_time(self, client: int, context: RoundContext) -> float:
        """Return the widest level whose round meets the deadline of `capacities`, or else the smallest."""
        require(
            context.level is not None,
            f"{type(self).__name__} chooses widths by a deadline, for which a clock of clients must tell their seconds.",
        )
        assert context.level is not None
        return context.level(client)

    def collect(self, results: Iterable[Result], channel: Channel) -> Iterator[Upload]:
        """Stream the uploads: only one result is in memory at a time."""

        def upload(result: Result) -> Upload:
            message = channel.send_up(result.client, result.message, result.submodel)
            sent = {} if result.submodel is None else result.submodel.masks(result.message)
            return Upload(result, message, sent)

        return map(upload, results)

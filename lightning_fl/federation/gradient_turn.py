"""The turn before the local training of methods whose clients need each other's gradients (Mime: Karimireddy et al., 2021)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.fabric import Fabric
from torch import Tensor

from lightning_fl.communication.link import Link
from lightning_fl.processes import gather_objects, merge
from lightning_fl.slots import (
    MEAN_GRADIENT,
    Aggregator,
    LocalTraining,
    Message,
    Result,
    Rule,
    State,
    Upload,
    is_finite,
)


@dataclass(frozen=True)
class FullGradient(Rule):
    """Sends ∇F_k(w); it is for a training of no steps.

    Attributes:
        inner: the rule of the training that follows, to which belongs what clients keep.
    """

    reads_full_gradient = True
    sends = frozenset({MEAN_GRADIENT})
    inner: Rule

    def init(self, params: Tensor) -> State:
        """The other rule's."""
        return self.inner.init(params)

    def finish(self, local: LocalTraining) -> Message:
        """∇F_k(w)."""
        return {MEAN_GRADIENT: local.full_gradient}


def exchange_gradients(
    results: Iterable[Result], aggregator: Aggregator, link: Link, fabric: Fabric, clients: Sequence[int]
) -> tuple[list[int], Message]:
    """∇F_k(w) up from each client, and their mean down to those whose was finite, who alone go on.

    Args:
        results: of the clients by `FullGradient`.
        aggregator: weighs them as it weighs uploads.
        link: encodes and counts.
        fabric: the processes, whose clients are in the mean together.
        clients: of this process.

    Returns:
        Which of its clients go on; and the mean, {} if nobody does.
    """
    accumulator: dict[str, Any] = {}
    finite: set[int] = set()
    for result in results:
        message = {MEAN_GRADIENT: result.message[MEAN_GRADIENT]}  # the running statistics stay where they are
        seen = link.send_up(result.client, message)
        if is_finite(seen, message):
            aggregator.add(accumulator, Upload(result, seen))
            finite.add(result.client)
    accumulator = merge(fabric, aggregator, accumulator)
    if not any(gather_objects(fabric, len(finite))):
        return [], {}
    mean = aggregator.finish(accumulator)[MEAN_GRADIENT].to(link.received["model"].dtype)
    message, unpruned = {MEAN_GRADIENT: mean}, link.setting.unpruned
    told = [client for client in clients if client in finite]
    link.send_to_all(told, message if unpruned is None else unpruned.gather(message))
    return told, message

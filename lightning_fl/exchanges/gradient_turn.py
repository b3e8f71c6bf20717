"""A turn before the local training in which clients exchange gradients (Mime: Karimireddy et al., Breaking the Centralized
Barrier for Cross-Device Federated Learning, 2021).

turn 1    client k sends ∇F_k(w) on all of its samples          up: the gradient, d numbers
          the server sends Σ_k n_k ∇F_k(w) / Σ_k n_k            down: d numbers to each client whose gradient is finite
turn 2    these clients train and send what the exchange inside sends
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from lightning_fl.slots import (
    MEAN_GRADIENT,
    Channel,
    Exchange,
    Gradients,
    Job,
    LocalTraining,
    Message,
    Result,
    Rule,
    State,
    Upload,
    check_inner,
    forwards,
    is_finite,
)

J = TypeVar("J", bound=Job)


@forwards(
    "inner",
    "around_training capacities check check_module compresses cuts differs_in_steps in_common keeps_changes needs "
    "needs_shapes num_senders prefers_large recipients sender sends_whole sums_suffice uses uses_link validated_widths width",
)
@dataclass(frozen=True)
class GradientTurn(Exchange):
    """Add a turn before an exchange, in which clients receive the mean of their gradients at the received model.

    An algorithm whose rule needs this mean adds the turn by itself.

    Attributes:
        inner: exchange that collects the uploads after the training.
    """

    one_message = False
    inner: Exchange

    def __post_init__(self) -> None:
        check_inner(self, "inner", Exchange, "OneShot()")

    @property
    def provides(self) -> frozenset[str]:
        """The mean gradient, and what the exchange inside provides."""
        return self.inner.provides | {MEAN_GRADIENT}

    def before_training(
        self,
        job: J,
        clients: Sequence[int],
        train: Callable[[J, Sequence[int]], Iterator[Result]],
        channel: Channel,
    ) -> tuple[J, Sequence[int]]:
        """Exchange the gradients; clients whose gradient is not finite do not go on."""
        finite: set[int] = set()

        def uploads() -> Iterator[Upload]:
            for result in train(job.without_steps(FullGradient(job.rule)), clients):
                message = {MEAN_GRADIENT: result.message[MEAN_GRADIENT]}  # buffers are not sent in this turn
                seen = channel.send_up(result.client, message)
                if is_finite(seen, message):
                    finite.add(result.client)
                    yield Upload(result, seen)

        merged = channel.mean(uploads())
        if not merged:
            return job, []
        going_on = [client for client in clients if client in finite]
        mean = {MEAN_GRADIENT: merged[MEAN_GRADIENT].to(job.received["model"].dtype)}
        unpruned = channel.context.unpruned
        channel.send_to_all(going_on, mean if unpruned is None else unpruned.gather(mean))
        return job.receiving(mean), going_on

    def collect(self, results: Iterable[Result], channel: Channel) -> Iterator[Upload]:
        """Collect as the exchange inside does."""
        return self.inner.collect(results, channel)


@dataclass(frozen=True)
class FullGradient(Rule):
    """Sends ∇F_k(w), for a training of no steps.

    Attributes:
        inner: the rule of the training that follows, whose client states are kept.
    """

    reads = Gradients.MINIBATCH | Gradients.FULL_AT_RECEIVED
    provides = frozenset({MEAN_GRADIENT})
    inner: Rule

    def init(self, params: Tensor) -> State:
        """Return the other rule's state."""
        return self.inner.init(params)

    def finish(self, local: LocalTraining) -> Message:
        """Return ∇F_k(w)."""
        return {MEAN_GRADIENT: local.full_gradient}

"""Outcome of a round's clients, its costs, and the server's proposal, which a run books and commits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from operator import add, or_
from typing import Any

import torch
from torch import Tensor

from lightning_fl.link.ledger import Bits
from lightning_fl.slots import Result, State
from lightning_fl.state.staging import Staging

REDUCTION = "reduction"
"""Key of the function by which processes reduce a field of `Outcome`, two values at a time."""


def maximum(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the elementwise maximum of integer buffers by name."""
    return {**one, **{name: torch.maximum(one.get(name, x), x) for name, x in other.items()}}


def added_bits(one: Bits, other: Bits) -> Bits:
    """Return the sum of numbers of bits by direction and kind."""
    kinds = {direction: one.get(direction, {}).keys() | other.get(direction, {}).keys() for direction in one | other}
    return {
        direction: {kind: sum(bits.get(direction, {}).get(kind, 0) for bits in (one, other)) for kind in sorted(names)}
        for direction, names in kinds.items()
    }


def added_by_client(
    one: Mapping[int, tuple[int, int]], other: Mapping[int, tuple[int, int]]
) -> dict[int, tuple[int, int]]:
    """Return the sum of the bits that clients have sent and received, of the same clients."""
    return {client: (up + other[client][0], down + other[client][1]) for client, (up, down) in one.items()}


Keep = tuple[Callable[[State], State], Callable[[State], State]]
"""Functions that return a client's new state and codec memory, on the host, as they are kept until the round ends."""


def _itself(state: State) -> State:
    return state


IN_MEMORY: Keep = (_itself, _itself)


@dataclass
class Outcome:
    """Results of the clients of one process, or of all, in a round, without their uploads.

    Attributes:
        num_steps: optimiser steps of the clients, also of rejected ones.
        most_steps: optimiser steps of the client that made the most.
        num_uploads: uploads that arrived, in all processes.
        rejected: uploads that the server has rejected, by reason.
        num_attackers: uploads of attackers, also rejected ones.
        num_accepted: uploads that the server accepted.
        silent: accepted clients that sent nothing, as the server has drawn others.
        num_samples: samples of the accepted clients together, counted twice for a client with two uploads.
        logs: `logs` of the results, by accepted client.
        states: new states of this process's accepted clients, on the host; `share_states` sends them to other processes.
        memory: new codec memories of the same clients, on the host.
        counters: maximum over accepted clients of their integer buffers, by name.
        num_lost: clients, of all processes, whose secure sum is lost; their uploads count as if they had not arrived.
        bits: bits sent to or from single clients, by direction and kind.
        bits_by_client: bits that each client that is timed has sent and received after the broadcast.
    """

    num_steps: int = field(default=0, metadata={REDUCTION: add})
    most_steps: int = field(default=0, metadata={REDUCTION: max})
    num_uploads: int = 0
    rejected: Counter[str] = field(default_factory=Counter, metadata={REDUCTION: add})
    num_attackers: int = field(default=0, metadata={REDUCTION: add})
    num_accepted: int = field(default=0, metadata={REDUCTION: add})
    num_samples: float = field(default=0.0, metadata={REDUCTION: add})
    num_lost: int = 0
    silent: frozenset[int] = field(default=frozenset(), metadata={REDUCTION: or_})
    logs: dict[int, dict[Any, Any]] = field(default_factory=dict, metadata={REDUCTION: or_})
    states: dict[int, State] = field(default_factory=dict)
    memory: dict[int, State] = field(default_factory=dict)
    counters: dict[str, Tensor] = field(default_factory=dict, metadata={REDUCTION: maximum})
    bits: Bits = field(default_factory=dict, metadata={REDUCTION: added_bits})
    bits_by_client: dict[int, tuple[int, int]] = field(default_factory=dict, metadata={REDUCTION: added_by_client})

    def accept(self, result: Result, memory: State, staging: Staging, keep: Keep = IN_MEMORY) -> None:
        """Add a client whose upload the server has accepted.

        Args:
            result: result of the client.
            memory: its codec memory after the upload.
            staging: copies both to the host.
            keep: keeps them until the round ends.
        """
        keep_state, keep_memory = keep
        self.num_accepted += 1
        self.num_samples += result.weight
        self.logs[result.client] = result.logs
        if result.state:
            self.states[result.client] = keep_state(staging.to_host(result.state))
        if memory:
            self.memory[result.client] = keep_memory(staging.to_host(memory))
        self.counters = maximum(self.counters, result.counters)

    def lose(self, count: int) -> None:
        """Forget the uploads of so many clients, which were too few for a secure sum."""
        self.num_lost, self.num_uploads, self.num_accepted = count, self.num_uploads - count, 0
        self.num_attackers, self.num_samples = 0, 0.0
        self.logs, self.states, self.memory, self.counters = {}, {}, {}, {}

    def counts(self) -> tuple[list[tuple[str, torch.dtype, tuple[int, ...]]], list[int]]:
        """Return name, dtype and shape, and the value, of the counters of one element: others do not change in a training."""
        single = {name: counter for name, counter in self.counters.items() if counter.numel() == 1}
        forms = [(name, counter.dtype, tuple(counter.shape)) for name, counter in single.items()]
        values = torch.stack([counter.reshape(()).long() for counter in single.values()]).tolist() if single else []
        return forms, values

    def raise_counts(
        self, forms: list[tuple[str, torch.dtype, tuple[int, ...]]], values: list[int], device: torch.device
    ) -> None:
        """Raise the counters to the `counts` of another process."""
        together = torch.tensor(values, device=device)
        counts = {
            name: value.to(dtype).reshape(shape) for (name, dtype, shape), value in zip(forms, together, strict=True)
        }
        self.counters = maximum(self.counters, counts)

    def add(self, other: Outcome) -> None:
        """Add the outcome of another process, by the reductions of the fields; those without one stay in their process."""
        for one in fields(self):
            if REDUCTION in one.metadata:
                setattr(self, one.name, one.metadata[REDUCTION](getattr(self, one.name), getattr(other, one.name)))


@dataclass(frozen=True)
class Costs:
    """Costs of a round, whatever becomes of it.

    Attributes:
        broadcast_bits: bits until the end of the broadcast, by direction and kind.
        bits: bits after it.
        num_uploads: uploads that have arrived.
        num_rejected: those that the server has rejected.
        num_steps: optimiser steps of the clients.
        num_successive_steps: those of the client that made the most.
        seconds: simulated seconds by which the time of the run grows.
    """

    broadcast_bits: Bits
    bits: Bits
    num_uploads: int
    num_rejected: int
    num_steps: int
    num_successive_steps: int
    seconds: float = 0.0


@dataclass(frozen=True)
class Proposal:
    """Next state of the server.

    Attributes:
        params: model (d,).
        buffers: its float buffers (d_b,).
        counters: integer buffers by name.
        server: state of each step, by its key in the run.
        mask: parameters that pruning keeps (d,), bools; None for all.
        num_steps: optimiser steps that the server made on its own samples.
        metrics: values that the steps report, by name.
        is_undone: True if the round is undone, by the loss guard or because a state is not finite; only the metrics are kept.
    """

    params: Tensor
    buffers: Tensor
    counters: dict[str, Tensor]
    server: dict[str, State]
    mask: Tensor | None
    num_steps: int
    metrics: dict[str, float]
    is_undone: bool = False

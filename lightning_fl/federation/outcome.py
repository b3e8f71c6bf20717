"""Outcome of a round: the accepted clients, their new states, and the bits that were sent."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from lightning_fl.clients.module_logs import Sums
from lightning_fl.communication.ledger import Bits
from lightning_fl.processes import gather_objects
from lightning_fl.slots import Result, State


@dataclass
class Outcome:
    """Results of the clients of one process, or of all, in a round, without their uploads.

    Attributes:
        num_steps: optimiser steps of the clients, also of rejected ones.
        num_uploads: uploads that arrived, in all processes.
        logs: sums of the values that the module logged, by accepted client.
        states: new states of this process's accepted clients, on the host; `share_states` sends them to other processes.
        memory: new codec memories of the same clients, on the host.
        counters: maximum over accepted clients of their integer buffers, by name.
        bits: bits sent to or from single clients, by direction and kind.
    """

    num_steps: int = 0
    num_uploads: int = 0
    logs: dict[int, Sums] = field(default_factory=dict)
    states: dict[int, State] = field(default_factory=dict)
    memory: dict[int, State] = field(default_factory=dict)
    counters: dict[str, Tensor] = field(default_factory=dict)
    bits: Bits = field(default_factory=dict)

    def accept(self, result: Result, memory: State) -> None:
        """Add a client whose upload the server has accepted.

        Args:
            result: result of the client.
            memory: its codec memory after the upload.
        """
        self.logs[result.client] = result.logs
        if result.state:
            self.states[result.client] = {name: x.cpu() for name, x in result.state.items()}
        if memory:
            self.memory[result.client] = {name: x.cpu() for name, x in memory.items()}
        self._raise_counters(result.counters)

    @property
    def num_accepted(self) -> int:
        """Uploads that the server accepted."""
        return len(self.logs)

    def _raise_counters(self, counters: dict[str, Tensor]) -> None:
        for name, counter in counters.items():
            self.counters[name] = torch.maximum(self.counters.get(name, counter), counter)

    def add(self, other: Outcome) -> None:
        """Add the outcome of another process, except its clients' states and memories."""
        self.num_steps += other.num_steps
        self.logs |= other.logs
        self._raise_counters(other.counters)
        for direction, kinds in other.bits.items():
            own_kinds = self.bits.setdefault(direction, {})
            for kind, bits in kinds.items():
                own_kinds[kind] = own_kinds.get(kind, 0) + bits


def gather_others(fabric: Fabric, mine: Outcome) -> list[Outcome]:
    """Return the outcomes of all other processes, without states and memories, on this process's accelerator."""
    small = move_data_to_device(vars(replace(mine, states={}, memory={})), torch.device("cpu"))
    parts = gather_objects(fabric, small)
    others = [part for rank, part in enumerate(parts) if rank != fabric.global_rank]
    return [Outcome(**move_data_to_device(part, fabric.device)) for part in others]

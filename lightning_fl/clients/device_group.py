"""Several devices for one client: the processes of a group train it together, as distributed data parallel training does.

Each process takes its share of every minibatch. The gradient of a step is the sum of the processes' gradients, one
all-reduce, before anything reads it, so that all of them hold the same model after each step. The first process of a group
sends the client's upload.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor

from lightning_fl.flat_module.flat_module import FlatModule

T = TypeVar("T")


@dataclass(frozen=True)
class DeviceGroup:
    """Group of processes that train the same clients.

    Attributes:
        index: index of the group, from 0.
        num_groups: number of groups.
        rank: place of this process in its group, from 0.
        size: processes of a group.
        least_rows: samples of a minibatch that a process reads, unless it reads none; batch normalisation needs two.
        handle: torch's group of processes.
    """

    index: int
    num_groups: int
    rank: int
    size: int
    least_rows: int = 1
    handle: Any = None

    @classmethod
    def of(cls, fabric: Fabric, size: int, least_rows: int = 1) -> DeviceGroup | None:
        """Divide all processes, which must all call this, into groups of `size` by their ranks; None for groups of one."""
        if size == 1:
            return None
        handle, _ = torch.distributed.new_subgroups(size)
        index, rank = divmod(fabric.global_rank, size)
        return cls(index, fabric.world_size // size, rank, size, least_rows, handle)

    @property
    def is_first(self) -> bool:
        """True for the process that sends the uploads of the group's clients."""
        return self.rank == 0

    def rows(self, num_samples: int) -> slice:
        """Return the rows of a minibatch that this process reads: as many as the others, or one more, or none.

        >>> [DeviceGroup(0, 1, rank, 3).rows(7) for rank in range(3)]
        [slice(0, 3, None), slice(3, 5, None), slice(5, 7, None)]
        """
        sharing = max(1, min(self.size, num_samples // self.least_rows))
        start, stop = (-(-num_samples * min(place, sharing) // sharing) for place in (self.rank, self.rank + 1))
        return slice(start, stop)

    def num_rows(self, num_samples: int) -> int:
        """Return the number of rows of a minibatch that this process reads."""
        rows = self.rows(num_samples)
        return int(rows.stop - rows.start)

    def seeds(self, seeds: Sequence[int]) -> list[int]:
        """Return the seeds of a client's training: one order of samples for all processes, other draws in each."""
        order, draws = seeds
        if self.is_first:
            return [order, draws]
        (other,) = np.random.SeedSequence([draws, self.rank]).generate_state(1, np.uint64) >> np.uint64(1)
        return [order, int(other)]

    def sum_gradient(self, flat_module: FlatModule) -> bool:
        """Add up the gradients of the group; return True if the optimiser now steps more parameters than before."""
        return flat_module.gradient.sum(self._sum)

    def share_buffers(self, flat_module: FlatModule) -> None:
        """Give all processes the float buffers of the first one, as distributed data parallel training does in each step."""
        if flat_module.buffer_layout.names:
            buffers = flat_module.read_buffers().clone()
            torch.distributed.broadcast(buffers, self.index * self.size, group=self.handle)
            flat_module.load_buffers(buffers)

    def gather(self, mine: T) -> list[T]:
        """Return the object of each process of the group, in order; only for small objects without tensors."""
        parts: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(parts, mine, group=self.handle)
        return parts

    def _sum(self, vector: Tensor) -> None:
        torch.distributed.all_reduce(vector, group=self.handle)

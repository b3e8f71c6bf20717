"""`ClientIndices`: index arrays of all clients in one array, without an object for each client."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import overload

import numpy as np


class ClientIndices(Sequence[np.ndarray]):
    """Index arrays of N clients; the one of client k is a view, `joined[starts[k]:starts[k + 1]]`.

    Args:
        joined: indices of all clients one after the other, (m,) int64.
        sizes: number of indices of each client, (N,), which add up to m.

    >>> [part.tolist() for part in ClientIndices(np.arange(5), np.array([2, 0, 3]))]
    [[0, 1], [], [2, 3, 4]]
    """

    __slots__ = ("joined", "starts")

    def __init__(self, joined: np.ndarray, sizes: np.ndarray) -> None:
        self.joined = joined
        self.starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64, copy=False)

    @classmethod
    def of(cls, parts: Sequence[np.ndarray]) -> ClientIndices:
        """Join index arrays; returns `parts` itself if they are joined already."""
        if isinstance(parts, ClientIndices):
            return parts
        sizes = np.array([len(part) for part in parts], dtype=np.int64)
        return cls(np.concatenate(parts) if len(parts) else np.zeros(0, dtype=np.int64), sizes)

    @classmethod
    def by_owner(cls, owners: np.ndarray, num_clients: int) -> ClientIndices:
        """Give each index to its owner, in ascending order.

        Args:
            owners: client of each of the indices 0..n-1, (n,) integers; -1 for none.
            num_clients: N.

        >>> [part.tolist() for part in ClientIndices.by_owner(np.array([1, -1, 0, 1]), 2)]
        [[2], [0, 3]]
        """
        order = np.argsort(owners, kind="stable")
        sizes = np.bincount(owners + 1, minlength=num_clients + 1)
        return cls(order[sizes[0] :], sizes[1:])

    def __repr__(self) -> str:
        """Return the numbers of clients and indices, of which there may be millions."""
        return f"<{len(self.joined):,} indices of {len(self):,} clients>"

    @property
    def sizes(self) -> np.ndarray:
        """Number of indices of each client, (N,) int64."""
        return np.diff(self.starts)

    def owners(self, num_samples: int) -> np.ndarray:
        """Return the client of each of `num_samples` samples, (num_samples,) int64; -1 for none."""
        owners = np.full(num_samples, -1, dtype=np.int64)
        owners[self.joined] = np.repeat(np.arange(len(self)), self.sizes)
        return owners

    def __len__(self) -> int:
        """Number of clients, N."""
        return len(self.starts) - 1

    @overload
    def __getitem__(self, client: int) -> np.ndarray: ...

    @overload
    def __getitem__(self, client: slice) -> ClientIndices: ...

    def __getitem__(self, client: int | slice) -> np.ndarray | ClientIndices:
        """Return the indices of a client, or those of consecutive clients."""
        if isinstance(client, slice):
            first, last, _ = client.indices(len(self))
            starts = self.starts[first : max(first, last) + 1]
            return ClientIndices(self.joined[starts[0] : starts[-1]], np.diff(starts))
        k = range(len(self))[client]
        return self.joined[self.starts[k] : self.starts[k + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        """Iterate over the clients' indices."""
        return (self.joined[start:end] for start, end in pairwise(self.starts.tolist()))

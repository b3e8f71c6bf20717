"""Order statistics of the vectors of several clients, coordinate by coordinate, and distances between these vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

PIECE = 1 << 16
"""Coordinates that are sorted at once, so that the sorted copies fit the cache."""


def middle(rows: Tensor, sent: Tensor | None = None) -> Tensor:
    """Return the median of each column, of an even number of values the mean of the two in the middle.

    Args:
        rows: values of the clients (K, d).
        sent: bools (K, d), True for values that count; None for all. A column without any is 0.

    Returns:
        Medians (d,).

    >>> middle(torch.tensor([[1.0, 5.0], [2.0, 1.0], [9.0, 3.0], [4.0, 0.0]])).tolist()
    [3.0, 2.0]
    """

    def statistic(values: Tensor, counts: Tensor) -> Tensor:
        lower, upper = ((counts - 1).clamp(min=0) // 2)[None], (counts // 2).clamp(max=len(values) - 1)[None]
        mean = (values.gather(0, lower) + values.gather(0, upper))[0] / 2
        return torch.where(counts > 0, mean, 0.0)

    return _by_pieces(statistic, rows, sent)


def trimmed(rows: Tensor, count: Callable[[Tensor], Tensor], sent: Tensor | None = None) -> Tensor:
    """Return the mean of each column without its largest and smallest values.

    Args:
        rows: values of the clients (K, d).
        count: returns how many values to leave out at each end (n,), given the numbers of values of columns (n,).
        sent: bools (K, d), True for values that count; None for all. A column of which nothing is left is 0.

    Returns:
        Means (d,).

    >>> trimmed(torch.tensor([[1.0], [2.0], [9.0], [4.0]]), torch.ones_like).tolist()
    [3.0]
    """
    if sent is None and not int(count(torch.tensor(len(rows)))):
        return rows.mean(0)

    def statistic(values: Tensor, counts: Tensor) -> Tensor:
        places, left_out = torch.arange(len(values), device=values.device)[:, None], count(counts)
        stays = (places >= left_out) & (places < counts - left_out)
        return torch.where(stays, values, 0.0).sum(0) / stays.sum(0).clamp(min=1)

    return _by_pieces(statistic, rows, sent)


def middle_shares(rows: Tensor, sent: Tensor | None = None) -> Tensor:
    """Return the mean share of each client in the medians of `middle`, over the columns that have one (K,).

    >>> middle_shares(torch.tensor([[1.0, 5.0], [2.0, 1.0], [9.0, 3.0], [4.0, 0.0]])).tolist()
    [0.0, 0.5, 0.25, 0.25]
    """
    return _shares_between(lambda counts: ((counts - 1) // 2, counts // 2), rows, sent)


def trimmed_shares(rows: Tensor, count: Callable[[Tensor], Tensor], sent: Tensor | None = None) -> Tensor:
    """Return the mean share of each client in the means of `trimmed`, over the columns that have one (K,)."""
    return _shares_between(lambda counts: (count(counts), counts - 1 - count(counts)), rows, sent)


def nearest_to_middle(rows: Tensor, count: int) -> Tensor:
    """Return the mean of the `count` values of each column (K, d) that are nearest to its median; of equals the first ones.

    >>> nearest_to_middle(torch.tensor([[1.0], [2.0], [9.0], [4.0]]), 2).tolist()
    [3.0]
    """
    return rows.gather(0, _nearest(rows, count)).mean(0)


def nearest_shares(rows: Tensor, count: int) -> Tensor:
    """Return the mean share of each client in the means of `nearest_to_middle` (K,)."""
    nearest = _nearest(rows, count)
    return torch.bincount(nearest.flatten(), minlength=len(rows)).to(rows.dtype) / max(1, nearest.numel())


def _nearest(rows: Tensor, count: int) -> Tensor:
    """Return the rows of the `count` values of each column that are nearest to its median (count, d)."""
    return (rows - middle(rows)).abs().argsort(dim=0, stable=True)[:count]


def squared_distances(rows: Tensor) -> Tensor:
    """Return the squared distances (K, K) between rows (K, d), each from the difference, which loses nothing to large rows."""
    return torch.stack([(rows - row).square().sum(1) for row in rows])


def krum_scores(distances: Tensor, f: int) -> Tensor:
    """Return for each upload the sum of its squared distances to its K − f − 2 nearest others, at least one (K,).

    Args:
        distances: squared distances between the uploads (K, K).
        f: number of attackers to tolerate.
    """
    num_uploads = len(distances)
    num_nearest = max(1, num_uploads - f - 2)
    return distances.sort(dim=1).values[:, 1 : num_nearest + 1].sum(1)


def _shares_between(bounds: Callable[[Tensor], tuple[Tensor, Tensor]], rows: Tensor, sent: Tensor | None) -> Tensor:
    """Return the mean share of each client in the means of the sorted values between two places of every column (K,).

    Args:
        bounds: returns the first and the last place of each column, given its number of values (n,).
        rows: values of the clients (K, d).
        sent: bools (K, d), True for values that count; None for all.
    """
    total, num_columns = torch.zeros(len(rows), dtype=torch.float64, device=rows.device), 0.0
    places = torch.arange(len(rows), device=rows.device)[:, None]
    for values, counts in _pieces(rows, sent):
        first, last = bounds(counts)
        stays = (places >= first) & (places <= last) & (places < counts)
        shares = stays.double() / stays.sum(0).clamp(min=1)
        total.index_add_(0, values.argsort(dim=0, stable=True).flatten(), shares.flatten())
        num_columns += float(stays.any(0).sum())
    return total / max(1.0, num_columns)


def _by_pieces(statistic: Callable[[Tensor, Tensor], Tensor], rows: Tensor, sent: Tensor | None) -> Tensor:
    """Return what a function makes of sorted values (K, n) and their counts (n,) for all columns; what was not sent is last."""
    parts = [statistic(values.sort(dim=0).values, counts) for values, counts in _pieces(rows, sent)]
    return torch.cat(parts) if parts else rows.new_zeros(0)


def _pieces(rows: Tensor, sent: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the values (K, n) of some columns at a time, infinite where none was sent, and their counts (n,)."""
    for start in range(0, rows.shape[1], PIECE):
        values = rows[:, start : start + PIECE]
        counts = torch.full(values.shape[1:], len(rows), device=rows.device)
        if sent is not None:
            chosen = sent[:, start : start + PIECE]
            values, counts = torch.where(chosen, values, torch.inf), chosen.sum(0)
        yield values, counts

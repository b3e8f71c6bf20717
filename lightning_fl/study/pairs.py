"""Values of two runs of the same seed that a claim compares."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_fl.outputs.metric import spend
from lightning_fl.report.comparison import Curve


@dataclass(frozen=True)
class Pair:
    """Values of two runs of the same seed that a claim compares.

    Attributes:
        better, than: numbers of both runs. A number is None if the target was not reached, the run does not count the cost, no
            test took place at the best validation, the bytes pay for no evaluation, the run has diverged (at its end), or it has
            no finite value.
        area: difference of the means over the logarithm of the bytes; None unless values are compared at bytes.
        lacks: reason why a number is None, if it is not the usual one; ends in a preposition.
    """

    better: float | None
    than: float | None
    area: float | None = None
    lacks: str = ""


def bests_within(ours: Curve, theirs: Curve, cost: str, high: float) -> Pair:
    """Return the best values of two runs within a number of bytes, and the mean of their difference over log bytes.

    Args:
        ours: run of `better`.
        theirs: run of `than`.
        cost: name of the direction in which bytes count, such as `uplink`.
        high: number of bytes of all clients together.
    """
    sign = -1 if ours.metric.falls else 1
    sent = [curve.axis(cost) for curve in (ours, theirs)]
    values = [sign * curve.raw[of <= high] for curve, of in zip((ours, theirs), sent, strict=True)]
    best, other = (sign * float(reached.max()) if len(reached) else None for reached in values)
    area, low = None, max(float(of[0]) for of in sent)
    if all(map(len, values)) and 0 < low < high:
        first, second = (
            spend(bytes_sent[: len(reached)], reached, low, high, float(reached.min())).area
            for bytes_sent, reached in zip(sent, values, strict=True)
        )
        area = sign * (first - second)
    return Pair(best, other, area)


def means_between(ours: Curve, theirs: Curve, first: int, last: int) -> Pair:
    """Return the mean values of two runs over the rounds from `first` to `last`."""
    means = [_mean(curve, first, last) for curve in (ours, theirs)]
    has_diverged = any(_has_diverged(curve, first, last) for curve in (ours, theirs))
    lacks = f"not all rounds from {first} to {last} are {'finite' if has_diverged else 'there'} of"
    return Pair(means[0], means[1], lacks=lacks * (None in means))


def rises_of(ours: Curve, theirs: Curve) -> Pair:
    """Return the rise of two runs: the mean over the last half of the rounds less the mean over the first half."""
    last = min(ours.record.num_rounds, theirs.record.num_rounds)
    halves = [(_mean(curve, 1, last // 2), _mean(curve, last // 2 + 1, last)) for curve in (ours, theirs)]
    rises = [None if first is None or second is None else second - first for first, second in halves]
    has_diverged = any(_has_diverged(curve, 1, last) for curve in (ours, theirs))
    lacks = "not all rounds are finite of" if has_diverged else "a half of the rounds has no evaluation of"
    return Pair(rises[0], rises[1], lacks=lacks * (None in rises))


def _mean(curve: Curve, first: int, last: int) -> float | None:
    """Return the mean of the values of the rounds from `first` to `last`.

    It is None if some are missing or not finite, or if none is evaluated.
    """
    rounds = curve.axis("rounds")
    inside = curve.raw[(rounds >= first) & (rounds <= last)]
    is_whole = curve.record.num_rounds >= last and not _has_diverged(curve, first, last)
    return float(inside.mean()) if len(inside) and is_whole else None


def _has_diverged(curve: Curve, first: int, last: int) -> bool:
    """True if a value of the rounds from `first` to `last` is not finite."""
    rounds = curve.record.spent["rounds"]
    is_broken = curve.record.not_finite.get(curve.metric.name, np.zeros(len(rounds), dtype=bool))
    return bool(is_broken[(rounds >= first) & (rounds <= last)].any())

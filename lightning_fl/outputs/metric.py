"""Metric of a run: the only accuracy among the names that its module logs, or else the loss, or the only name.

Summaries of its values, named alike wherever results are shown; none of them is smoothed:

    last: the value of the last evaluation
    final: the mean of the last evaluations, a tenth of all, at least 1 and at most 10; the default of reports and claims
    best: the best value of all, which is chosen on the values that it reports: on test samples it is too good
    at best validation: the test value of the round with the best value in validation, which chooses on held-out samples

`best (smoothed)` of a report is the best value of a smoothed curve (`lightning_fl.report.smoothing`).
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from math import fsum, log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_fl.outputs.clients.distribution import is_over_clients

ACCURACY, LOSS = "val/accuracy", "val/loss"
"""Names of the modules of this package."""
TRAINING_LOSS = "train/loss"
"""Name under which a federation logs what `training_step` returns."""
ACCURACIES = {"accuracy", "acc"}
STAGES = {"val", "valid", "validation", "test", "train", "training", "dev", "eval"}
TRAINING = {"train", "training"}
VALIDATION, TEST = r"(?<![A-Za-z])val(id(ation)?)?(?![A-Za-z])", r"(?<![A-Za-z])test(?![A-Za-z])"
"""Words in the names of validation values, and of test values."""
MOST_FINAL = 10
"""Evaluations of which `final` is the mean, at most."""
FINAL = f"the mean of the last values of a run, a tenth of all, at least 1 and at most {MOST_FINAL}"
AT_BEST_VALIDATION = "at best validation"
LOWER_IS_BETTER = {"err", "mse", "rmse", "mae", "mape", "nll", "ppl", "perplexity", "wer", "cer"}


def words_of(name: str) -> set[str]:
    """Return the words of a logged name in small letters.

    >>> sorted(words_of("val_MulticlassAccuracy/top5"))
    ['accuracy', 'multiclass', 'top5', 'val']
    """
    return {word.lower() for word in re.split(r"[\W_]+|(?<=[a-z])(?=[A-Z])", name) if word}


def is_accuracy(name: str) -> bool:
    """True if a name contains the word accuracy or acc."""
    return bool(ACCURACIES & words_of(name))


def is_result(name: str) -> bool:
    """True if a name says that a value was measured in training, validation or test."""
    return bool(STAGES & words_of(name))


def falls(name: str, mode: str | None = None) -> bool:
    """True if lower is better: as the mode says, `max` or `min`, or by the name, of losses and errors alone.

    >>> falls("val_loss"), falls("val_rmse"), falls("val_f1"), falls("val_f1", "min")
    (True, True, False, True)
    """
    if mode is not None:
        return mode == "min"
    return any(part in name.lower() for part in ("loss", "error")) or bool(LOWER_IS_BETTER & words_of(name))


def find_accuracy(logged: Iterable[str]) -> str | None:
    """Return `val/accuracy`, or the only other name of an accuracy that is not measured in training; None without."""
    names = list(logged)
    measured = [name for name in names if is_accuracy(name) and not TRAINING & words_of(name)]
    return ACCURACY if ACCURACY in names else _only(measured)


def find_metric(logged: Iterable[str]) -> str | None:
    """Return the metric that a run is about: in validation its accuracy, or else its loss, or the only name; then in training.

    >>> find_metric(["val_loss", "val_acc", "train_acc"]), find_metric(["val_loss", "val_acc", "val_top5_acc"])
    ('val_acc', 'val_loss')
    >>> find_metric(["val_f1", "train/loss"]), find_metric(["val_f1", "val_auc", "train/loss"])
    ('val_f1', 'train/loss')

    Args:
        logged: names of the logged values.

    Returns:
        Its name; None if none is a loss, the only accuracy or the only one of a validation.
    """
    names = [name for name in logged if not is_over_clients(name)]
    losses = [name for name in names if "loss" in words_of(name) and not TRAINING & words_of(name)]
    plain = [name for name in losses if words_of(name) <= STAGES | {"loss"}]
    in_training = [name for name in names if is_accuracy(name) and TRAINING & words_of(name)]
    last = TRAINING_LOSS if TRAINING_LOSS in names else _only([name for name in names if "loss" in words_of(name)])
    loss = LOSS if LOSS in names else _only(plain) or _only(losses)
    measured = [name for name in names if is_result(name) and not TRAINING & words_of(name)]
    return find_accuracy(names) or loss or _only(measured) or _only(in_training) or last


def num_final(count: int) -> int:
    """Return of how many of the last evaluations `final` is the mean: a tenth of all, at least 1 and at most 10.

    >>> [num_final(count) for count in (1, 19, 20, 60, 500)]
    [1, 1, 2, 6, 10]
    """
    return min(max(1, count // 10), MOST_FINAL)


def final(values: Sequence[float] | NDArray[np.float64]) -> float:
    """Return the mean of the last `num_final(n)` of the values (n,), for n > 0.

    >>> final([0.9] * 18 + [0.25, 0.75])
    0.5
    """
    last = [float(value) for value in values[-num_final(len(values)) :]]
    try:
        return fsum(last) / len(last)
    except (OverflowError, ValueError):  # very large losses, or infinite ones of both signs
        return sum(value / len(last) for value in last)


def validated_and_tested(name: str, logged: Container[str]) -> tuple[str, str] | None:
    """Return the names of a metric in validation and in test, given either; None unless a run has logged both.

    >>> validated_and_tested("test_acc", ["valid_acc", "test_acc"]), validated_and_tested("val/accuracy", ["val/accuracy"])
    (('valid_acc', 'test_acc'), None)
    """
    tested = re.sub(VALIDATION, "test", name, count=1)
    names = [re.sub(TEST, word, tested, count=1) for word in ("val", "valid", "validation")]
    validated = next((each for each in (name, *names) if each != tested and each in logged), None)
    return (validated, tested) if validated is not None and tested in logged else None


@dataclass(frozen=True)
class Spending:
    """Best value of a metric within a budget of bytes.

    Attributes:
        best: a*(high), where a*(B) is the best value of all evaluations within B bytes, a step function of B.
        spent: bytes at the last evaluation within the budget.
        area: ∫ a*(B) d log B / log(high / low) from low to high: the mean of a* over all budgets on a logarithmic scale.
    """

    best: float
    spent: float
    area: float


def spend(sent: Any, values: Any, low: float, high: float, chance: float = 0.0) -> Spending:
    """Return what a run reaches within a budget of `high` bytes.

    >>> round(spend([10, 100, 1000], [0.4, 0.2, 0.8], low=1, high=10_000).area, 9)  # (0 + 2 · 0.4 + 0.8) / 4
    0.4

    Args:
        sent: bytes at each evaluation (n,), ascending.
        values: the metric's values (n,), of which higher ones are better; after the last, the best one stays.
        low: bytes from which the area counts.
        high: bytes that may be spent.
        chance: value before the first evaluation.
    """
    sent, best = np.asarray(sent, dtype=float), np.maximum.accumulate(np.maximum(values, chance))
    paid = int(np.searchsorted(sent, high, side="right"))  # evaluations within the budget
    edges = np.log(np.clip(np.append(sent, high), low, high))
    widths = np.diff(edges, prepend=log(low))  # of the step before each evaluation, and of the last
    return Spending(
        best=float(best[paid - 1]) if paid else chance,
        spent=float(sent[paid - 1]) if paid else 0.0,
        area=float(np.dot(widths, np.insert(best, 0, chance)) / log(high / low)),
    )


def penalised(sent: float, best: float, target: float) -> float:
    """Return a penalty in bytes for a run that missed its target: all that it sent, and more the further it stayed away.

    >>> penalised(1000, best=0.6, target=0.8), penalised(1000, best=0.5, target=0.25)  # the last of a loss
    (1250.0, 2000.0)
    """
    return sent * (1 + abs(target - best) / (abs(target) or 1))


def _only(names: list[str]) -> str | None:
    return names[0] if len(names) == 1 else None

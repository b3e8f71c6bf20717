"""Metric that a run is about: given as `trainer.metric`, or found among the names that the first validation logs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_fl.errors import UserError, nearest
from lightning_fl.outputs.metric import ACCURACY, falls, find_metric, is_accuracy, is_result
from lightning_fl.trainer.lightning_interface import TrainerInterface


def settle_metric(trainer: TrainerInterface, logged: Iterable[str], is_all: bool, tested: Collection[str] = ()) -> None:
    """Set `trainer.metric` if a fit has none yet, say what it is, and check a given one.

    Args:
        trainer: trainer in a fit.
        logged: names that a validation or a round has logged.
        is_all: True if later rounds log no other names; before that, only a near miss of a given name is refused.
        tested: names that the test of a round logs, which are found only if given, because the metric chooses among models.

    Raises:
        UserError: the given name is not logged.
    """
    name, names = trainer.metric, [name for name in logged if name not in tested]
    # Some modules log under other names in the sanity check, so a name that was found there is found anew.
    if name is None or (trainer.given_metric[0] is None and not is_all and name not in names):
        # Methods log accuracies of their own, such as feddu/accuracy, in a round but not in a validation.
        trainer.metric = find_metric(filter(is_result, names) if is_all else names)
        if trainer.metric not in (None, ACCURACY):
            _say(trainer, trainer.metric, "; trainer.metric sets another")
    elif name not in {*names, *tested} and (is_all or get_close_matches(name, names, cutoff=0.9)):
        raise UserError(f"trainer.metric is {name!r}, which is not logged; {nearest(name, [*names, *tested])}.")


def say_given_metric(trainer: TrainerInterface) -> None:
    """Say what a given metric is taken for."""
    name = trainer.given_metric[0]
    if name is None:
        return
    is_known = is_accuracy(name) or falls(name) or trainer.metric_mode is not None
    guess = "" if is_known else ", because its name says neither loss nor error; trainer.metric_mode min reverses that"
    _say(trainer, name, guess)


def kept_metric(trainer: TrainerInterface) -> dict[str, str] | None:
    """Return name and mode of the metric, for checkpoints and reports; None if it is not known yet."""
    return (
        None if trainer.metric is None else {"name": trainer.metric, "mode": "min" if trainer.metric_falls else "max"}
    )


def _say(trainer: TrainerInterface, name: str | None, more: str) -> None:
    better = "lower" if trainer.metric_falls else "higher"
    rank_zero_info(f"The run is about {name} (table, bar, report, targets), where {better} is better{more}.")

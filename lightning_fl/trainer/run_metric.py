"""Metric of a run: given as `trainer.metric`, or found among the names that the first validation logs; its results."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from math import isfinite, isnan, nan
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_fl.callbacks import CommunicationMeter, TargetReached
from lightning_fl.errors import UserError, nearest
from lightning_fl.outputs.clients.distribution import is_over_clients
from lightning_fl.outputs.final_table import best_of, curve_file, final_lines, tested_at_best_validation
from lightning_fl.outputs.metric import ACCURACY, falls, final, find_metric, is_accuracy, is_result, penalised, spend
from lightning_fl.outputs.run_folder import EXPORT
from lightning_fl.outputs.traffic import COLUMNS, in_directions
from lightning_fl.trainer.lightning_interface import TrainerInterface

TO_TARGET = {"up": "bytes_to_target", "down": "downlink_bytes_to_target", "total": "total_bytes_to_target"}
"""Names of the bytes until a target."""
AREA_FROM = 0.01
"""Share of a budget from which the area counts."""
UNSURE = ", because its name says neither loss nor error"


def choose_metric(trainer: TrainerInterface, logged: Iterable[str], is_all: bool, tested: Collection[str] = ()) -> None:
    """Set `trainer.metric` if a fit has none yet, print it, and check a given one.

    Args:
        trainer: trainer in a fit.
        logged: names that a validation or a round has logged.
        is_all: True if later rounds log no other names; before that, only a near miss of a given name is refused.
        tested: names that the test of a round logs, which are found only if given, because the metric chooses among models.

    Raises:
        UserError: the given name is not logged.
    """
    name, names = trainer.metric, [name for name in logged if name not in tested]
    # Some modules log under other names in the sanity check, whose values callbacks do not get: such a name is found anew.
    is_lost = trainer.given_metric[0] is None and not is_all and name not in {*names, *trainer.callback_metrics}
    if name is None or is_lost:
        # Methods log accuracies of their own, such as feddu/accuracy, in a round but not in a validation.
        # The values of a validation are results, whatever their names; in a round they may be a method's own.
        in_validation = [] if is_all else [name for name in names if not is_over_clients(name)]
        trainer.metric = find_metric(filter(is_result, names) if is_all else names) or next(iter(in_validation), None)
        if trainer.metric not in (None, ACCURACY):
            is_known = is_accuracy(trainer.metric) or falls(trainer.metric)
            reverse = f"{UNSURE}; trainer.metric {trainer.metric} with trainer.metric_mode min reverses that"
            is_first = len(in_validation) > 1 and find_metric(in_validation) is None
            choice = (
                f"; it is the first of {len(in_validation)} values of the validation, none of them its accuracy or loss"
            )
            more = "; trainer.metric sets another" if is_known else reverse
            _say(trainer, trainer.metric, more + choice * is_first)
    elif name not in {*names, *tested} and (is_all or get_close_matches(name, names, cutoff=0.9)):
        raise UserError(f"trainer.metric is {name!r}, which is not logged; {nearest(name, [*names, *tested])}.")


def log_metric_choice(trainer: TrainerInterface) -> None:
    """Print the direction of a given metric."""
    name = trainer.given_metric[0]
    if name is None:
        return
    is_known = is_accuracy(name) or falls(name) or trainer.metric_mode is not None
    guess = "" if is_known else f"{UNSURE}; trainer.metric_mode min reverses that"
    _say(trainer, name, guess)


def kept_metric(trainer: TrainerInterface) -> dict[str, str] | None:
    """Return name and mode of the metric, for checkpoints and reports; None if it is not known yet."""
    return (
        None if trainer.metric is None else {"name": trainer.metric, "mode": "min" if trainer.metric_falls else "max"}
    )


def results_of(trainer: TrainerInterface, rows: Sequence[Mapping[str, float]]) -> dict[str, float | str]:
    """Return a run's results by name: statistics of the metric, and the costs that callbacks ask for.

    `final`, `last`, `best` (with `best_round`, from 1) and `at_best_validation` are those of `lightning_fl.outputs.metric`, the
    first two unless the run ends in values that are not finite, the last one if the test set was measured after rounds, too.
    `bytes_to_target` (of uplink), `downlink_bytes_to_target`, `total_bytes_to_target` and `rounds_to_target` belong to the first
    `TargetReached` if it has reached its target, and `bytes_to_target_penalised` (and so on) in any case: if it has not, all
    bytes · (1 + |target − best| / |target|). The first limit of a `CommunicationMeter` is the budget of `accuracy_at_budget`, the
    best value after rounds in which all clients together had spent at most this in its direction, and of `area` (`Spending`),
    from a hundredth of it on. Values are not smoothed.

    Args:
        trainer: trainer at the end of a fit.
        rows: logged rows of all rounds of the run.
    """
    results: dict[str, float | str] = {}
    if best := best_of(trainer, rows):
        name = str(trainer.metric)
        values = [row[name] for row in rows if name in row]
        ends = {"final": final(values), "last": values[-1]}  # not finite if the run has diverged
        results = {"metric": name, **{end: value for end, value in ends.items() if isfinite(value)}}
        results |= {"best": best[name], "best_round": best["round"] + 1}
    if chosen := tested_at_best_validation(trainer, rows):
        results["at_best_validation"] = chosen[1]
    targets = [callback for callback in trainer.callbacks if isinstance(callback, TargetReached)]
    meters = [callback for callback in trainer.callbacks if isinstance(callback, CommunicationMeter)]
    budgets = [limit for meter in meters for limit in meter.max_bytes.items()]
    if targets:
        results |= _price(targets[0], rows)
    if budgets:
        traffic, limit = budgets[0]
        results |= _within(trainer, traffic, limit, rows)
    return results


def fit_content(trainer: TrainerInterface) -> dict[str, Any]:
    """Return the results of a finished fit for programs: costs, results, the lines of the final table, and files.

    Args:
        trainer: trainer after its fit.
    """
    rows, run, stop = trainer.fit_loop.rows, trainer.run, trainer.stop
    sent = in_directions(run.ledger.total_bytes("up"), run.ledger.total_bytes("down"))
    curve = curve_file(trainer)
    return {
        "algorithm": trainer.algorithm.name,
        "rounds": run.round,
        "planned_rounds": trainer.num_rounds,
        "stopped_by": str(stop) if stop is not None and run.round < trainer.num_rounds else None,
        "bytes": sent,
        "simulated_seconds": run.simulated_seconds,
        "results": results_of(trainer, rows),
        "table": dict(final_lines(trainer, rows)),
        "folder": trainer.default_root_dir,
        "metrics": None if curve is None else str(curve),
        "model": str(Path(trainer.default_root_dir) / EXPORT) if trainer.enable_checkpointing else None,
    }


def _price(callback: TargetReached, rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the cost of reaching a target."""
    if callback.reached is not None:
        spent = {name: callback.reached.get(COLUMNS[traffic], nan) for traffic, name in TO_TARGET.items()}
        penalised_too = {f"{name}_penalised": number for name, number in spent.items()}
        return {"rounds_to_target": callback.reached["epoch"] + 1, **spent, **penalised_too}
    values = [row[str(callback.watched)] for row in rows if not isnan(row.get(str(callback.watched), nan))]
    best = (min if callback.watched_falls else max)(values, default=None)
    if best is None:
        return {}
    sent = _bytes_of(rows[-1])
    return {f"{name}_penalised": penalised(sent[traffic], best, callback.target) for traffic, name in TO_TARGET.items()}


def _bytes_of(row: Mapping[str, float]) -> dict[str, float]:
    """Return the bytes of all clients up to a row by direction."""
    return in_directions(row[COLUMNS["up"]], row[COLUMNS["down"]])


def _within(
    trainer: TrainerInterface, traffic: str, budget: float, rows: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """Return what the run's metric reaches within a budget of bytes; of one that falls, or is always below 0, no area."""
    name = str(trainer.metric)
    at_budget = f"{'accuracy' if is_accuracy(name) else 'metric'}_at_budget"
    measured = [row for row in rows if not isnan(row.get(name, nan))]
    best = best_of(trainer, [row for row in measured if _bytes_of(row)[traffic] <= budget])
    if trainer.metric_falls or all(row[name] < 0 for row in measured):
        return {at_budget: best[name]} if best else {}
    spent = spend(
        [_bytes_of(row)[traffic] for row in measured], [row[name] for row in measured], AREA_FROM * budget, budget
    )
    return {at_budget: best[name] if best else 0.0, "area": spent.area}


def _say(trainer: TrainerInterface, name: str | None, more: str) -> None:
    better = "lower" if trainer.metric_falls else "higher"
    rank_zero_info(f"The run's metric is {name} (table, bar, report, targets); {better} is better{more}.")

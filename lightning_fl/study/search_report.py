"""Section of a report about the searches of a study: flags, winners, costs, and the best value by trials."""

from __future__ import annotations

from typing import Any

from lightning_fl.outputs.figures import Look
from lightning_fl.outputs.plan import duration
from lightning_fl.outputs.units import in_bytes, significant
from lightning_fl.report.document import Part, Picture, Table
from lightning_fl.study.search_file import written
from lightning_fl.study.searches import Searches

LEGEND = (
    "Searched: {searched}. All other tables, pictures and claims contain no trials, but the winners' runs, whose seeds the "
    "search has not seen. `default` is the value of the first trial, which has the combination's own values; `best` is the "
    "value of the winner. A value is the mean of the last evaluations within the budget, a tenth of all, on samples that "
    "clients hold out. `best` is chosen on the values that it reports. Bytes and time are sums over all trials, including "
    "pruned and failed ones; time is the sum of their rounds."
)


def search_parts(searches: Searches, look: Look) -> list[Part]:
    """Return the tables of ranges, winners and costs, and the picture of the best values by trials."""
    from lightning_fl.study.pictures import draw_trials

    every = list(searches.by_cell.values())
    short = every[0].metric.short
    failed = [
        f"{search.cell.name}, trial {trial.number} failed: {trial.said}"
        for search in every
        for trial in search.trials()
        if trial.state == "FAIL"
    ]
    parts: list[Part] = [LEGEND.format(searched=every[0].file), flags_table(searches), costs_table(searches), failed]
    best = {name: search.best_so_far() for name, search in searches.by_cell.items()}
    values = {
        name: {trial.number + 1: trial.value for trial in search.trials() if trial.is_complete}
        for name, search in searches.by_cell.items()
    }
    if figure := draw_trials(best, values, short, look):
        parts.append(Picture("trials", f"Best {short} on held-out samples by the number of trials", figure, look))
    return parts


def flags_table(searches: Searches) -> Table:
    """Return a row for each combination and flag: its range, its own value, and the winner's value."""
    rows = []
    for name, search in searches.by_cell.items():
        winner = search.winner()
        for flag, values in search.flags.items():
            found = "" if winner is None else _shown(winner.flags[flag])
            rows.append([name, flag, str(values), _shown(search.defaults[flag]), found])
    return Table(["combination", "flag", "searched", "default", "found"], rows, num_texts=3)


def costs_table(searches: Searches) -> Table:
    """Return a row for each combination: the values of the default and of the winner, and the costs of the trials."""
    rows = []
    for name, search in searches.by_cell.items():
        trials, winner = search.trials(), search.winner()
        states = [trial.state for trial in trials]
        default = [significant(trial.value) for trial in trials[:1] if trial.is_complete]
        rows.append(
            [
                name,
                "".join(default),
                "" if winner is None else significant(winner.value),
                "" if winner is None else str(winner.number),
                f"{search.num_ended()} of {search.file.trials}",
                str(states.count("PRUNED")),
                str(states.count("FAIL")),
                in_bytes(sum(trial.uplink_bytes for trial in trials)),
                duration(sum(trial.seconds for trial in trials)),
            ]
        )
    header = ["combination", "default", "best", "best trial", "trials", "pruned", "failed", "uplink", "time"]
    return Table(header, rows)


def _shown(value: Any) -> str:
    return significant(value) if isinstance(value, float) else written(value)

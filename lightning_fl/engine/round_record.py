"""Row of `metrics.csv` of one round."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from lightning_fl.engine.network import Network
from lightning_fl.engine.population import Cohort
from lightning_fl.errors import require
from lightning_fl.state.outcome import Outcome
from lightning_fl.state.run_state import Run

OWN = ("comm/", "clients/", "model/", "time/")
"""Beginnings of the names of columns that every round has."""
TIMES = ("round", "time/simulated_seconds", "time/round_seconds")
"""Columns that a row gets at the end of its round."""


def round_record(
    run: Run,
    cohort: Cohort,
    outcome: Outcome,
    network: Network,
    averages: Mapping[str, float],
    trained: Mapping[str, int],
    server: Mapping[str, float],
    observed: Mapping[str, float],
) -> dict[str, float]:
    """Return the numbers of the last round by their column names in `metrics.csv`.

    Args:
        run: run after the round.
        cohort: cohort of the round.
        outcome: outcome of its clients.
        network: network that they trained.
        averages: averages of the values that the module logged, by name.
        trained: counts of the clients' local training, by column.
        server: values that the server's steps report, by name.
        observed: columns of what stands around the round.
    """
    ledger, num_trainable = run.ledger, run.layout.numel + run.personal_layout.numel
    own = {
        "comm/uplink_bits": ledger.bits("up"),
        "comm/downlink_bits": ledger.bits("down"),
        **{f"comm/setup_{direction}link_bits": bits for direction, bits in ledger.setup().items()},
        "comm/total_uplink_bytes": ledger.total_bytes("up"),
        "comm/total_downlink_bytes": ledger.total_bytes("down"),
        "clients/selected": len(cohort.selected),
        "clients/accepted": outcome.num_accepted,
        "clients/rejected": outcome.num_uploads - outcome.num_accepted,
        "clients/dropped": cohort.num_dropped,
        **trained,
        "model/parameters": network.num_parameters,
        **({} if num_trainable == network.num_parameters else {"model/trainable": num_trainable}),
        **({} if network.macs is None else {"model/macs": network.macs}),
        **observed,
        **server,
    }
    check_logged(averages, own)
    return {"round": run.round - 1, **averages, **own}


def check_logged(logged: Iterable[str], columns: Collection[str]) -> None:
    """Check that what modules and callbacks log has no name of a round's own columns, which would be lost.

    Args:
        logged: the logged names.
        columns: names of the present round's columns.

    Raises:
        UserError: a name is that of an own column.
    """
    for name in logged:
        is_own = name in TIMES or (name in columns and name.startswith(OWN))
        require(
            not is_own,
            f"self.log({name!r}, …): the federation itself reports a column of this name in each round: log another name.",
        )

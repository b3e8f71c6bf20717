"""Row of `metrics.csv` of one round."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from lightning_fl.engine.network import Network
from lightning_fl.engine.roles import Round
from lightning_fl.errors import require

OWN = ("comm/", "clients/", "model/", "time/")
"""Beginnings of the names of columns that every round has."""
TIMES = ("round", "time/simulated_seconds", "time/round_seconds")
"""Columns that a row gets at the end of its round."""


def round_record(
    finished: Round, network: Network, trained: Mapping[str, int], observed: Mapping[str, float]
) -> dict[str, float]:
    """Return the numbers of the last round by their column names in `metrics.csv`.

    Args:
        finished: the round, which the run has booked and ended.
        network: network that its clients trained.
        trained: counts of the clients' local training, by column.
        observed: columns of what stands around the round.
    """
    run, cohort, outcome = finished.run, finished.cohort, finished.outcome
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
        **finished.merging,
        **({} if finished.proposal is None else finished.proposal.metrics),
    }
    check_logged(finished.averages, own)
    return {"round": run.round - 1, **finished.averages, **own}


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

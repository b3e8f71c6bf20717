"""Expected costs of a private run's rounds, which reveal nothing about who took part."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lightning_fl.engine.engine import Engine
from lightning_fl.engine.population import Cohort
from lightning_fl.engine.roles import Round
from lightning_fl.link.ledger import Bits


def expected(finished: Round, engine: Engine) -> Round:
    """Return a round with expected bits, steps and time; everything else is unchanged.

    Its only client is one whose number of samples is the median, and no upload counts.
    """
    population, work = engine.population, finished.work
    sizes, eligible, recipients = engine.data.client_sizes, population.eligible, population.cohort_size
    median = int(eligible[np.argsort(sizes[eligible], kind="stable")[len(eligible) // 2]])
    answering = recipients * (1 - population.dropout_rate)
    link = engine.dry_round([median, *eligible[eligible != median].tolist()][:recipients])
    outcome = replace(
        finished.outcome,
        bits=times(link.client_bits, answering),
        bits_by_client=link.bits_by_client,
        num_uploads=0,
        num_accepted=0,
        num_steps=round(work.num_steps([median]) * answering),
        most_steps=work.num_steps([median]),
    )
    return replace(finished, cohort=Cohort([median], [median], finished.cohort.mine), link=link, outcome=outcome)


def times(bits: Bits, number: float) -> Bits:
    """Return the bits of so many clients, rounded, given those of one."""
    return {way: {kind: round(count * number) for kind, count in kinds.items()} for way, kinds in bits.items()}

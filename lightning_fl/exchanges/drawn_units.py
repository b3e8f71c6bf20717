"""Smaller networks of random units: Federated Dropout (Caldas et al., 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Gt, Interval

from lightning_fl.checks import Called
from lightning_fl.errors import require
from lightning_fl.exchanges.partial_training import PartialTraining
from lightning_fl.slots import WIDTHS, Capacities, RoundContext, Width


@dataclass(frozen=True)
class DrawnUnits(PartialTraining):
    """Let each client receive, train and send ⌈(1 − rate) c⌉ of the c units of every hidden layer, drawn anew in each round.

    With the model goes a seed of 64 bits, from which clients draw the units as the server does.

    Attributes:
        rate: share of the units that are left out, in [0, 1); 0 is FedAvg.
        per_client: True if each client draws units of its own; False if all clients of a round have the same.
        scaled: True to divide the outputs of hidden layers by 1 − rate in training, as dropout does.
        deadline: simulated seconds above 0: every client has the smallest of `rates` with which a clock of clients expects its
            round, messages and training, to take no longer, and the largest if there is none. None: all have `rate`.
        rates: with a deadline, rates in [0, 1) to choose from, in place of `rate`. Where all clients of a round draw alike, the
            units of a larger rate are among those of a smaller one.
    """

    rate: Annotated[float, Interval(ge=0, lt=1), Called("rate, the share of the units that are left out,")] = 0.25
    per_client: bool = False
    scaled: bool = False
    deadline: Annotated[float, Gt(0)] | None = None
    rates: Sequence[float] | None = None

    def __post_init__(self) -> None:
        require(
            (self.deadline is None) == (self.rates is None),
            f"deadline chooses among rates, got deadline {self.deadline} and rates {self.rates}: give both or neither.",
        )
        if self.rates is None:
            return
        good = [rate for rate in self.rates if isinstance(rate, (int, float)) and 0 <= rate < 1]
        require(
            0 < len(set(good)) == len(self.rates),
            f"rates must be a list of different numbers in [0, 1), such as [0, 0.5], got {self.rates!r}.",
        )
        object.__setattr__(self, "rates", tuple(self.rates))

    def width(self, client: int, context: RoundContext) -> Width | None:
        """Return the width with the units drawn in this round; None with rate 0."""
        share = 1 - self.rate if self.deadline is None else self.level_in_time(client, context)
        if share == 1:
            return None
        seed, now = context.draw.purpose[:2]
        stream = [seed, now, WIDTHS, client if self.per_client else context.everyone[-1] + 1]
        return Width(share, int(np.random.default_rng(stream).integers(2**63)), share if self.scaled else 1.0)

    @property
    def capacities(self) -> Capacities | None:
        """Levels 1 − rate among which a clock of clients decides; None without a deadline."""
        if self.deadline is None or self.rates is None:
            return None
        return Capacities(tuple(1 - rate for rate in sorted(self.rates)), self.deadline)

"""Smaller networks of random units: Federated Dropout (Caldas et al., 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Interval

from lightning_fl.checks import Called
from lightning_fl.exchanges.partial_training import PartialTraining
from lightning_fl.slots import WIDTHS, RoundContext, Width


@dataclass(frozen=True)
class DrawnUnits(PartialTraining):
    """Let each client receive, train and send ⌈(1 − rate) c⌉ of the c units of every hidden layer, drawn anew in each round.

    With the model goes a seed of 64 bits, from which clients draw the units as the server does.

    Attributes:
        rate: share of the units that are left out, in [0, 1); 0 is FedAvg.
        per_client: True if each client draws units of its own; False if all clients of a round have the same.
        scaled: True to divide the outputs of hidden layers by 1 − rate in training, as dropout does.
    """

    rate: Annotated[float, Interval(ge=0, lt=1), Called("rate, the share of the units that are left out,")] = 0.25
    per_client: bool = False
    scaled: bool = False

    def width(self, client: int, context: RoundContext) -> Width | None:
        """Return the width with the units drawn in this round; None with rate 0."""
        if not self.rate:
            return None
        seed, now = context.draw.purpose[:2]
        stream = [seed, now, WIDTHS, client if self.per_client else context.everyone[-1] + 1]
        share = 1 - self.rate
        return Width(share, int(np.random.default_rng(stream).integers(2**63)), share if self.scaled else 1.0)

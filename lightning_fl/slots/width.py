"""Width of a smaller network, which a client trains in place of the whole one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

WIDTHS = 30
"""Purpose of the random streams that decide the widths of clients.

`lightning_fl.state.run_state` has the other purposes, and says why SELECTION may be the same.
"""


@dataclass(frozen=True)
class Width:
    """Part of every hidden layer that a smaller network has.

    Attributes:
        share: share r of the units of each hidden layer, in (0, 1]: ⌈r c⌉ of c units stay.
        seed: seed of 64 bits that draws these units; None for the first ones.
        divisor: number by which the outputs of hidden layers are divided in training; 1 leaves them as they are.
        in_steps: shares in ascending order, up to `share`. Every step of a client draws one of them and trains only this share of
            the units, from the first on. () trains all units in every step.
        distils: True if the network of width `share` teaches the narrower one that a step draws; both then compute every batch.
    """

    share: float
    seed: int | None = None
    divisor: float = 1.0
    in_steps: tuple[float, ...] = ()
    distils: bool = False

    def units(self, blocks_of_layers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the units that stay, bools (c_l,) by the name of each hidden layer.

        Args:
            blocks_of_layers: number of the block of each unit, (c_l,), by the name of its layer; ⌈r b⌉ of b blocks stay.

        >>> Width(0.5).units({"conv": torch.arange(3), "before_norm": torch.tensor([0, 0, 2, 2])})
        {'conv': tensor([ True,  True, False]), 'before_norm': tensor([ True,  True, False, False])}
        """
        kept = {}
        for name, blocks in blocks_of_layers.items():
            numbers = blocks.unique()
            count = ceil(round(self.share * len(numbers), 9))  # without rounding error: 0.1 · 30 is above 3 in floats
            if self.seed is None:
                chosen = numbers[:count]
            else:
                random = np.random.default_rng([self.seed, crc32(name.encode())])
                chosen = numbers[torch.from_numpy(random.permutation(len(numbers))[:count])]
            kept[name] = torch.isin(blocks, chosen)
        return kept

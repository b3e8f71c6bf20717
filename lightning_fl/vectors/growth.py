"""Map flat vectors to those of a network that trains more of its parameters than before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fl.errors import require
from lightning_fl.vectors.layout import Layout
from lightning_fl.vectors.pruning_map import layout_of


@dataclass(frozen=True)
class Growth:
    """Map from the flat vectors of a network to those with more of its parameters, d → d'.

    Attributes:
        before: layout before.
        layout: layout after, which has all names of the layout before.
        buffer_layout: layout of the float buffers, which stays.
        positions: new positions (d,) of the earlier entries.
    """

    before: Layout
    layout: Layout
    buffer_layout: Layout
    positions: Tensor

    @classmethod
    def between(cls, before: Layout, layout: Layout, buffer_layout: Layout) -> Growth:
        """Return the map for vectors of these layouts."""
        places = layout.views(torch.arange(layout.numel))
        return cls(before, layout, buffer_layout, before.flatten(places, torch.empty(before.numel, dtype=torch.int64)))

    def vector(self, vector: Tensor, first: Tensor) -> Tensor:
        """Return a vector (…, d) with the entries of `first` (d',) for the new parameters."""
        grown = first.to(vector).expand(*vector.shape[:-1], -1).clone()
        return grown.index_copy_(-1, self.positions.to(vector.device), vector)

    def state(self, state: Mapping[str, Tensor], first: Mapping[str, Tensor], owner: str) -> dict[str, Tensor]:
        """Map the state of a part; entries that are no vector of the network stay, see `layout_of`.

        Args:
            state: the state.
            first: state with which the part would begin with the network that is mapped to.
            owner: the part, for the error.

        Raises:
            UserError: nothing says with which value an entry begins for the new parameters.
        """
        grown = {}
        for name, vector in state.items():
            is_vector = layout_of(name, vector, self.before, self.buffer_layout) is self.before
            fits = name in first if is_vector else name not in first or first[name].shape == vector.shape
            require(
                fits,
                f"a callback or hook lets more layers train, but {owner} keeps {name!r}, which has no value for them: use a "
                "method without such a state, such as FedAvg, or let these layers train from the beginning.",
            )
            grown[name] = self.vector(vector, first[name]) if is_vector else vector
        return grown

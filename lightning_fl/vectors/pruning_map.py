"""Map flat vectors to those of a structurally pruned network: positions of kept parameters and of kept float buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fl.pruning import Plan
from lightning_fl.vectors.layout import Layout


@dataclass(frozen=True)
class PruningMap:
    """Map from the flat vectors of a network to those of the pruned network, d → d' and d_b → d_b'.

    Attributes:
        before, buffers_before: layouts before the pruning.
        layout, buffer_layout: layouts after it.
        positions: positions (d',) of the kept parameters in the old vector.
        buffer_positions: positions (d_b',) of the kept float buffers.
    """

    before: Layout
    buffers_before: Layout
    layout: Layout
    buffer_layout: Layout
    positions: Tensor
    buffer_positions: Tensor

    @classmethod
    def from_plan(cls, layout: Layout, buffer_layout: Layout, plan: Plan) -> PruningMap:
        """Return the map of `plan` for vectors of these layouts."""
        after, positions = _cut(layout, plan)
        buffers_after, buffer_positions = _cut(buffer_layout, plan)
        return cls(layout, buffer_layout, after, buffers_after, positions, buffer_positions)

    def params(self, vector: Tensor) -> Tensor:
        """Map parameters (…, d) → (…, d')."""
        return vector.index_select(-1, self.positions.to(vector.device))

    def buffers(self, vector: Tensor) -> Tensor:
        """Map float buffers (…, d_b) → (…, d_b')."""
        return vector.index_select(-1, self.buffer_positions.to(vector.device))

    def state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Map the state of a part or a codec's memory; entries that are no vector of the network stay, see `layout_of`."""
        mapped = {}
        for name, vector in state.items():
            layout = layout_of(name, vector, self.before, self.buffers_before)
            if layout is not None:
                vector = self.params(vector) if layout is self.before else self.buffers(vector)
            mapped[name] = vector
        return mapped


def layout_of(name: str, vector: Tensor, layout: Layout, buffer_layout: Layout) -> Layout | None:
    """Return the layout of an entry of a state or of a codec's memory; None if it is no vector of the network.

    Names decide first, because lengths can agree by chance: an entry with `buffers` in its path has the layout of the float
    buffers, one with `scalars`, `data` or `personal` (owned by a client) has none, and any other has that of the parameters.

    Args:
        name: name of the entry, such as `momentum` or `residual/model`.
        vector: vectors (…, d) or (…, d_b), or anything else.
        layout: layout of the parameters.
        buffer_layout: layout of the float buffers.
    """
    path = name.split("/")
    if not {"scalars", "data", "personal"}.isdisjoint(path):
        return None
    expected = buffer_layout if "buffers" in path else layout
    return expected if vector.shape[-1:] == (expected.numel,) else None


def _cut(layout: Layout, plan: Plan) -> tuple[Layout, Tensor]:
    positions = {name: plan.cut(name, view) for name, view in layout.views(torch.arange(layout.numel)).items()}
    after = Layout(layout.names, tuple(tuple(vector.shape) for vector in positions.values()), layout.dim_orders)
    return after, after.flatten(positions, torch.empty(after.numel, dtype=torch.int64))

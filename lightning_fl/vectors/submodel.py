"""Submodels: some coordinates of a model, gathered in shorter vectors, and scattered back.

The coordinates that a client sends cross as a smaller model: a codec sees vectors of m ≤ d numbers and a context whose layout
has the tensors, or their rows, that are sent. So only the sent coordinates are counted, a codec chooses among them, and its
memory for the other coordinates stays as it was.

A pruning mask is a lasting submodel: the run keeps it, every part finds it in its context (`RoundContext.unpruned`), and nothing
outside it crosses in either direction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_fl.vectors.layer_groups import Group
from lightning_fl.vectors.layout import NO_LAYOUT, Layout

OTHER_KINDS = ("scalars", "mask", "data")


@dataclass(frozen=True)
class Submodel:
    """Some coordinates of a model, and the layouts of the smaller model that they make.

    Attributes:
        params: True for each parameter that is in, bools (d,).
        buffers: True for each float buffer that is in, bools (d_b,).
        layout: layout of the m parameters that are in.
        buffer_layout: layout of the m_b float buffers that are in.
    """

    params: Tensor
    buffers: Tensor
    layout: Layout
    buffer_layout: Layout

    @classmethod
    def from_groups(
        cls,
        layout: Layout,
        buffer_layout: Layout,
        groups: Sequence[Group],
        kept: Sequence[Tensor],
        device: torch.device | None = None,
    ) -> Submodel:
        """Return the submodel that holds some groups, or some of their units.

        Args:
            layout: layout of the whole model's parameters.
            buffer_layout: layout of its float buffers.
            groups: a partition of its parameters; buffers of no group are always in.
            kept: for each group bools (c_l,), one per unit, or (1,) for the whole group.
            device: device of the bools.
        """
        params = torch.zeros(layout.numel, dtype=torch.bool, device=device)
        buffers = torch.ones(buffer_layout.numel, dtype=torch.bool, device=device)
        views = {**layout.views(params), **buffer_layout.views(buffers)}
        cuts: dict[str, tuple[int, int]] = {}
        for group, units in zip(groups, kept, strict=True):
            num_units = group.num_units(layout)
            for name in (*group.parameters, *group.buffers):
                rows = group.by_unit(views[name], num_units)
                # A tensor without a row for each unit is in as a whole if any unit is.
                mine = units if len(units) == len(rows) else units.any().expand(len(rows))
                rows.copy_(mine.view(-1, *[1] * (rows.dim() - 1)))
                axis = group.unit_axis(views[name].dim())
                size = views[name].shape[axis] if views[name].dim() else 1
                cuts[name] = axis, int(mine.sum()) * (size // len(rows))
        return cls(params, buffers, _cut(layout, cuts), _cut(buffer_layout, cuts))

    @classmethod
    def from_masks(
        cls, layout: Layout, buffer_layout: Layout, params: Tensor, buffers: Tensor | None = None
    ) -> Submodel:
        """Return the submodel of any coordinates; each tensor becomes one row of its coordinates that are in.

        Args:
            layout: layout of the whole model's parameters.
            buffer_layout: layout of its float buffers.
            params: bools (d,).
            buffers: bools (d_b,); all True if not given.
        """
        if buffers is None:
            buffers = torch.ones(buffer_layout.numel, dtype=torch.bool, device=params.device)
        return cls(params, buffers, _rows(layout, params), _rows(buffer_layout, buffers))

    def intersect(self, other: Submodel | None, layout: Layout, buffer_layout: Layout) -> Submodel:
        """Return the submodel of the parameters that both hold; None holds all.

        Args:
            other: submodel of the same model.
            layout: layout of the whole model's parameters.
            buffer_layout: layout of its float buffers.
        """
        if other is None:
            return self
        both = self.params & other.params.to(self.params.device)
        return Submodel.from_masks(layout, buffer_layout, both, self.buffers)

    @cached_property
    def factors(self) -> Tensor:
        """float32 (d,), 1 where a parameter is in, else 0; multiplying by it takes a third of the time of bools."""
        return self.params.float()

    def masks(self, message: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the mask of each vector of a message, without entries that are no vector of the model."""
        return {name: self._mask(name) for name, entry in message.items() if self._is_whole(name, entry)}

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the shorter vectors (m,), without empty ones; entries that are no vector of the model stay as they are."""
        gathered = {}
        for name, entry in tensors.items():
            size = self._layout(name).numel
            if not self._is_whole(name, entry) or size == len(entry):
                gathered[name] = entry
            elif size:
                gathered[name] = entry.index_select(0, self._positions(name).to(entry.device))
        return gathered

    def scatter(self, shorter: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return vectors of the whole model.

        Args:
            shorter: vectors (m,), and entries that are no vector of the model.
            whole: source of the coordinates outside the submodel, not changed; they are 0 where it lacks a vector.
        """
        result = {name: entry for name, entry in whole.items() if self._is_whole(name, entry)}
        for name, entry in shorter.items():
            mask, layout = self._mask(name), self._layout(name)
            if entry.dim() == 1 and len(entry) == layout.numel < len(mask):
                vector = result[name].clone() if name in result else entry.new_zeros(len(mask))
                result[name] = vector.index_copy_(0, self._positions(name).to(entry.device), entry)
            else:
                result[name] = entry
        return result

    @cached_property
    def _param_positions(self) -> Tensor:
        return self.params.nonzero().squeeze(1)

    @cached_property
    def _buffer_positions(self) -> Tensor:
        return self.buffers.nonzero().squeeze(1)

    def _positions(self, name: str) -> Tensor:
        """Return the positions of the coordinates that are in; cached, as finding them takes longest."""
        return self._buffer_positions if "buffers" in name else self._param_positions

    def _mask(self, name: str) -> Tensor:
        return self.buffers if "buffers" in name else self.params

    def _layout(self, name: str) -> Layout:
        return self.buffer_layout if "buffers" in name else self.layout

    def _is_whole(self, name: str, entry: Tensor) -> bool:
        """True for a vector of the whole model; entries of another kind never are, whatever their length."""
        return name.partition("/")[0] not in OTHER_KINDS and entry.dim() == 1 and len(entry) == len(self._mask(name))


def _rows(layout: Layout, mask: Tensor) -> Layout:
    """Return the layout with one row for each tensor, of its coordinates in the mask."""
    counts = {name: int(view.sum()) for name, view in layout.views(mask).items()}
    held = {name: (count,) for name, count in counts.items() if count}
    return Layout(tuple(held), tuple(held.values()))


def _cut(layout: Layout, cuts: Mapping[str, tuple[int, int]]) -> Layout:
    """Return the layout of the kept parts; `cuts` gives an axis of a tensor and its kept length."""
    entries = []
    for name, shape, order in zip(layout.names, layout.shapes, layout.dim_orders, strict=True):
        axis, count = cuts.get(name, (0, shape[0] if shape else 1))
        if count:
            entries.append((name, (*shape[:axis], count, *shape[axis + 1 :]) if shape else shape, order))
    return Layout(*zip(*entries, strict=True)) if entries else NO_LAYOUT

"""Submodels: some coordinates of a model, gathered in shorter vectors, and scattered back.

What a client sends of its model crosses as if it were a smaller model: a codec sees vectors of m ≤ d numbers and a setting
whose layout has the tensors, or their rows, that are sent. So the bits are counted of what is sent, a codec chooses among what
is sent, and the memory that it keeps for the other coordinates stays as it was.

A pruning mask is a submodel that lasts: the run keeps it, every part finds it in its setting (`Setting.unpruned`), and nothing
outside of it crosses in either direction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_fl.vectors.layer_groups import Group
from lightning_fl.vectors.layout import Layout

OTHER_KINDS = ("scalars", "mask", "data")


@dataclass(frozen=True)
class Submodel:
    """Some coordinates of a model, and the layouts of the smaller model that they make.

    Attributes:
        params: True for each parameter that is in, bools (d,).
        buffers: True for each float buffer that is in, bools (d_b,).
        layout: of the m parameters that are in.
        buffer_layout: of the m_b float buffers that are in.
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
            layout: of the whole model's parameters.
            buffer_layout: of its float buffers.
            groups: a partition of its parameters; buffers of no group are always in.
            kept: for each group bools (c_l,), unit by unit, or (1,) for all of it.
            device: of the bools.
        """
        params = torch.zeros(layout.numel, dtype=torch.bool, device=device)
        buffers = torch.ones(buffer_layout.numel, dtype=torch.bool, device=device)
        views = {**layout.views(params), **buffer_layout.views(buffers)}
        cuts: dict[str, tuple[int, int]] = {}
        for group, units in zip(groups, kept, strict=True):
            num_units = group.num_units(layout)
            for name in (*group.parameters, *group.buffers):
                rows = group.by_unit(views[name], num_units)
                # A tensor without a row for each unit goes whole, with any of them.
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
        """Return the submodel that holds any coordinates, every tensor being a row of those of its own that are in.

        Args:
            layout: of the whole model's parameters.
            buffer_layout: of its float buffers.
            params: bools (d,).
            buffers: bools (d_b,); all of them if not given.
        """
        if buffers is None:
            buffers = torch.ones(buffer_layout.numel, dtype=torch.bool, device=params.device)
        return cls(params, buffers, _rows(layout, params), _rows(buffer_layout, buffers))

    def intersect(self, other: Submodel | None, layout: Layout, buffer_layout: Layout) -> Submodel:
        """Return the submodel of the parameters that both hold; None holds all.

        Args:
            other: of the same model.
            layout: of the whole model's parameters.
            buffer_layout: of its float buffers.
        """
        if other is None:
            return self
        both = self.params & other.params.to(self.params.device)
        return Submodel.from_masks(layout, buffer_layout, both, self.buffers)

    @cached_property
    def factors(self) -> Tensor:
        """1 where a parameter is in and 0 elsewhere (d,), float32: multiplying by it takes a third of the time of bools."""
        return self.params.float()

    def masks(self, message: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return which coordinates of each vector of a message are in; what is no vector of the model is left out."""
        return {name: self._mask(name) for name, x in message.items() if self._is_whole(name, x)}

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the shorter vectors (m,), without empty ones; what is no vector of the model stays as it is."""
        gathered = {}
        for name, x in tensors.items():
            size = self._layout(name).numel
            if not self._is_whole(name, x) or size == len(x):
                gathered[name] = x
            elif size:
                gathered[name] = x.index_select(0, self._positions(name).to(x.device))
        return gathered

    def scatter(self, shorter: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return whole vectors again.

        Args:
            shorter: vectors (m,), and what is no vector of the model.
            whole: where the coordinates outside the submodel come from, not changed; 0 where it lacks a vector.
        """
        result = {name: x for name, x in whole.items() if self._is_whole(name, x)}
        for name, x in shorter.items():
            mask, layout = self._mask(name), self._layout(name)
            if x.dim() == 1 and len(x) == layout.numel < len(mask):
                vector = result[name].clone() if name in result else x.new_zeros(len(mask))
                result[name] = vector.index_copy_(0, self._positions(name).to(x.device), x)
            else:
                result[name] = x
        return result

    @cached_property
    def _param_positions(self) -> Tensor:
        return self.params.nonzero().squeeze(1)

    @cached_property
    def _buffer_positions(self) -> Tensor:
        return self.buffers.nonzero().squeeze(1)

    def _positions(self, name: str) -> Tensor:
        """Return the positions of the coordinates that are in; found once, which takes longest."""
        return self._buffer_positions if "buffers" in name else self._param_positions

    def _mask(self, name: str) -> Tensor:
        return self.buffers if "buffers" in name else self.params

    def _layout(self, name: str) -> Layout:
        return self.buffer_layout if "buffers" in name else self.layout

    def _is_whole(self, name: str, x: Tensor) -> bool:
        """True for a vector of the whole model; numbers of another kind are none, however many there are."""
        return name.partition("/")[0] not in OTHER_KINDS and x.dim() == 1 and len(x) == len(self._mask(name))


def _rows(layout: Layout, mask: Tensor) -> Layout:
    """Return the layout of what a mask holds of each tensor, in one row."""
    counts = {name: int(view.sum()) for name, view in layout.views(mask).items()}
    held = {name: (count,) for name, count in counts.items() if count}
    return Layout(tuple(held), tuple(held.values()), (False,) * len(held))


def _cut(layout: Layout, cuts: Mapping[str, tuple[int, int]]) -> Layout:
    """Return the layout without what is not kept; `cuts` gives an axis of a tensor and how much of it is."""
    entries = []
    for name, shape, last in zip(layout.names, layout.shapes, layout.channels_last, strict=True):
        axis, count = cuts.get(name, (0, shape[0] if shape else 1))
        if count:
            entries.append((name, (*shape[:axis], count, *shape[axis + 1 :]) if shape else shape, last))
    names, shapes, channels_last = zip(*entries, strict=True) if entries else ((), (), ())
    return Layout(names, shapes, channels_last)

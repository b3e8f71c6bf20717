"""An excerpt of a model: some of its coordinates, brought together in shorter vectors, and back.

What a client sends of its model crosses as if it were a smaller model: a codec sees vectors of m ≤ d numbers and a setting
whose layout has the tensors, or their rows, that are sent. So the bits are counted of what is sent, a codec chooses among what
is sent, and the memory that it keeps for the other coordinates stays as it was.

A pruning mask is an excerpt that stands: it is found in the setting, and nothing outside of it crosses in either direction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lightning_fl.slots import Message, Setting
from lightning_fl.vectors.layer_groups import Group
from lightning_fl.vectors.layout import Layout

OTHER_KINDS = ("scalars", "mask", "data")


@dataclass(frozen=True)
class Excerpt:
    """Which coordinates, and the smaller model that they make.

    Attributes:
        params: for each parameter whether it is in (d,), bools.
        buffers: for each float buffer (d_b,).
        setting: of the m parameters and m_b buffers that are in.
    """

    params: Tensor
    buffers: Tensor
    setting: Setting

    @classmethod
    def of(
        cls, setting: Setting, groups: Sequence[Group], kept: Sequence[Tensor], device: torch.device | None = None
    ) -> Excerpt:
        """The excerpt that holds some groups, or some of their units.

        Args:
            setting: of the whole model.
            groups: a partition of its parameters; buffers of no group are always in.
            kept: for each group bools (c_l,), unit by unit, or (1,) for all of it.
            device: of the bools.
        """
        params = torch.zeros(setting.layout.numel, dtype=torch.bool, device=device)
        buffers = torch.ones(setting.buffer_layout.numel, dtype=torch.bool, device=device)
        views = {**setting.layout.views(params), **setting.buffer_layout.views(buffers)}
        cuts: dict[str, tuple[int, int]] = {}
        for group, units in zip(groups, kept, strict=True):
            num_units = group.num_units(setting.layout)
            for name in (*group.parameters, *group.buffers):
                rows = group.by_unit(views[name], num_units)
                # A tensor without a row for each unit goes whole, with any of them.
                mine = units if len(units) == len(rows) else units.any().expand(len(rows))
                rows.copy_(mine.view(-1, *[1] * (rows.dim() - 1)))
                axis = group.unit_axis(views[name].dim())
                size = views[name].shape[axis] if views[name].dim() else 1
                cuts[name] = axis, int(mine.sum()) * (size // len(rows))
        layouts = _cut(setting.layout, cuts), _cut(setting.buffer_layout, cuts)
        return cls(params, buffers, replace(setting, layout=layouts[0], buffer_layout=layouts[1], groups=(), kept=None))

    @classmethod
    def of_masks(cls, setting: Setting, params: Tensor, buffers: Tensor | None = None) -> Excerpt:
        """The excerpt that holds any coordinates, every tensor being a row of those of its own that are in.

        Args:
            setting: of the whole model.
            params: bools (d,).
            buffers: bools (d_b,); all of them if not given.
        """
        if buffers is None:
            buffers = torch.ones(setting.buffer_layout.numel, dtype=torch.bool, device=params.device)
        layouts = _rows(setting.layout, params), _rows(setting.buffer_layout, buffers)
        return cls(params, buffers, replace(setting, layout=layouts[0], buffer_layout=layouts[1], groups=(), kept=None))

    def within(self, setting: Setting) -> Excerpt:
        """What of it a setting's mask leaves."""
        if setting.kept is None:
            return self
        return Excerpt.of_masks(setting, self.params & setting.kept.params.to(self.params.device), self.buffers)

    @cached_property
    def factors(self) -> Tensor:
        """1 where a parameter is in and 0 elsewhere (d,), float32: multiplying by it takes a third of the time of bools."""
        return self.params.float()

    def masks(self, message: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Which coordinates of each vector of a message are in; what is no vector of the model is left out."""
        return {name: self._mask(name) for name, x in message.items() if self._is_whole(name, x)}

    def take(self, tensors: Mapping[str, Tensor]) -> Message:
        """The shorter vectors (m,), without those of nothing; what is no vector of the model stays as it is."""
        taken = {}
        for name, x in tensors.items():
            size = self._layout(name).numel
            if not self._is_whole(name, x) or size == len(x):
                taken[name] = x
            elif size:
                taken[name] = x.index_select(0, self._places(name).to(x.device))
        return taken

    def put(self, shorter: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> Message:
        """Back to whole vectors.

        Args:
            shorter: vectors (m,), and what is no vector of the model.
            whole: where the coordinates outside the excerpt come from, not changed; 0 where it lacks a vector.
        """
        result = {name: x for name, x in whole.items() if self._is_whole(name, x)}
        for name, x in shorter.items():
            mask, layout = self._mask(name), self._layout(name)
            if x.dim() == 1 and len(x) == layout.numel < len(mask):
                vector = result[name].clone() if name in result else x.new_zeros(len(mask))
                result[name] = vector.index_copy_(0, self._places(name).to(x.device), x)
            else:
                result[name] = x
        return result

    @cached_property
    def _param_places(self) -> Tensor:
        return self.params.nonzero().squeeze(1)

    @cached_property
    def _buffer_places(self) -> Tensor:
        return self.buffers.nonzero().squeeze(1)

    def _places(self, name: str) -> Tensor:
        """Where the coordinates that are in lie; found once, which takes longest."""
        return self._buffer_places if "buffers" in name else self._param_places

    def _mask(self, name: str) -> Tensor:
        return self.buffers if "buffers" in name else self.params

    def _layout(self, name: str) -> Layout:
        return self.setting.buffer_layout if "buffers" in name else self.setting.layout

    def _is_whole(self, name: str, x: Tensor) -> bool:
        """Whether this is a vector of the whole model, which numbers of another kind are not, however many they be."""
        return name.partition("/")[0] not in OTHER_KINDS and x.dim() == 1 and len(x) == len(self._mask(name))


def _rows(layout: Layout, mask: Tensor) -> Layout:
    """The layout of what a mask holds of each tensor, in one row."""
    counts = {name: int(view.sum()) for name, view in layout.views(mask).items()}
    held = {name: (count,) for name, count in counts.items() if count}
    return Layout(tuple(held), tuple(held.values()), (False,) * len(held))


def _cut(layout: Layout, cuts: Mapping[str, tuple[int, int]]) -> Layout:
    """The layout without what is not kept; `cuts` gives an axis of a tensor and how much of it is."""
    entries = []
    for name, shape, last in zip(layout.names, layout.shapes, layout.channels_last, strict=True):
        axis, count = cuts.get(name, (0, shape[0] if shape else 1))
        if count:
            entries.append((name, (*shape[:axis], count, *shape[axis + 1 :]) if shape else shape, last))
    names, shapes, channels_last = zip(*entries, strict=True) if entries else ((), (), ())
    return Layout(names, shapes, channels_last)

"""Buffers of a module in flat storage: all that are sent, or all that each client keeps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import reduce

import torch
from torch import Tensor, nn

from lightning_fl.vectors.layout import Layout, Tree


class ModuleBuffers:
    """Some buffers of a module: the float ones are views of one vector, the integer ones are counters.

    Float buffers that the module does not save (`persistent=False`) are in neither, as they are no part of the model: they are
    not sent, and each client begins with the values that they had when the buffers were bound.

    Attributes:
        layout, vector: position of each float buffer, and the vector (d_b,).
        views: the float buffers by name, as views of the vector.
        counter_names: names of the integer buffers.
    """

    def __init__(
        self,
        buffers: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        current: Callable[[str], Tensor],
        unsaved: Collection[str] = (),
    ) -> None:
        """Make the float buffers views of one vector.

        Args:
            buffers: the buffers by name.
            dtype: dtype of the vector, unless a float buffer has a wider one.
            device: device of the vector.
            current: returns the module's present buffer of a name, because a module may replace it by another tensor.
            unsaved: names of the buffers that the module does not save.
        """
        floats = {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point()}
        self.counter_names = [name for name in buffers if name not in floats]
        self._unsaved = {name: floats.pop(name).to(device, copy=True) for name in [*floats] if name in unsaved}
        self.layout = Layout.of(floats)
        widest = reduce(torch.promote_types, (buffer.dtype for buffer in floats.values()), dtype)
        self.vector = bind(self.layout, floats, widest, device)
        self.views = self.layout.views(self.vector)
        self._current = current

    def load(self, vector: Tensor, counters: Mapping[str, Tensor]) -> None:
        """Copy values into the module: one copy of the float buffers (d_b,), one of each counter."""
        if self.views:
            self.vector.copy_(vector)
            for buffer, view in self._replaced():
                buffer.copy_(view)
        for name in self.counter_names:
            self._current(name).copy_(counters[name])
        for name, value in self._unsaved.items():
            self._current(name).copy_(value)

    def read(self) -> Tensor:
        """Return the float buffers (d_b,), including those that the module replaced instead of writing to them."""
        for buffer, view in self._replaced():
            view.copy_(buffer)
        return self.vector

    def read_counters(self) -> Tree:
        """Return copies of the integer buffers, by name."""
        return {name: self._current(name).clone() for name in self.counter_names}

    def _replaced(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each float buffer that is not a view of the vector, with the view of its name."""
        for name, view in self.views.items():
            buffer = self._current(name)
            if buffer.data_ptr() != view.data_ptr():
                yield buffer, view


def unsaved_buffers(module: nn.Module) -> set[str]:
    """Return the names of the buffers that were registered with `persistent=False`."""
    inside = ((path, name) for path, child in module.named_modules() for name in child._non_persistent_buffers_set)
    return {f"{path}.{name}" if path else name for path, name in inside}


def bind(layout: Layout, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a flat vector with the values of these tensors; those of its dtype become views of it."""
    vector = torch.empty(layout.numel, dtype=dtype, device=device)
    layout.flatten({name: tensor.detach() for name, tensor in tensors.items()}, vector)
    for name, view in layout.views(vector).items():
        if tensors[name].dtype == dtype:
            tensors[name].data = view
    return vector

"""Buffers of a module: float buffers are averaged, integers and booleans are counters, and each client may keep some."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import reduce

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_fl.errors import UserError
from lightning_fl.vectors.layout import Layout, Tree


class ModuleBuffers:
    """Some buffers of a module: the float ones are views of one vector, the integer and boolean ones are counters.

    Buffers that the module does not save (`persistent=False`) are in neither, as they are no part of the model: they are not
    sent, and each client begins with the values that they had when the round began.

    Attributes:
        layout, vector: position of each float buffer, and the vector (d_b,).
        views: the float buffers by name, as views of the vector.
        counter_names: names of the integer and boolean buffers.
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
        self._unsaved = {name: buffers[name].to(device, copy=True) for name in buffers if name in unsaved}
        saved = {name: buffer for name, buffer in buffers.items() if name not in unsaved}
        floats = {name: buffer for name, buffer in saved.items() if buffer.is_floating_point()}
        self.counter_names = [name for name in saved if name not in floats]
        self.layout = Layout.of(floats)
        widest = reduce(torch.promote_types, (buffer.dtype for buffer in floats.values()), dtype)
        self.vector = bind(self.layout, floats, widest, device)
        self.views = self.layout.views(self.vector)
        self._current = current

    def load(self, vector: Tensor, counters: Mapping[str, Tensor]) -> None:
        """Copy values into the module: one copy of the float buffers (d_b,), one of each counter."""
        self.load_floats(vector)
        for name in self.counter_names:
            self._current(name).copy_(counters[name])
        self.load_unsaved(self._unsaved)

    def adopt_unsaved(self) -> None:
        """Let each client begin with the present values of the buffers that the module does not save."""
        for name, value in self._unsaved.items():
            value.copy_(self._current(name))

    def adopt_unsaved_of(self, other: ModuleBuffers) -> None:
        """Let each client begin with the values that these buffers have in another form of the module."""
        self._unsaved = other._unsaved

    def read_unsaved(self) -> Tree:
        """Return copies of the buffers that the module does not save, by name."""
        return {name: self._current(name).clone() for name in self._unsaved}

    def load_unsaved(self, values: Mapping[str, Tensor]) -> None:
        """Copy values of these buffers into the module."""
        for name, value in values.items():
            self._current(name).copy_(value)

    def load_floats(self, vector: Tensor) -> None:
        """Copy the float buffers (d_b,) into the module."""
        if self.views:
            self.vector.copy_(vector)
            for buffer, view in self._replaced():
                buffer.copy_(view)

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
    """Return the names of the buffers that were registered with `persistent=False`, in all modules that share them."""
    saved = {
        id(buffer)
        for child in module.modules()
        for name, buffer in child._buffers.items()
        if name not in child._non_persistent_buffers_set
    }
    return {name for name, buffer in module.named_buffers() if id(buffer) not in saved}


def check_counters(module: nn.Module, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Check that integer and boolean buffers that a training has changed are counters, of which the largest value counts.

    Args:
        module: module that was trained.
        before: its counters by name before the training.
        after: the same after it.

    Raises:
        UserError: an integer buffer of several elements has changed.
    """
    watched = {name: count for name, count in after.items() if not name.endswith("num_batches_tracked")}
    odd = [
        (count != before[name]).any() if count.numel() > 1 else (count < before[name]).any()
        for name, count in watched.items()
    ]
    if not odd or not torch.stack(odd).any():  # the one wait for the accelerator
        return
    for name, count in watched.items():
        described = f"the buffer {name!r} of {type(module).__name__}, of dtype {count.dtype}"
        remedy = (
            "register it with persistent=False, so that each client begins with its first values, or let each client keep its "
            f"own, as Algorithm(personal=[{name!r}]) does"
        )
        if count.numel() > 1 and not torch.equal(count, before[name]):
            raise UserError(
                f"{described} and shape {tuple(count.shape)}, changed in a client's training, but integers cannot be averaged: "
                f"{remedy}."
            )
        if count.numel() == 1 and bool(count < before[name]):
            rank_zero_warn(
                f"{described}, became smaller in a client's training, but the server keeps the largest value, as that of a "
                f"counter: {remedy}."
            )


def bind(layout: Layout, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a flat vector with the values of these tensors; those of its dtype become views of it."""
    vector = torch.empty(layout.numel, dtype=dtype, device=device)
    layout.flatten({name: tensor.detach() for name, tensor in tensors.items()}, vector)
    for name, view in layout.views(vector).items():
        if tensors[name].dtype == dtype:
            tensors[name].data = view
    return vector

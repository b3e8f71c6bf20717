"""Parameters and buffers of a module that each client owns."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from lightning_fl.flat_module.module_buffers import ModuleBuffers, bind
from lightning_fl.slots import State
from lightning_fl.vectors.layout import Layout
from lightning_fl.vectors.personal import PERSONAL, PERSONAL_BUFFERS, counter_entry


class PersonalTensors:
    """A module's personal parameters and buffers, which hold the values of one client at a time.

    Attributes:
        leaves: the parameters by name, without those that need no gradient.
        layout, vector: position of each of them, and the vector (g,) of which they are views.
        buffers: the buffers.
    """

    def __init__(
        self,
        leaves: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        current: Callable[[str], Tensor],
    ) -> None:
        """Make the tensors views of vectors.

        Args:
            leaves: the parameters by name.
            buffers: the buffers by name.
            dtype: dtype of the vector of parameters.
            device: device of the vectors.
            current: returns the module's present buffer of a name.
        """
        self.leaves, self.layout = leaves, Layout.of(leaves)
        self.vector = bind(self.layout, leaves, dtype, device)
        self.buffers = ModuleBuffers(buffers, dtype, device, current)

    def load(self, owned: Mapping[str, Tensor]) -> None:
        """Load what a client owns, the `personal` entries of its state, into the module."""
        if PERSONAL in owned:
            self.vector.copy_(owned[PERSONAL])
        if PERSONAL_BUFFERS in owned:
            counters = {name: owned[counter_entry(name)] for name in self.buffers.counter_names}
            self.buffers.load(owned[PERSONAL_BUFFERS], counters)

    def read(self) -> State:
        """Return copies of the present client's values, as entries of its state; {} if clients own nothing."""
        owned = {PERSONAL: self.vector.clone()} if self.leaves else {}
        return owned | self.read_buffers()

    def read_buffers(self) -> State:
        """Return copies of the buffers alone, as entries of the client's state; {} if it owns none."""
        if not self.buffers.views and not self.buffers.counter_names:
            return {}
        counters = {counter_entry(name): counter for name, counter in self.buffers.read_counters().items()}
        return {PERSONAL_BUFFERS: self.buffers.read().clone(), **counters}

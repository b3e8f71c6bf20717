"""Page-locked memory through which clients' states travel between the host and a GPU.

CUDA copies ordinary memory through buffers of its own, while the host waits. From page-locked memory, which is slow to get, the
GPU copies by itself. So a run keeps three buffers for one client's state: two on the way to the GPU, of which one is filled while
the GPU reads the other, and one on the way back. Other devices need none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_fl.slots import State

ALIGNMENT = 64
"""Bytes at whose multiples an entry begins, which suits any dtype."""


def pins(device: torch.device) -> bool:
    """True if copies to and from a device are faster through page-locked memory."""
    return device.type == "cuda"


class Buffer:
    """Page-locked memory of the host, which grows to the largest state."""

    def __init__(self) -> None:
        """Get no memory yet."""
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._copied: torch.cuda.Event | None = None

    def like(self, state: Mapping[str, Tensor]) -> State:
        """Return tensors in this memory of the form of a state; waits until earlier copies from here have ended."""
        self.wait()
        starts, end = [], 0
        for entry in state.values():
            starts.append(end)
            end += -(-entry.nbytes // ALIGNMENT) * ALIGNMENT
        if len(self._bytes) < end:
            self._bytes = torch.empty(end, dtype=torch.uint8).pin_memory()
        return {
            name: self._bytes[start : start + entry.nbytes].view(entry.dtype).view(entry.shape)
            for start, (name, entry) in zip(starts, state.items(), strict=True)
        }

    def mark(self) -> None:
        """Note that all copies from or to this memory have been started."""
        if self._copied is None:
            self._copied = torch.cuda.Event()
        self._copied.record()

    def wait(self) -> None:
        """Wait until the copies before the last `mark` have ended."""
        if self._copied is not None:
            self._copied.synchronize()


@dataclass
class Staging:
    """Copies clients' states between the host and a device; a run keeps one."""

    _to_device: tuple[Buffer, Buffer] = field(default_factory=lambda: (Buffer(), Buffer()))
    _to_host: Buffer = field(default_factory=Buffer)

    def to_device(self, state: Mapping[str, Tensor], device: torch.device) -> State:
        """Return a copy of a state of the host on a device, for which the host does not wait."""
        if not pins(device):
            return {name: entry.to(device, copy=True, non_blocking=True) for name, entry in state.items()}
        buffer, other = self._to_device
        self._to_device = other, buffer
        moved = {}
        for name, staged in buffer.like(state).items():
            staged.copy_(state[name])
            moved[name] = torch.empty_like(staged, device=device).copy_(staged, non_blocking=True)
        buffer.mark()
        return moved

    def to_host(self, state: Mapping[str, Tensor]) -> State:
        """Return a state on the host; it waits once for a GPU, however many entries there are."""
        if not any(pins(entry.device) for entry in state.values()):
            return {name: entry.cpu() for name, entry in state.items()}
        staged = self._to_host.like(state)
        for name, entry in state.items():
            staged[name].copy_(entry, non_blocking=True)
        self._to_host.mark()
        self._to_host.wait()
        return {name: entry.clone() for name, entry in staged.items()}


class StagedStates(Mapping[int, State]):
    """Clients' states of the host, each copied to a device when it is asked for."""

    def __init__(self, states_by_client: Mapping[int, State], staging: Staging, device: torch.device) -> None:
        self._kept, self._staging, self._device = states_by_client, staging, device

    def __getitem__(self, client: int) -> State:
        return self._staging.to_device(self._kept[client], self._device)

    def __iter__(self) -> Iterator[int]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

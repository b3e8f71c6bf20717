"""The global random generators that a module may draw from: torch's, numpy's and Python's."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch


class GlobalGenerators:
    """Seeds, keeps and compares every global generator that a module may draw from.

    Attributes:
        of_torch: torch's, on the CPU and on the device.
        cuda_devices: index of the GPU, in a list; [] on other devices. `fork_rng` would otherwise keep the state of every GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda_devices = [device.index or 0] if device.type == "cuda" else []
        self.of_torch = [
            torch.default_generator,
            *(torch.cuda.default_generators[index] for index in self.cuda_devices),
        ]

    def seed(self, seed: int) -> None:
        """Seed them, so that the random numbers depend on `seed` only."""
        for generator in self.of_torch:
            generator.manual_seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002 -- modules and transforms use the global generator
        random.seed(seed)

    def keep(self) -> Callable[[], None]:
        """Return a function that restores their present states."""
        states = [generator.get_state() for generator in self.of_torch]
        numpy_state, python_state = np.random.get_state(), random.getstate()  # noqa: NPY002

        def restore() -> None:
            for generator, state in zip(self.of_torch, states, strict=True):
                generator.set_state(state)
            np.random.set_state(numpy_state)  # noqa: NPY002
            random.setstate(python_state)

        return restore

    def have_drawn(self, seed: int) -> bool:
        """True if a random number has been drawn from one since `seed` was called."""
        numpy_states = zip(np.random.get_state(), np.random.RandomState(seed % 2**32).get_state(), strict=True)  # noqa: NPY002
        return (
            any(
                not torch.equal(generator.get_state(), torch.Generator(generator.device).manual_seed(seed).get_state())
                for generator in self.of_torch
            )
            or any(not np.array_equal(now, first) for now, first in numpy_states)
            or random.getstate() != random.Random(seed).getstate()
        )

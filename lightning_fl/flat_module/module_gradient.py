"""The gradients of what a module trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_fl.flat_module.optimizers.manual_optimizers import ManualOptimizers
from lightning_fl.flat_module.optimizers.module_optimizer import ModuleOptimizer
from lightning_fl.flat_module.step_graph import Gradient
from lightning_fl.vectors import pieces
from lightning_fl.vectors.flat_gradient import FlatGradient
from lightning_fl.vectors.layout import Layout


class ModuleGradient:
    """Gradients of a module's shared parameters, in one vector once `flatten` is called, and of its personal ones.

    The optimiser leaves out parameters that have not had a gradient yet. Methods that find the first gradient of some let the
    optimiser step these from then on, and return True.

    Attributes:
        vector: gradient (d,) of the last backward pass; empty unless flattened.
        is_released: True from `release` to the next step.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], personal: Mapping[str, nn.Parameter], vector: Tensor
    ) -> None:
        """Bind parameters.

        Args:
            parameters: the shared ones.
            personal: the personal ones, by name.
            vector: empty, of the parameters' type and device.
        """
        self._parameters, self._personal, self.vector = parameters, personal, vector
        self._flat = FlatGradient(Layout.of({}), [], vector)
        self._apart = [*parameters, *personal.values()]  # those whose gradients are no views of the vector
        self.is_released = False

    def flatten(self, layout: Layout, optimizer: ModuleOptimizer | ManualOptimizers) -> None:
        """Gather the gradients of the shared parameters in a vector from now on.

        Args:
            layout: position of each gradient in the vector.
            optimizer: steps the parameters.
        """
        self.vector = self.vector.new_zeros(layout.numel)
        self._apart = list(self._personal.values())
        self._optimizer = optimizer
        tells_missing = optimizer.acts_without_gradient
        self._flat = FlatGradient(layout, self._parameters, self.vector, tells_missing=tells_missing)

    @property
    def is_outdated(self) -> bool:
        """True if parameters have got their first gradient late, or need none any more, as after a freeze."""
        return self._flat.is_outdated

    @property
    def missing(self) -> list[str]:
        """Names of parameters that have had a gradient, but have none in this step, if the optimiser would move them."""
        return self._flat.missing

    def zero(self) -> None:
        """Remove the gradient of the last step; the vector keeps it until it is complete again."""
        for parameter in self._apart:
            parameter.grad = None
        if self.is_released:
            self.vector.untyped_storage().resize_(self.vector.nbytes)
            self.is_released = False
        self._flat.zero()

    def release(self) -> None:
        """Give back the memory of a long vector until the next step; no parameter has a gradient until then."""
        if self.vector.numel() >= pieces.LONG:
            for parameter in self._parameters:
                parameter.grad = None
            self.vector.untyped_storage().resize_(0)
            self.is_released = True

    def complete(self) -> None:
        """Let the vector be the gradient of the backward passes since `zero`, 0 if there was none."""
        self._flat.complete()

    def discover(self) -> bool:
        """Complete the vector after a backward pass."""
        return self._activate(self._flat.discover())

    def adopt(self) -> bool:
        """Take over gradients that a hook has replaced or removed."""
        return self._activate(self._flat.adopt())

    def gather(self) -> list[str]:
        """Take over the gradients that the parameters have at present, and return the names of those that are `missing`."""
        missing, first = self._flat.gather()
        self._activate(first)
        return missing

    def detach(self) -> None:
        """Let no shared parameter have a gradient, as before a first backward pass, until the next step."""
        for parameter in self._parameters:
            parameter.grad = None

    def add(self, gradient: Gradient, factor: float) -> bool:
        """Add a factor times the gradient of a compiled graph."""
        for name, of_leaf in gradient.personal.items():
            leaf = self._personal[name]
            leaf.grad = of_leaf * factor if leaf.grad is None else leaf.grad.add_(of_leaf, alpha=factor)
        return self._activate(self._flat.add(gradient.shared, gradient.names, factor))

    def sum(self, all_reduce: Callable[[Tensor], None]) -> bool:
        """Add the gradients of other processes.

        Args:
            all_reduce: adds up a contiguous tensor over the processes, in place.
        """
        self.complete()
        all_reduce(self.vector)
        for leaf in self._personal.values():
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.contiguous()
            all_reduce(gradient)
            leaf.grad = gradient
        return self._activate(self._flat.admit_nonzero())

    def recheck_missing(self) -> list[str]:
        """Return the `missing` to whose part of the vector nothing has been added since."""
        return self._flat.recheck_missing()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Remove the gradient, and restore it at the end."""
        self.complete()
        gradient, missing = self.vector.clone(), self.missing
        owned = {name: leaf.grad for name, leaf in self._personal.items()}
        self.zero()
        yield
        self._flat.restore(gradient, missing)
        for name, leaf in self._personal.items():
            leaf.grad = owned[name]

    def _activate(self, discovered: list[str]) -> bool:
        if discovered:
            self._optimizer.activate(discovered)
        return bool(discovered)

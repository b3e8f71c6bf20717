"""Gradients of a module's parameters in one flat vector, which rules and optimisers read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_fl.vectors.layout import Layout


class FlatGradient:
    """Gradients of a tree's leaves in one vector.

    A step begins without gradients, so that autograd makes new ones, which is faster than to add them to zeros. After the
    first backward pass they are copied into the vector, whose views they are from then on.

    In the vector "no gradient" and "gradient 0" look the same, but weight decay and momentum must act only on the second.
    So leaves that have not had a gradient yet are left out, and those without one in the present step can be told.

    Attributes:
        has_grown: True if leaves got their first gradient after the first backward pass.
    """

    def __init__(
        self,
        layout: Layout,
        leaves: Sequence[Tensor],
        vector: Tensor,
        used_names: Iterable[str] = (),
        tells_missing: bool = False,
    ) -> None:
        """Make the gradients of the known leaves views of the vector.

        Args:
            layout: position of each gradient in `vector`.
            leaves: tensors that autograd gives gradients to, in the layout's order.
            vector: storage (..., d) of the gradients.
            used_names: names of the leaves that already had a gradient.
            tells_missing: True to tell which of them have none in a step.
        """
        self._vector, self._tells_missing = vector, tells_missing
        # `data` gives each view a version of its own, which autograd raises when it adds to it.
        views = [view.data for view in layout.views(vector).values()]
        self._pairs = dict(zip(layout.names, zip(leaves, views, strict=True), strict=True))
        self._outside = dict(self._pairs)
        self._inside = {name: self._outside.pop(name) for name in used_names}
        self._present: set[str] = set()
        self._versions: list[int] = []
        self._is_complete = True
        self.has_grown = False
        self._attach(self._inside)
        self._note_versions()

    @property
    def names(self) -> list[str]:
        """Leaves that have had a gradient."""
        return list(self._inside)

    @property
    def is_outdated(self) -> bool:
        """True if leaves have got their first gradient late (`has_grown`), or need none any more, as after a freeze."""
        return self.has_grown or any(not leaf.requires_grad for leaf, _ in self._inside.values())

    @property
    def missing(self) -> list[str]:
        """Leaves that have had a gradient, but have none in this step; [] unless they are told."""
        if not self._tells_missing or len(self._present) == len(self._inside):
            return []
        return [name for name in self._inside if name not in self._present]

    def zero(self) -> None:
        """Begin a step without gradients; the vector keeps the last step's until it is complete."""
        for leaf, _ in self._inside.values():
            leaf.grad = None
        self._present.clear()
        self._is_complete = False

    def complete(self) -> None:
        """Move the gradients of a step's first backward pass into the vector, which is 0 where leaves have none."""
        if self._is_complete:
            return
        self._is_complete = True
        views, gradients = [], []
        for name, (leaf, view) in self._inside.items():
            if (gradient := leaf.grad) is None:
                view.zero_()
            else:
                views.append(view)
                gradients.append(gradient.to_dense() if gradient.is_sparse else gradient)
                self._present.add(name)
            leaf.grad = view
        if views:
            torch._foreach_copy_(views, gradients)
        for _, view in self._outside.values():
            view.zero_()
        self._note_versions()

    def discover(self) -> list[str]:
        """Read what the last backward pass gave, and move first gradients into the vector; return the leaves that got one."""
        self.complete()
        if self._tells_missing:
            before = zip(self._inside.items(), self._versions, strict=True)
            self._present.update(name for (name, (_, view)), version in before if view._version != version)
        first = [name for name, (leaf, _) in self._outside.items() if leaf.grad is not None]
        for name in first:
            leaf, view = self._pairs[name]
            view.copy_(leaf.grad.to_dense())  # type: ignore[union-attr]
        return self._admitted(first)

    def add(self, gradient: Tensor, names: Sequence[str], factor: float) -> list[str]:
        """Add a factor times a gradient (..., d), which these leaves have; return as `discover` does."""
        if self._is_complete:
            self._vector.add_(gradient, alpha=factor)
        else:
            torch.mul(gradient, factor, out=self._vector)
            self._is_complete = True
            self._attach(self._inside)
        return self._admitted(names)

    def adopt(self) -> list[str]:
        """Take over gradients that something replaced or removed after the backward pass; return as `discover` does."""
        self.complete()
        replaced = {name: leaf.grad for name, (leaf, view) in self._inside.items() if leaf.grad is not view}
        replaced |= {name: leaf.grad for name, (leaf, _) in self._outside.items() if leaf.grad is not None}
        for name, gradient in replaced.items():
            _, view = self._pairs[name]
            if gradient is None:
                view.zero_()
            else:
                view.copy_(gradient.to_dense())
        self._attach(self._inside.keys() & replaced.keys())
        self._present.difference_update(replaced)
        return self._admitted([name for name, gradient in replaced.items() if gradient is not None])

    def gather(self) -> tuple[list[str], list[str]]:
        """Take over the gradients that leaves have at present, whoever has put them there.

        Returns:
            The leaves that have had a gradient, but have none at present; and what `discover` returns.
        """
        without = [name for name, (leaf, _) in self._inside.items() if leaf.grad is None]
        first = self.adopt()
        self.detach(without)
        return self.missing, first

    def detach(self, names: Iterable[str]) -> None:
        """Let these leaves have no gradient; `zero` and `adopt` give them their views again."""
        for name in names:
            self._pairs[name][0].grad = None

    def admit_nonzero(self) -> list[str]:
        """Give leaves a gradient to whose part of the vector others have added; return as `discover` does."""
        return self._admitted([name for name in (*self._outside, *self.missing) if self._pairs[name][1].any()])

    def recheck_missing(self) -> list[str]:
        """Give missing leaves a gradient to whose part of the vector something has been added; return the others."""
        self._present.update(name for name in self.missing if self._pairs[name][1].any())
        return self.missing

    def restore(self, gradient: Tensor, missing: Iterable[str]) -> None:
        """Put back the gradients (..., d) of a step, and which of them are `missing`."""
        self._vector.copy_(gradient)
        self._present = self._inside.keys() - set(missing)
        self._is_complete = True
        self._attach(self._inside)
        self._note_versions()

    def admit(self, names: Iterable[str]) -> list[str]:
        """Add these leaves to those that have had a gradient; return the new ones."""
        new = {name: self._outside.pop(name) for name in names if name in self._outside}
        if new:
            self.has_grown = bool(self._inside)
            self._inside |= new
            self._attach(new)
        self._note_versions()
        return list(new)

    def _admitted(self, present: Iterable[str]) -> list[str]:
        """Count these leaves as having a gradient in this step, for some the first."""
        self._present.update(present)
        return self.admit(present)

    def _attach(self, names: Iterable[str]) -> None:
        for name in names:
            leaf, view = self._pairs[name]
            leaf.grad = view

    def _note_versions(self) -> None:
        if self._tells_missing:
            self._versions = [view._version for _, view in self._inside.values()]

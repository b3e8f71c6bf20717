"""Trees (named tensors) and the flat vectors that store them.

All trainable parameters of a module lie one after the other in one vector of d numbers, and the module's own parameters
are views of it. Loading a client is then one copy, a server formula reads as it does on paper (`w + alpha * (w_s - w)`),
and an elementwise rule needs only a few kernels for any number of layers. A `Layout` maps each parameter to its part of the
vector; with a leading axis of clients the same layout reads a stack (K, d).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, starmap
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fl.errors import UserError

Tree = dict[str, Tensor]


@dataclass(frozen=True)
class Layout:
    """Positions of the tensors of a tree in its flat vector.

    Attributes:
        names: keys of the tree, in the order of storage (`named_parameters()` order).
        shapes: shape of each tensor.
        dim_orders: axes of each tensor from the outermost to the innermost in memory, as `Tensor.dim_order` gives them:
            (0, 1, 2, 3) for a contiguous tensor, (0, 2, 3, 1) in `torch.channels_last`; contiguous if not given.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dim_orders: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        orders = self.dim_orders or [range(len(shape)) for shape in self.shapes]
        told_apart = tuple(starmap(_told_apart, zip(orders, self.shapes, strict=True)))
        object.__setattr__(self, "dim_orders", told_apart)

    @classmethod
    def of(cls, tree: Mapping[str, Tensor]) -> Layout:
        """Return the layout of `tree`, whose tensors keep their memory format."""
        return cls(
            tuple(tree),
            tuple(tuple(tensor.shape) for tensor in tree.values()),
            tuple(tensor.dim_order() for tensor in tree.values()),
        )

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of entries of each tensor."""
        return tuple(prod(shape) for shape in self.shapes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Start of each tensor in the vector."""
        return tuple(accumulate(self.sizes, initial=0))[:-1]

    @cached_property
    def numel(self) -> int:
        """d, the length of the vector."""
        return sum(self.sizes)

    def slices(self, names: Iterable[str]) -> list[slice]:
        """Return the slices of the vector that these tensors cover, with adjacent ones joined; other names are ignored."""
        wanted = set(names)
        joined: list[slice] = []
        for name, start, size in zip(self.names, self.offsets, self.sizes, strict=True):
            if name not in wanted:
                continue
            if joined and joined[-1].stop == start:
                joined[-1] = slice(joined[-1].start, start + size)
            else:
                joined.append(slice(start, start + size))
        return joined

    def without(self, names: Collection[str]) -> Layout:
        """Return the layout of the tensors that have none of these names."""
        entries = zip(self.names, self.shapes, self.dim_orders, strict=True)
        left = [entry for entry in entries if entry[0] not in names]
        return Layout(*map(tuple, zip(*left, strict=True))) if left else NO_LAYOUT

    def views(self, vector: Tensor) -> Tree:
        """Read `vector` (..., d) as a tree of views (..., *shape); writing to a view writes to the vector."""
        if vector.shape[-1] != self.numel:
            raise ValueError(f"the layout needs a vector of {self.numel} entries, got {vector.shape[-1]}")
        return dict(self._iterate(vector))

    @cached_property
    def _parts(self) -> list[tuple[str, int, int, tuple[int, ...], tuple[int, ...]]]:
        """Name, offset, size and shape in memory of each tensor, and the permutation to its own shape; () if they are equal."""
        entries = zip(self.names, self.shapes, self.dim_orders, self.offsets, self.sizes, strict=True)
        parts = []
        for name, shape, order, offset, size in entries:
            # Counted from the end, because a stack has an axis of clients before.
            back = tuple(order.index(axis) - len(order) for axis in sorted(order))
            is_contiguous = order == tuple(sorted(order))
            parts.append((name, offset, size, tuple(shape[axis] for axis in order), () if is_contiguous else back))
        return parts

    def _iterate(self, vector: Tensor) -> Iterator[tuple[str, Tensor]]:
        leading = vector.shape[:-1]
        for name, offset, size, shape, back in self._parts:
            view = vector.narrow(-1, offset, size).view((*leading, *shape))
            yield name, view.permute(*range(len(leading)), *back) if back else view

    def flatten(self, tree: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
        """Copy `tree` (tensors (*shape)) into one vector (d,), `out` if given.

        Raises:
            KeyError: a name of the layout is missing in `tree`.
        """
        if out is None:
            example = next(iter(tree.values())) if tree else torch.empty(0)
            out = torch.empty(self.numel, dtype=example.dtype, device=example.device)
        for name, view in self._iterate(out):
            view.copy_(tree[name])
        return out

    def relay(self, vector: Tensor, source: Layout) -> Tensor:
        """Bring a vector (..., d) of `source` (same names and shapes) into this layout's order; no copy if both are equal."""
        return vector if source == self else self.flatten(source.views(vector), torch.empty_like(vector))


def _told_apart(order: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Return the order of a tensor's axes; that of a contiguous one if they differ in axes of length 1 only."""
    long = [axis for axis in order if shape[axis] > 1]
    return tuple(range(len(shape)) if 0 in shape or long == sorted(long) else order)


NO_LAYOUT = Layout((), ())
"""Layout of no tensors."""


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


def common_dtype(tree: Mapping[str, Tensor]) -> torch.dtype:
    """Return the one floating dtype of all tensors of `tree` (float32 if it is empty).

    Raises:
        UserError: the dtypes differ; one flat vector cannot hold them without changing what the module computes.
    """
    dtypes = {tensor.dtype for tensor in tree.values()}
    if len(dtypes) > 1:
        raise UserError(
            f"a federated module needs parameters of one dtype, got {', '.join(sorted(map(str, dtypes)))}; "
            "cast the module, for instance with module.float()."
        )
    return dtypes.pop() if dtypes else torch.float32


def holders_of(module: nn.Module) -> dict[str, list[tuple[dict[str, Any], str]]]:
    """Return the dictionaries and keys that hold each parameter and buffer; tied ones have several under their first name."""
    holders: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for owner in module.modules():
        for home in (owner._parameters, owner._buffers):
            for leaf, tensor in home.items():
                if tensor is not None:
                    holders.setdefault(id(tensor), []).append((home, leaf))
    return {name: holders[id(tensor)] for name, tensor in [*module.named_parameters(), *module.named_buffers()]}

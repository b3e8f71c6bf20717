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

"""Find the filters that a network can lose, and plan the cuts in all other tensors.

The graph of a network comes from torch-pruning (Fang et al., DepGraph, CVPR 2023), which traces one forward pass.
torch-pruning itself creates new parameters when it cuts, and optimisers would keep the old ones. So it cuts a twin in
which every number is its own flat index; the numbers that remain in the twin are the indices to keep in the network.

torch-pruning assumes that an operation unknown to it leaves channels as they are. So every plan is tested before it is
returned: a twin of the network with random weights, cut to the plan, must compute the same as the whole twin with zero
weights for the lost channels in the layers that read them. If training uses layers that evaluation does not, such as
GoogLeNet's auxiliary heads, the graph is traced in training mode, and plans are tested in both modes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves

from lightning_fl.errors import UserError, nearest, require
from lightning_fl.pruning.apply_plan import prune
from lightning_fl.pruning.obstacles import BEHIND, Examined, examine
from lightning_fl.pruning.plan import Plan
from lightning_fl.pruning.traced_twin import TracedTwin, graphs
from lightning_fl.pruning.trial import restored, tensors_of

SAID = 3
"""Number of layers for which an error gives the reason why they cannot lose filters."""


def prunable_layers(module: nn.Module, example_input: Any = None, required: Iterable[str] = ()) -> tuple[str, ...]:
    """Return names of the convolutions that can lose filters while only the layers that read them change shape as well.

    A convolution stays whole if it has groups, or if its outputs are tied to the outputs of another layer (by a sum, as for
    all convolutions of a residual block but the first), are outputs of the network, or are read by an operation that cannot
    be cut with it. Filters whose outputs form a group of a GroupNorm are removed together.

    Args:
        module: any network whose forward takes `example_input`; it does not change.
        example_input: a batch (a tensor, a tuple or dictionary of arguments) for its forward; None:
            `example_input_array`.
        required: layers that must be able to lose filters.

    Raises:
        UserError: there is no example, forward does not take it, or a required layer cannot lose filters.
    """
    network = Network(module, example_input)
    for name in required:
        network.require_prunable(name)
    return network.layers


def plan_for(module: nn.Module, filters: Mapping[str, Sequence[int] | Tensor], example_input: Any = None) -> Plan:
    """Return the plan that keeps only these filters of each named layer.

    Args:
        module: any network whose forward takes `example_input`; it does not change.
        filters: kept indices by name of a convolution, such as {"network.conv1": [0, 2, 3]}, with all or none of the filters in
            a group of a GroupNorm. Other layers stay whole.
        example_input: as in `prunable_layers`.

    Raises:
        UserError: a layer cannot lose filters, or does not have these indices.
    """
    return Network(module, example_input).plan(filters)


class Network:
    """The prunable convolutions of a network, and plans of their cuts.

    Args:
        module: the network; it does not change.
        example_input: as in `prunable_layers`.

    Attributes:
        layers: names of the convolutions that can lose filters, in the order of the module.
        widths: number of filters of each, c_l.
        blocks: number of the block of each of their filters, (c_l,); filters of a block stay or are removed together.
    """

    @graphs()
    def __init__(self, module: nn.Module, example_input: Any = None) -> None:
        self._twin = TracedTwin(module, example_input)
        self._obstacles: dict[str, str] = {}
        self._examined: dict[str, Examined] = {}
        self.layers = self._find()
        self.widths = {name: self._width(name) for name in self.layers}
        self.blocks = {name: self._examined[name].blocks for name in self.layers}

    @graphs()
    def plan(self, filters: Mapping[str, Sequence[int] | Tensor]) -> Plan:
        """Return the plan for these filters: see `plan_for`."""
        lost = {}
        for name, filter_indices in filters.items():
            self.require_prunable(name)
            chosen = _checked(name, filter_indices, self.blocks[name])
            if len(chosen) < self.widths[name]:
                lost[name] = chosen
        axes = self._tried(lost)
        if axes is None:
            culprits = self._bisected(lost) or list(lost)
            raise UserError(f"pruning: {', '.join(map(repr, culprits))} cannot lose these filters: {BEHIND}.")
        return Plan(lost, axes, self.widths)

    def require_prunable(self, name: str) -> None:
        """Raise `UserError` with the reason unless the layer can lose filters."""
        if name in self._obstacles:
            raise UserError(f"pruning: {name!r} cannot lose filters: {self._reason(name)}.")
        hint = nearest(name, self.layers) if self.layers else "this network has none that can lose filters"
        require(name in self.layers, f"pruning: {name!r} is not a convolution of this network; {hint}.")

    @property
    def first_obstacles(self) -> str:
        """Reasons why the first convolutions must stay whole."""
        said = [f"{name!r} cannot because {self._reason(name)}" for name in [*self._obstacles][:SAID]]
        more = len(self._obstacles) - len(said)
        return "; ".join(said) + (f"; and so on for {more:,} more" if more else "") if said else "it has no convolution"

    def _reason(self, name: str) -> str:
        """Return the reason why a layer must stay whole. Whether it is an output is checked only here: the check is slow."""
        reason, blocks = self._obstacles[name], self._examined[name].blocks
        is_output = reason.startswith(BEHIND) and self._shortens_outputs({name: _without_first_block(blocks)})
        return "its filters are channels of the network's output" if is_output else reason

    # -- prunable layers -----------------------------------------------------------------------------------------------

    def _find(self) -> tuple[str, ...]:
        convolutions = [
            (name, layer) for name, layer in self._twin.module.named_modules() if isinstance(layer, _ConvNd)
        ]
        graph = self._twin.graph()
        names = {module: path for path, module in self._twin.module.named_modules()}
        first, reasons = dict[str, Tensor](), dict[str, str]()
        for name, layer in convolutions:
            unused = Examined("evaluation does not use it", torch.empty(0))
            self._examined[name] = examined = examine(graph, layer, names) if layer in self._twin.evaluated else unused
            reasons[name] = examined.reason
            if not examined.reason:
                first[name] = _without_first_block(examined.blocks)
        for name in self._culprits(first):
            odd = " and ".join(self._examined[name].own_forwards[:2])
            reasons[name] = f"{BEHIND}{f'; perhaps {odd} with a forward of its own' if odd else ''}"
        self._obstacles = {name: reason for name, reason in reasons.items() if reason}
        return tuple(name for name in first if not reasons[name])

    def _culprits(self, filters: Mapping[str, Tensor]) -> list[str]:
        """Return the layers that cannot be cut to these filters, found by bisection.

        If neither the first nor the last layer of any kind can be cut, all layers are returned without bisection, which would
        take minutes for the same result.
        """
        if self._tried(filters) is not None:
            return []
        by_kind: dict[tuple[str, ...], list[str]] = {}
        for name in filters:
            by_kind.setdefault(self._examined[name].kind, []).append(name)
        chosen = dict.fromkeys(name for kind in by_kind.values() for name in (kind[0], kind[-1]))
        if all(self._tried({name: filters[name]}) is None for name in chosen):
            return list(filters)
        return self._bisected(filters)

    def _bisected(self, filters: Mapping[str, Tensor]) -> list[str]:
        """Return the layers that cannot be cut to these filters, which cannot all be cut together."""
        names = list(filters)
        if len(names) == 1:
            return names
        halves = names[: len(names) // 2], names[len(names) // 2 :]
        parts = [{name: filters[name] for name in half} for half in halves]
        return [bad for part in parts if self._tried(part) is None for bad in self._bisected(part)]

    def _width(self, name: str) -> int:
        layer: Any = self._twin.module.get_submodule(name)
        return int(layer.weight.shape[0])

    # -- cuts in other tensors -----------------------------------------------------------------------------------------

    def _tried(self, filters: Mapping[str, Tensor]) -> dict[str, dict[int, Tensor]] | None:
        """Return `Plan.axes` for these filters, or None if the network cannot be cut to them."""
        if not filters:
            return {}
        try:
            axes = self._axes(filters)
            return axes if self._twin.holds(Plan(axes=axes)) else None
        except Exception:  # shapes that do not fit together, or a network that torch-pruning does not support
            return None

    @graphs()
    @torch.no_grad()
    def _shortens_outputs(self, filters: Mapping[str, Tensor]) -> bool:
        """True if the network runs when it is cut to these filters, but its outputs have other shapes."""
        try:
            whole = [way(self._twin.module, self._twin.inputs) for way in self._twin.calls]
            with torch.enable_grad():
                plan = Plan(axes=self._axes(filters))
            with restored(self._twin.module):
                prune(self._twin.module, plan)
                cut = [way(self._twin.module, self._twin.inputs) for way in self._twin.calls]
        except Exception:  # as in `_tried`
            return False
        return [leaf.shape for leaf in _tensors(whole)] != [leaf.shape for leaf in _tensors(cut)]

    def _axes(self, filters: Mapping[str, Tensor]) -> dict[str, dict[int, Tensor]]:
        """Return the kept indices of every axis of a parameter or buffer that these filters shorten."""
        twin, axes = self._twin.module, {}
        shapes = {name: tensor.shape for name, tensor in tensors_of(twin).items()}
        with restored(twin):
            graph = self._twin.graph()
            for tensor in tensors_of(twin).values():
                if tensor.is_floating_point():
                    tensor.data = torch.arange(tensor.numel(), dtype=torch.float64).view(tensor.shape)
            for name, filter_indices in filters.items():
                layer: Any = twin.get_submodule(name)
                lost = sorted(set(range(layer.weight.shape[0])) - set(filter_indices.tolist()))
                out = graph.get_pruner_of_module(layer).prune_out_channels
                graph.get_pruning_group(layer, out, lost).prune()
            for name, tensor in tensors_of(twin).items():
                if tensor.shape != shapes[name]:
                    axes[name] = _kept(tensor, shapes[name])
        return axes


def _kept(tensor: Tensor, shape: torch.Size) -> dict[int, Tensor]:
    """Return the kept indices along each axis shorter than in `shape`, read from numbers that are flat indices."""
    axes = {}
    for axis in range(tensor.dim()):
        if tensor.shape[axis] < shape[axis]:
            line = tensor.detach().movedim(axis, 0).flatten(1)[:, 0] if tensor.dim() > 1 else tensor.detach()
            axes[axis] = torch.unravel_index(line.long(), shape)[axis]
    return axes


def _without_first_block(blocks: Tensor) -> Tensor:
    """Return the indices of the filters of all blocks but the first."""
    return (blocks != blocks[0]).nonzero().flatten()


def _tensors(outputs: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]


def _checked(name: str, filter_indices: Sequence[int] | Tensor, blocks: Tensor) -> Tensor:
    width = len(blocks)
    indices = torch.as_tensor(filter_indices, dtype=torch.int64).flatten().cpu()
    ascending = bool((indices.diff() > 0).all()) and len(indices) > 0
    is_allowed = ascending and int(indices[0]) >= 0 and int(indices[-1]) < width
    require(
        is_allowed,
        f"pruning: {name!r} must keep one or more of its filters 0 to {width - 1}, ascending, got {indices.tolist()}.",
    )
    lost = torch.ones(width, dtype=torch.bool).index_fill(0, indices, False)
    torn = torch.isin(blocks, blocks[lost]) & ~lost
    if bool(torn.any()):
        members = (blocks == blocks[torn][0]).nonzero().flatten().tolist()
        raise UserError(
            f"pruning: {name!r} must keep all or none of its filters {', '.join(map(str, members))}, which a GroupNorm "
            f"normalises together, got {indices.tolist()}."
        )
    return indices

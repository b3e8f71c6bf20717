"""Units of a network's hidden layers, and plans that keep some of the units of every hidden layer.

A unit is a filter of a convolution or a neuron of a linear layer. Layers whose outputs are added, as in a residual block, share
their units. The inputs of the network, and the layers whose units are its outputs, stay whole.

`lightning_fl.pruning.graph` cuts single convolutions, and follows each cut through the network anew. Here every unit is followed
once, so that a plan for any choice of units only needs indexing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from lightning_fl.errors import UserError
from lightning_fl.pruning.apply_plan import reads_along
from lightning_fl.pruning.obstacles import BEHIND, cuts, examine, num_filters
from lightning_fl.pruning.plan import Plan
from lightning_fl.pruning.traced_twin import TracedTwin, graphs
from lightning_fl.pruning.trial import tensors_of


class HiddenUnits:
    """Hidden layers of a network, and the units of each.

    Args:
        module: any network whose forward takes `example_input`; it does not change.
        example_input: a batch (a tensor, a tuple or dictionary of arguments) for its forward; None:
            `example_input_array`.

    Attributes:
        blocks: number of the block of each unit of a layer, (c_l,), by the name of the layer. Units of a block stay or are
            removed together, like the channels of a GroupNorm's group. Among layers whose outputs are added, only the first has
            an entry.
        layers: names of all hidden layers.

    Raises:
        UserError: a hidden layer cannot lose units, or the network has no hidden layer; the sentence names the first obstacle.
    """

    @graphs()
    def __init__(self, module: nn.Module, example_input: Any = None) -> None:
        self._twin = TracedTwin(module, example_input)
        self._name = type(module).__name__
        self.blocks: dict[str, Tensor] = {}
        self.layers: list[str] = []
        self._units: dict[tuple[str, int], Tensor] = {}
        self._first: dict[str, int] = {}
        self._find()
        self._check_uncut()
        self._try()
        self._read = {key for key in self._units if reads_along(self._twin.module, *key)}
        del self._twin  # a copy of the network in float64

    @property
    def widths(self) -> dict[str, int]:
        """Number of units of each layer, c_l, by its name."""
        return {name: len(blocks) for name, blocks in self.blocks.items()}

    def plan(self, kept: Mapping[str, Tensor]) -> Plan:
        """Return the plan that keeps these units.

        Args:
            kept: bools (c_l,) by the name of each layer, at least one True; other layers stay whole.
        """
        flags = self._flags(kept)
        filters = {name: mine.nonzero().flatten() for name, mine in kept.items() if not bool(mine.all())}
        axes: dict[str, dict[int, Tensor]] = {}
        for (name, axis), units in self._units.items():
            stays = flags[units]
            if not bool(stays.all()):
                axes.setdefault(name, {})[axis] = stays.nonzero().flatten()
        return Plan(filters, axes, self.widths)

    def read_by(self, kept: Mapping[str, Tensor], fewer: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the inputs of a cut network's layers that stay with fewer units: bools (inputs,) by name of each layer that
        loses some.

        If each of these layers reads 0 in place of its other inputs, the cut network computes the same as a network that is cut
        to the fewer units.

        Args:
            kept: units of the cut network, as in `plan`.
            fewer: units among these.
        """
        flags, left = self._flags(kept), self._flags(fewer)
        read = {}
        for key, units in self._units.items():
            inputs = left[units[flags[units]]]
            if key in self._read and not bool(inputs.all()):
                read[key[0].rpartition(".")[0]] = inputs
        return read

    def _flags(self, kept: Mapping[str, Tensor]) -> Tensor:
        """Return bools of the units of all layers one after the other, True for units that stay, and a last True."""
        flags = torch.ones(sum(self.widths.values()) + 1, dtype=torch.bool)
        for name, mine in kept.items():
            flags[self._first[name] : self._first[name] + len(mine)] = mine
        return flags

    def _find(self) -> None:
        """Follow the units of every hidden layer to the tensors that they would be cut from."""
        graph, twin = self._twin.graph(), self._twin.module
        names = {module: path for path, module in twin.named_modules()}
        paths = {id(tensor): path for path, tensor in tensors_of(twin).items()}
        followed = set[Any]()
        for layer, name in names.items():
            is_read = layer in graph.module2node and layer in self._twin.evaluated
            if not isinstance(layer, (_ConvNd, nn.Linear)) or layer in followed or not is_read:
                continue
            if num_filters(layer) < 2 or self._is_output(graph, layer):
                continue
            examined = examine(graph, layer, names, with_tied=True)
            self._refuse(examined.reason, name)
            start = sum(self.widths.values())
            self.blocks[name], self._first[name] = examined.blocks, start
            itself = (layer, graph.get_pruner_of_module(layer).prune_out_channels, None)
            for other, cut, channels in (itself, *cuts(graph, layer)):
                writes = graph.is_out_channel_pruning_fn(cut)
                if writes and isinstance(other, (_ConvNd, nn.Linear)):
                    followed.add(other)
                    self.layers.append(names[other])
                for tensor, axis, size in _cut_axes(other, writes, paths):
                    if channels is not None and max(channel.idx for channel in channels) >= size:
                        self._refuse(BEHIND, name)
                    units = self._units.setdefault((tensor, axis), torch.full((size,), -1))
                    at = torch.arange(size) if channels is None else torch.tensor([channel.idx for channel in channels])
                    own = at if channels is None else torch.tensor([channel.root_idx for channel in channels])
                    taken = (units[at] != -1) & (units[at] != start + own)
                    self._refuse(BEHIND if bool(taken.any()) else "", name)
                    units[at] = start + own
        self.layers = [name for name in names.values() if name in self.layers]

    def _is_output(self, graph: Any, layer: nn.Module) -> bool:
        """True if a layer's units are channels of the network's outputs."""
        try:
            writing = [other for other, cut, _ in cuts(graph, layer) if graph.is_out_channel_pruning_fn(cut)]
        except OverflowError:  # `examine` says why it cannot be cut
            return False
        return any(not graph.module2node[other].outputs for other in [layer, *writing] if other in graph.module2node)

    def _check_uncut(self) -> None:
        """Raise `UserError` if there is no hidden layer, or a part with weights is of a kind that cannot be cut."""
        cut = {name.rpartition(".")[0] for name, _ in self._units}
        names = [path for path, part in self._twin.module.named_modules() if part in self._twin.evaluated]
        if not self._units:
            raise UserError(
                f"{self._name} has no hidden layer whose units could be cut: clients train smaller hidden layers."
            )
        for name in names:
            part = self._twin.module.get_submodule(name)
            weights = [p for p in part.parameters(recurse=False) if p.dim() > 1]
            whole = isinstance(part, (_ConvNd, nn.Linear)) and name not in cut
            if weights and name not in cut and not whole:
                self._refuse(f"layers of the kind {type(part).__name__} cannot be cut", name)

    @graphs()
    def _try(self) -> None:
        """Compare a cut network with the whole one, and raise `UserError` with the first layer that cannot be cut."""
        generator = torch.Generator().manual_seed(0)
        kept = {}
        for name, blocks in self.blocks.items():
            numbers = blocks.unique()
            chosen = numbers[torch.randperm(len(numbers), generator=generator)[: (len(numbers) + 1) // 2]]
            kept[name] = torch.isin(blocks, chosen)
        if self._holds(kept):
            return
        culprit = next((name for name, mine in kept.items() if not self._holds({name: mine})), next(iter(kept)))
        self._refuse(BEHIND, culprit)

    def _holds(self, kept: Mapping[str, Tensor]) -> bool:
        try:
            return self._twin.holds(self.plan(kept))
        except Exception:  # shapes that do not fit together
            return False

    def _refuse(self, reason: str, name: str) -> None:
        if reason:
            raise UserError(f"the hidden layer {name!r} of {self._name} cannot lose units: {reason}.")


def _cut_axes(part: Any, writes: bool, paths: Mapping[int, str]) -> list[tuple[str, int, int]]:
    """Return the name, the axis and its length for each tensor that a cut of this part of the network shortens.

    Args:
        part: module or parameter.
        writes: True if its outputs are cut, False if its inputs are.
        paths: names of the network's tensors, by their identity.
    """
    shares_its_weight = isinstance(part, nn.PReLU) and part.num_parameters == 1
    if not isinstance(part, nn.Module) or shares_its_weight:
        return []
    reads_first = isinstance(part, _ConvTransposeNd) and part.groups == 1
    axes = []
    for tensor in (*part._parameters.values(), *part._buffers.values()):
        if tensor is not None and tensor.dim() and (writes or tensor.dim() > 1):
            axis = 0 if tensor.dim() < 2 else int(writes == reads_first)
            axes.append((paths[id(tensor)], axis, tensor.shape[axis]))
    return axes

"""Obstacles to pruning in torch-pruning's graph: convolutions that must stay whole, and filters that must stay together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

BEHIND = (
    "an operation that reads its output cannot be cut with it (a sum, a normalisation over channels, a reshape or "
    "permutation, a convolution with groups, or a layer used twice)"
)


class Examined(NamedTuple):
    """Facts about a convolution, read from the graph.

    Attributes:
        reason: reason why it must stay whole; "" if the graph shows none.
        blocks: number of the block of each filter, (c_l,); filters of a block stay or are removed together.
        kind: types of the layer and of the modules that are cut with it. Mostly all layers of a kind can be cut, or none.
        own_forwards: layers that read its outputs, and whose `forward` is not the one of the torch layer that they derive from.
    """

    reason: str
    blocks: Tensor
    kind: tuple[str, ...] = ()
    own_forwards: tuple[str, ...] = ()


def examine(graph: Any, layer: Any, names: Mapping[nn.Module, str], with_tied: bool = False) -> Examined:
    """Return the reason why a layer must stay whole, or the blocks of filters that must stay together.

    A `GroupNorm` normalises each group of channels by the mean and variance of the whole group, so that the channels of a group
    stay or go together.

    Args:
        graph: torch-pruning's `DependencyGraph` of the network.
        layer: a convolution of the network, or a linear layer, whose units are then the filters.
        names: names of all modules.
        with_tied: True if convolutions and linear layers to which it is tied, as by the sum of a residual block, are cut with it.
    """
    single = torch.arange(num_filters(layer))
    if reason := _layer_obstacle(graph, layer):
        return Examined(reason, single)
    normalised: dict[nn.GroupNorm, dict[int, set[int]]] = {}
    kinds, own_forwards = {type(layer).__name__}, set[str]()
    try:
        for other, cut, channels in cuts(graph, layer):
            if reason := _tie(graph, layer, other, cut, names, with_tied):
                return Examined(reason, single)
            kinds.add(type(other).__name__)
            reads = other is not layer and isinstance(other, (_ConvNd, nn.Linear))
            if reads and _base_of(other).forward is not type(other).forward:
                own_forwards.add(f"{names[other]!r}, a {type(other).__name__}")
            if isinstance(other, nn.GroupNorm):
                filters_of = normalised.setdefault(other, {})
                for channel in channels:
                    filters_of.setdefault(channel.idx, set()).add(channel.root_idx)
    except (OverflowError, IndexError):  # torch-pruning reads a circle or a wrong shape
        return Examined(BEHIND, single)
    blocks, kind = single.tolist(), tuple(sorted(kinds))
    for norm, filters_of in normalised.items():
        size = norm.num_channels // norm.num_groups
        for first in range(0, norm.num_channels, size):
            channels_of_group = [filters_of[channel] for channel in range(first, first + size) if channel in filters_of]
            if not channels_of_group:
                continue
            if len(channels_of_group) < size:
                reason = (
                    f"its outputs share a group of {names[norm]!r} ({type(norm).__name__}) with another layer's outputs"
                )
                return Examined(reason, single)
            together = {blocks[index] for filters in channels_of_group for index in filters}
            if len(together) > 1:
                blocks = [min(together) if block in together else block for block in blocks]
    if len(set(blocks)) == 1:
        return Examined("groups of the GroupNorms behind it hold all of its filters together", single)
    return Examined("", torch.tensor(blocks), kind, tuple(sorted(own_forwards)))


def num_filters(layer: Any) -> int:
    """Return the number of filters of a convolution, or of units of a linear layer."""
    return int(layer.out_channels if isinstance(layer, _ConvNd) else layer.out_features)


def _layer_obstacle(graph: Any, layer: Any) -> str:
    """Return the reason in a layer itself why it must stay whole; "" if there is none."""
    if isinstance(layer, _ConvTransposeNd):
        return "it is a transposed convolution"
    if getattr(layer, "groups", 1) > 1:
        return f"it has {layer.groups} groups"
    if num_filters(layer) < 2:
        return "it has one filter"
    return "" if layer in graph.module2node else "forward does not use it"


def _base_of(layer: nn.Module) -> Any:
    """Return the class of torch that a layer is derived from."""
    return next(base for base in type(layer).__mro__ if base.__module__.startswith("torch."))


def _tie(graph: Any, layer: Any, other: Any, cut: Any, names: Mapping[nn.Module, str], with_tied: bool) -> str:
    """Return the reason why a module or parameter that would be cut with the layer prevents the cut; "" if there is none."""
    depthwise = isinstance(other, _ConvNd) and other.groups == other.in_channels > 1
    if isinstance(other, _ConvNd) and other.groups > 1 and not depthwise:
        return f"{names[other]!r}, which reads its outputs, has {other.groups} groups"
    if isinstance(other, (nn.LayerNorm, nn.RMSNorm)) or (isinstance(other, nn.GroupNorm) and other.num_groups == 1):
        return f"{names[other]!r} ({type(other).__name__}) normalises its outputs over all channels"
    if isinstance(other, nn.GroupNorm) and not other.affine:
        return f"{names[other]!r} ({type(other).__name__}) normalises its outputs but has no weights that tell its size"
    if isinstance(other, nn.RNNBase):
        return f"{names[other]!r} ({type(other).__name__}), a recurrent layer, reads its outputs"
    if other is layer or not graph.is_out_channel_pruning_fn(cut):
        return ""
    if isinstance(other, nn.Parameter):
        return f"its outputs are combined with {_described(other, names)}, which torch-pruning cannot cut"
    if with_tied and isinstance(other, (_ConvNd, nn.Linear)):
        return ""
    if isinstance(other, (_ConvNd, nn.Linear, nn.Embedding)) and not depthwise:
        return f"its outputs are tied to the outputs of {names[other]!r}"
    return ""


def _described(parameter: nn.Parameter, names: Mapping[nn.Module, str]) -> str:
    """Return the name of a parameter and the class that has it."""
    for owner, path in names.items():
        for leaf, one in owner._parameters.items():
            if one is parameter:
                return f"{'.'.join(filter(None, (path, leaf)))!r} of {type(owner).__name__}"
    return "a parameter that the module does not have"


class Channel(NamedTuple):
    """Channel of a layer, and the filter that it comes from: torch-pruning's mappings of channels read both."""

    idx: int
    root_idx: int


def cuts(graph: Any, layer: Any) -> Iterator[tuple[Any, Any, list[Channel]]]:
    """Yield each module or parameter that a cut of the layer's filters cuts, the function that cuts it, and its channels.

    The walk follows `DependencyGraph.get_pruning_group`, which never ends if torch-pruning mistakes an attention for a reshape:
    it runs in a circle, with more channels each time.

    Raises:
        OverflowError: the walk reaches more channels than a concatenation of several layers would have, or one channel from
            two filters, as in a gated layer that multiplies one half of its outputs by the other.
    """
    cut = graph.get_pruner_of_module(layer).prune_out_channels
    limit = 4 * max(max(p.shape, default=0) for p in graph.model.parameters())
    seen: dict[Any, dict[int, int]] = defaultdict(dict)
    ahead = [(graph.module2node[layer], cut, [Channel(index, index) for index in range(num_filters(layer))])]
    while ahead:
        node, cut, channels = ahead.pop()
        for dependency in node.dependencies:
            if not dependency.is_triggered_by(cut):
                continue
            reached = channels
            for mapping in dependency.index_mapping:
                reached = reached if mapping is None else mapping(reached)
            visited = seen[dependency.target, dependency.handler]
            if any(visited.get(channel.idx, channel.root_idx) != channel.root_idx for channel in reached):
                raise OverflowError
            new = [channel for channel in reached if channel.idx not in visited]
            if not new:
                continue
            if max(channel.idx for channel in new) >= limit:
                raise OverflowError
            visited.update(new)
            yield dependency.target.module, dependency.handler, new
            ahead.append((dependency.target, dependency.handler, new))

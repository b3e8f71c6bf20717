"""Reasons, in torch-pruning's graph of a network, why a convolution has to keep all of its filters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

BEHIND = (
    "an operation that reads its output cannot be cut with it (a sum, a normalisation over channels, a reshape or "
    "permutation, a convolution with groups, or a layer used twice)"
)


def obstacle(graph: Any, layer: _ConvNd, names: Mapping[nn.Module, str]) -> str:
    """Return the reason why a convolution has to stay whole; "" if the graph has none.

    Args:
        graph: torch-pruning's `DependencyGraph` of the network.
        layer: a convolution of the network.
        names: names of all modules.
    """
    if isinstance(layer, _ConvTransposeNd):
        return "it is a transposed convolution"
    if layer.groups > 1:
        return f"it has {layer.groups} groups"
    if layer.out_channels < 2:
        return "it has one filter"
    if layer not in graph.module2node:
        return "forward does not use it"
    try:
        for other, cut in _cuts(graph, layer):
            if reason := _tie(graph, layer, other, cut, names):
                return reason
    except OverflowError:
        return BEHIND
    return ""


def _tie(graph: Any, layer: _ConvNd, other: Any, cut: Any, names: Mapping[nn.Module, str]) -> str:
    """Return the reason why a module or parameter that would be cut with the layer holds it whole; "" if it does not."""
    depthwise = isinstance(other, _ConvNd) and other.groups == other.in_channels > 1
    if isinstance(other, _ConvNd) and other.groups > 1 and not depthwise:
        return f"{names[other]!r}, which reads its outputs, has {other.groups} groups"
    if other is layer or not graph.is_out_channel_pruning_fn(cut):
        return ""
    if isinstance(other, nn.Parameter):
        return "its outputs are combined with a parameter that belongs to no layer"
    if isinstance(other, (_ConvNd, nn.Linear, nn.Embedding)) and not depthwise:
        return f"its outputs are tied to those of {names[other]!r}"
    return ""


class _Channel(NamedTuple):
    """Channel of a layer, and the filter that it comes from: torch-pruning's mappings of channels read both."""

    idx: int
    root_idx: int


def _cuts(graph: Any, layer: _ConvNd) -> Iterator[tuple[Any, Any]]:
    """Yield each module or parameter that a cut of the layer's filters cuts, with the function that cuts it.

    This is the walk of `DependencyGraph.get_pruning_group`, which does not end where torch-pruning takes an attention for a
    reshape: it goes round in a circle, with more channels each time.

    Raises:
        OverflowError: the walk leads to more channels than a concatenation of several layers would have.
    """
    cut = graph.get_pruner_of_module(layer).prune_out_channels
    limit = 4 * max(max(p.shape, default=0) for p in graph.model.parameters())
    seen: dict[Any, set[int]] = defaultdict(set)
    ahead = [(graph.module2node[layer], cut, [_Channel(index, index) for index in range(layer.out_channels)])]
    while ahead:
        node, cut, channels = ahead.pop()
        for dependency in node.dependencies:
            if not dependency.is_triggered_by(cut):
                continue
            reached = channels
            for mapping in dependency.index_mapping:
                reached = reached if mapping is None else mapping(reached)
            visited = seen[dependency.target, dependency.handler]
            new = [channel for channel in reached if channel.idx not in visited]
            if not new:
                continue
            if max(channel.idx for channel in new) >= limit:
                raise OverflowError
            visited.update(channel.idx for channel in new)
            yield dependency.target.module, dependency.handler
            ahead.append((dependency.target, dependency.handler, new))

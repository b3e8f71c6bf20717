"""Smaller networks, cut from a module: the parts of its flat vectors that they keep, and those that cross the link."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from lightning_fl.errors import require
from lightning_fl.pruning import Plan
from lightning_fl.pruning.hidden_units import HiddenUnits
from lightning_fl.slots import Result, Width
from lightning_fl.vectors.layout import Layout
from lightning_fl.vectors.pruning_map import PruningMap
from lightning_fl.vectors.submodel import Submodel


@dataclass(frozen=True, eq=False)
class SmallerNetwork:
    """A network with some of the units of every hidden layer.

    Attributes:
        width: part of every hidden layer that it keeps.
        plan: cuts that lead to it.
        submodel: numbers of the model that it has.
        sent: those that cross the link: all but the statistics of batch normalisations, which are static.
        layers: names of the layers whose outputs are divided by `width.divisor` in training.
        in_steps: for each of `width.in_steps` the units that layers read, as bools by the names of the layers that read fewer.
    """

    width: Width
    plan: Plan
    submodel: Submodel
    sent: Submodel
    layers: tuple[str, ...]
    in_steps: tuple[Mapping[str, Tensor], ...] = ()

    def scale(self, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        """Divide the output of a hidden layer in training; a hook of the layer."""
        return output / self.width.divisor if layer.training else output

    def whole(self, result: Result) -> Result:
        """Give the upload of a client vectors of the whole model, 0 outside the network."""
        result.message, result.submodel = self.submodel.scatter(result.message, {}), self.sent
        return result


@dataclass(eq=False)
class SmallerNetworks:
    """Smaller networks of a module; those of the first units are made once.

    Attributes:
        module: the whole network.
        example: a batch of inputs for its forward.
    """

    module: nn.Module
    example: Any
    _made: dict[tuple[Width, Layout], SmallerNetwork] = field(default_factory=dict, init=False)

    @cached_property
    def statistics(self) -> frozenset[str]:
        """Names of the buffers with the statistics of batch normalisations."""
        return statistics_of(self.module)

    @cached_property
    def units(self) -> HiddenUnits:
        """Hidden layers of the module.

        Raises:
            UserError: they cannot be cut.
        """
        return HiddenUnits(self.module, self.example)

    def of(self, width: Width, layout: Layout, buffer_layout: Layout, device: torch.device) -> SmallerNetwork:
        """Return the network of a width.

        Args:
            width: part of every hidden layer that it has.
            layout: layout of the module's parameters.
            buffer_layout: layout of its float buffers.
            device: device of its masks.

        Raises:
            UserError: the module cannot be cut.
        """
        if (width, layout) not in self._made:
            network = self._cut(width, layout, buffer_layout, device)
            if width.seed is not None:
                return network
            self._made[width, layout] = network
        return self._made[width, layout]

    def _cut(self, width: Width, layout: Layout, buffer_layout: Layout, device: torch.device) -> SmallerNetwork:
        plan = self.units.plan(width.units(self.units.blocks))
        for name in plan.axes:
            require(
                name in layout.names or name in buffer_layout.names,
                f"smaller networks of {type(self.module).__name__} would lose a part of {name!r}, which is frozen or not saved: "
                "let it train, or use a method whose clients train the whole model, such as FedAvg.",
            )
        cut = PruningMap.from_plan(layout, buffer_layout, plan)
        params = _mask(layout, cut.positions, device)
        submodel = Submodel(params, _mask(buffer_layout, cut.buffer_positions, device), cut.layout, cut.buffer_layout)
        sent = submodel
        if statistics := self.statistics:
            buffers = submodel.buffers.clone()
            for part in buffer_layout.slices(statistics):
                buffers[part] = False
            sent = Submodel(params, buffers, cut.layout, cut.buffer_layout.without(statistics))
        layers = tuple(self.units.layers) if width.divisor != 1 else ()
        return SmallerNetwork(width, plan, submodel, sent, layers, self._in_steps(width, device))

    def _in_steps(self, width: Width, device: torch.device) -> tuple[Mapping[str, Tensor], ...]:
        """Return `SmallerNetwork.in_steps`, with axes for the pixels that convolutions read."""
        kept, masks = width.units(self.units.blocks), []
        for share in width.in_steps:
            read = self.units.read_by(kept, Width(share).units(self.units.blocks))
            layers = {name: self.module.get_submodule(name) for name in read}
            pixels = {
                name: len(layer.kernel_size) if isinstance(layer, _ConvNd) else 0 for name, layer in layers.items()
            }
            masks.append({name: mask.view(-1, *[1] * pixels[name]).to(device) for name, mask in read.items()})
        return tuple(masks)


def _mask(layout: Layout, positions: Tensor, device: torch.device) -> Tensor:
    return torch.zeros(layout.numel, dtype=torch.bool).index_fill_(0, positions, True).to(device)


def keeps_statistics(part: nn.Module) -> bool:
    """True for a batch normalisation with running statistics."""
    return isinstance(part, _BatchNorm) and part.track_running_stats


def statistics_of(module: nn.Module) -> frozenset[str]:
    """Return the names of the buffers with the statistics of batch normalisations."""
    parts = [(path, part) for path, part in module.named_modules() if keeps_statistics(part)]
    names = (path and f"{path}." for path, _ in parts)
    return frozenset(f"{name}{leaf}" for name in names for leaf in ("running_mean", "running_var"))

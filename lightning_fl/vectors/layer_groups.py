"""Layers of a network: groups of parameters that a method sends, scores or keeps together.

Papers describe layers, PyTorch has tensors. A layer, found from the modules alone, is

- a convolution or linear layer, with the BatchNorm that directly follows it: the next module of the same parent, with as
  many features as the layer has outputs;
- any other module that holds parameters and has no children, for instance a BatchNorm on its own or an embedding;
- a layer with both factors of a LoRA adapter, which only make sense together;
- any other parameter alone, for instance a token that a transformer declares next to its layers.

Parameters without elements are in no layer. Running statistics travel with the layer that they belong to. Where this does not
suit a network, give all groups as a map:

>>> from torch import nn
>>> module = nn.Sequential()
>>> module.conv, module.bn, module.fc = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(32, 10)
>>> print(as_yaml(layer_groups(module)))
conv: [conv.weight, conv.bias, bn.weight, bn.bias]
fc: [fc.weight, fc.bias]
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import zip_longest

import torch
import yaml
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from lightning_fl.errors import nearest, require
from lightning_fl.vectors.layout import Layout

Groups = str | Mapping[str, Sequence[str]]
"""User's choice of groups: `layer`, `tensor`, or a map from the name of each group to its parameters."""
CHOICES = ("layer", "tensor")
FACTORS = {"lora_A", "lora_B"}
"""Children of a layer that `peft` has adapted, whose product counts."""
PARTNERS = {"lora_A": "lora_B", "lora_embedding_A": "lora_embedding_B"}
"""Parts of the names of the factors A and B in `peft`."""


@dataclass(frozen=True)
class Group:
    """Parameters that are sent together, and the running statistics that go with them.

    Attributes:
        name: unique name of the group.
        parameters: names of the parameters.
        buffers: names of the float buffers that travel with them.
        axis: axis that counts the outputs in tensors with two axes or more: 1 in a transposed convolution, else 0.
        kernels: those of the parameters that are weights of convolutions.
    """

    name: str
    parameters: tuple[str, ...]
    buffers: tuple[str, ...] = ()
    axis: int = 0
    kernels: tuple[str, ...] = ()

    def num_units(self, layout: Layout) -> int:
        """Return c_l, the output channels or neurons of the group; 1 if its parameters have different numbers of them."""
        shapes = dict(zip(layout.names, layout.shapes, strict=True))
        counts = {self._outputs(shapes[name]) for name in self.parameters}
        return counts.pop() if len(counts) == 1 else 1

    def by_unit(self, tensor: Tensor, num_units: int) -> Tensor:
        """View a tensor of the group with one unit per row (c_l, …), or whole in one row (1, …)."""
        if self._outputs(tuple(tensor.shape)) != num_units or tensor.dim() == 0:
            return tensor.unsqueeze(0)
        return tensor.movedim(self.unit_axis(tensor.dim()), 0)

    def unit_axis(self, dimensions: int) -> int:
        """Return the axis that counts the units of a tensor with so many axes."""
        return self.axis if dimensions > 1 else 0

    def _outputs(self, shape: tuple[int, ...]) -> int:
        return shape[self.unit_axis(len(shape))] if shape else 1


def layer_groups(
    module: nn.Module, without: Collection[str] = (), frozen_since: Collection[str] = ()
) -> tuple[Group, ...]:
    """Return the layers of `module` in the order of their parameters, except frozen and empty ones and those in `without`.

    Args:
        module: the network.
        without: names of parameters to leave out.
        frozen_since: names of parameters to take although they are frozen.
    """
    named = module.named_parameters()
    taken = [name for name, p in named if (p.requires_grad or name in frozen_since) and p.numel()]
    trainable = [name for name in taken if name not in without]
    positions = {name: position for position, name in enumerate(trainable)}
    free = dict(positions)
    convolutions = [(path, part) for path, part in module.named_modules() if isinstance(part, _ConvNd)]
    kernels = {name for path, part in convolutions for name, p in part.named_parameters(path) if p.dim() > 2}
    free_buffers = {name for name, buffer in module.named_buffers() if buffer.is_floating_point()}
    groups = []
    for name, members in _layers("", module):
        parameters = [n for path, member in members for n, _ in member.named_parameters(path) if n in free]
        buffers = [n for path, member in members for n, _ in member.named_buffers(path) if n in free_buffers]
        if parameters:
            axis = int(isinstance(members[0][1], _ConvTransposeNd))
            weights = tuple(n for n in parameters if n in kernels)
            groups.append(Group(name or "model", tuple(parameters), tuple(buffers), axis, weights))
            for n in parameters:
                del free[n]
            free_buffers -= set(buffers)
    groups += [Group(name, (name,)) for name in free]
    return tuple(sorted(groups, key=lambda group: positions[group.parameters[0]]))


def _layers(path: str, module: nn.Module) -> Iterator[tuple[str, list[tuple[str, nn.Module]]]]:
    """Yield every layer with the modules that form it."""
    children = list(module.named_children())
    if _width(module) is not None or not children or {name for name, _ in children} >= FACTORS:
        yield path, [(path, module)]
        return
    attached = None
    for (name, child), (next_name, following) in zip_longest(children, children[1:], fillvalue=("", None)):
        if child is attached or child is None:
            continue
        inside = f"{path}.{name}" if path else name
        if isinstance(following, _BatchNorm) and following.num_features == _width(child):
            attached = following
            yield inside, [(inside, child), (f"{path}.{next_name}" if path else next_name, following)]
        else:
            yield from _layers(inside, child)


def _width(module: nn.Module) -> int | None:
    """Outputs of a convolution or linear layer; None for any other module."""
    if isinstance(module, _ConvNd):
        return module.out_channels
    return module.out_features if isinstance(module, nn.Linear) else None


def check_groups(asked: Groups) -> None:
    """Raise `UserError` unless `asked` is `layer`, `tensor` or a map; the content of a map is not checked."""
    is_known = isinstance(asked, Mapping) or asked in CHOICES
    require(is_known, f"groups {asked!r} is unknown; {nearest(str(asked), CHOICES)}, or a map of groups.")


def resolve(asked: Groups, layers: Sequence[Group], layout: Layout, buffer_layout: Layout) -> tuple[Group, ...]:
    """Return the groups that a user asks for.

    A buffer in no group of a map travels with the first parameter of its module, or of its layer.

    Args:
        asked: `layer`, `tensor` (every tensor is a group), or a map from group names to names of parameters and buffers.
        layers: layers of the network.
        layout: layout of its parameters.
        buffer_layout: layout of its float buffers.

    Raises:
        UserError: the choice is unknown, or the map does not contain every parameter exactly once.
    """
    check_groups(asked)
    if asked == "layer":
        return tuple(layers)
    names = [name for name, size in zip(layout.names, layout.sizes, strict=True) if size]
    members_by_name = {name: [name] for name in names} if isinstance(asked, str) else asked
    home = _check_map(members_by_name, layout, buffer_layout)
    axes = {name: group.axis for group in layers for name in group.parameters}
    travelling: dict[str, list[str]] = {name: [] for name in members_by_name}
    for buffer in buffer_layout.names:
        owner = buffer.rpartition(".")[0]
        related = [name for name in names if name.rpartition(".")[0] == owner]
        related += [group.parameters[0] for group in layers if buffer in group.buffers]
        if buffer in home or related:
            travelling[home.get(buffer) or home[related[0]]].append(buffer)
    groups = []
    for name, members in members_by_name.items():
        if parameters := tuple(member for member in members if member in names):
            groups.append(Group(name, parameters, tuple(travelling[name]), axes.get(parameters[0], 0)))
    return tuple(groups)


def _check_map(layer_map: Mapping[str, Sequence[str]], layout: Layout, buffer_layout: Layout) -> dict[str, str]:
    """Return the group of every name in the map; raise `UserError` if the map is incomplete or repeats a name."""
    home: dict[str, str] = {}
    names = (*layout.names, *buffer_layout.names)
    for group, members in layer_map.items():
        listed = isinstance(members, (list, tuple)) and bool(members)
        require(listed, f"group {group!r} must list names of parameters, such as [{names[0]}], got {members!r}.")
        for member in members:
            if member not in names:
                require(
                    False, f"group {group!r} names {member!r}, which the model does not train; {_near(member, names)}."
                )
            other = home.setdefault(member, group)
            twice = other != group or list(members).count(member) > 1
            require(not twice, f"groups: {member!r} is in group {other!r} and again in {group!r}: name it once.")
        has_parameters = any(member in layout.names for member in members)
        require(has_parameters, f"group {group!r} holds only buffers: put them with the parameters they belong to.")
    sizes = zip(layout.names, layout.sizes, strict=True)
    missing = [name for name, size in sizes if size and name not in home]
    rest = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    require(
        not missing, f"groups: no group holds {', '.join(map(repr, missing[:1]))}{rest}: every parameter needs a group."
    )
    return home


def _near(name: str, names: Sequence[str]) -> str:
    """Suggest the nearest name alone, as there may be too many names to list."""
    match = get_close_matches(str(name), names, n=1)
    return f"did you mean {match[0]!r}" if match else "print_groups: true prints what it trains"


def as_yaml(groups: Sequence[Group]) -> str:
    """Return groups as the YAML map that the option `groups` accepts."""
    listed = {group.name: list(group.parameters) for group in groups}
    return yaml.safe_dump(listed, sort_keys=False, default_flow_style=None, width=1000).rstrip()


def norms(groups: Sequence[Group], vector: Tensor, layout: Layout) -> Tensor:
    """Return the Euclidean norm (L,) of each group's part of `vector` (d,), in float64, without buffers."""
    views = layout.views(vector)
    lengths = {name: torch.linalg.vector_norm(view, dtype=torch.float64) for name, view in views.items()}
    return torch.stack([torch.stack([lengths[name] for name in group.parameters]).norm() for group in groups])


def factor_pairs(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return the names of LoRA's factors A and B of every layer that `peft` has adapted and of which both are among the names.

    >>> factor_pairs(["c.lora_A.default.weight", "c.lora_B.default.weight", "d.lora_B.default.weight"])
    [('c.lora_A.default.weight', 'c.lora_B.default.weight')]
    """
    rest, pairs = set(names), []
    for name in sorted(rest):
        for a, b in PARTNERS.items():
            partner = f".{name}".replace(f".{a}.", f".{b}.")[1:]
            if partner != name and partner in rest:
                pairs.append((name, partner))
    return pairs

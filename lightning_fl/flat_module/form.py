"""Forms of a module: its shapes, and the flat vectors that store it, so that it can be a smaller network for a while."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_fl.pruning.apply_plan import replace_data

SIZES = (
    "in_channels",
    "out_channels",
    "groups",
    "in_features",
    "out_features",
    "num_features",
    "num_channels",
    "num_groups",
)
"""Attributes of torch's layers that tell the shapes of their tensors."""
SHAPED = (
    "layout",
    "params",
    "gradient",
    "parameters",
    "personal",
    "chains",
    "buffer_layout",
    "buffers",
    "_frozen",
    "trainable",
    "_views",
    "_addresses",
    "_attributes",
    "_buffer_shapes",
    "_shared_buffers",
)
"""Attributes of a flat module that depend on the shapes of its module."""


@dataclass(frozen=True, eq=False)
class Form:
    """Form of the module of a flat module.

    Attributes:
        tensors: data of each parameter and buffer, by name.
        sizes: attributes of layers that tell their sizes.
        attributes: those of the flat module that depend on its shapes.
        optimizer: attributes of the module's optimiser, and the parameters of its groups; None without one.
    """

    tensors: Mapping[str, Tensor]
    sizes: list[tuple[nn.Module, dict[str, int]]]
    attributes: Mapping[str, Any]
    optimizer: tuple[Mapping[str, Any], list[Any]] | None

    @classmethod
    def of(cls, flat_module: Any) -> Form:
        """Return the present form."""
        module, optimizer = flat_module.module, None
        if flat_module.has_optimizer:
            groups = flat_module.optimizer.optimizer.param_groups
            optimizer = dict(vars(flat_module.optimizer)), [group["params"] for group in groups]
        sizes = [(part, {name: vars(part)[name] for name in SIZES if name in vars(part)}) for part in module.modules()]
        return cls(
            {name: tensor.data for name, tensor in (*module.named_parameters(), *module.named_buffers())},
            [(part, own) for part, own in sizes if own],
            {name: vars(flat_module)[name] for name in SHAPED if name in vars(flat_module)},
            optimizer,
        )

    def install(self, flat_module: Any) -> None:
        """Give the module this form again, with the values that it had in it."""
        module = flat_module.module
        for name, parameter in module.named_parameters():
            parameter.grad = None
            replace_data(parameter, self.tensors[name])
        for name, buffer in module.named_buffers():
            buffer.data = self.tensors[name]
        for part, sizes in self.sizes:
            vars(part).update(sizes)
        vars(flat_module).update(self.attributes)
        if self.optimizer is not None:
            attributes, members = self.optimizer
            vars(flat_module.optimizer).update(attributes)
            for group, params in zip(flat_module.optimizer.optimizer.param_groups, members, strict=True):
                group["params"] = params

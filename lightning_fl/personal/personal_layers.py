"""Layers that every client keeps: FedPer (Arivazhagan et al., Federated Learning with Personalization Layers, 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from lightning_fl.errors import nearest, require
from lightning_fl.slots import Owned, Personal


@dataclass(frozen=True)
class PersonalLayers(Personal):
    """Let every client keep layers of its own, which it trains together with the shared ones.

    Attributes:
        names: names of the module's parameters and buffers, or of its parts, such as `network.fc`; a part stands for its
            trained parameters, or for its buffers if it trains none. None: the last trained layer.
    """

    names: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.names is not None:
            object.__setattr__(self, "names", tuple(self.names))

    def owned(self, module: nn.Module) -> Owned:
        """Return the names of the parameters and buffers.

        Raises:
            UserError: no trainable parameter or part, and no buffer, has one of the names.

        >>> network = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2, affine=False), nn.Linear(2, 1))
        >>> sorted(PersonalLayers(["0"]).owned(network).parameters), sorted(PersonalLayers(["0"]).owned(network).buffers)
        (['0.bias', '0.weight'], [])
        >>> sorted(PersonalLayers(["1"]).owned(network).buffers)
        ['1.num_batches_tracked', '1.running_mean', '1.running_var']
        >>> sorted(PersonalLayers().owned(network).parameters)
        ['2.bias', '2.weight']
        """
        trainable = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        names = self.names
        if names is None:
            last = trainable[-1].rpartition(".")[0] or trainable[-1] if trainable else ""
            names = [last] if last else []
        parameters, buffers = set[str](), set[str]()
        for wanted in names:
            matching = [name for name in trainable if name == wanted or name.startswith(f"{wanted}.")]
            parts = {name.rpartition(".")[0] for name in trainable} | set(trainable)
            matching_buffers = _buffers(module, wanted)
            require(
                bool(matching) or bool(matching_buffers),
                f"personal names {wanted!r}, but {type(module).__name__} trains no such part; {nearest(wanted, parts)}.",
            )
            parameters.update(matching)
            buffers.update(matching_buffers)
        return Owned(frozenset(parameters), frozenset(buffers))


def _buffers(module: nn.Module, wanted: str) -> list[str]:
    """Return the buffer of this name, or those of the part of this name unless it trains a parameter."""
    inside = f"{wanted}."
    trains = any(name.startswith(inside) for name, parameter in module.named_parameters() if parameter.requires_grad)
    names = [name for name, _ in module.named_buffers()]
    return [name for name in names if name == wanted or (not trains and name.startswith(inside))]

"""Facts about the network: its layers, its size, the operations of a forward pass."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_fl.data import FederatedDataModule
from lightning_fl.evaluation.macs import count_macs
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.vectors.layer_groups import Group, layer_groups


@dataclass(frozen=True)
class Network:
    """The network that clients and server train.

    Attributes:
        groups: layers, without personal parameters.
        num_parameters: number of all parameters, frozen and personal ones too.
        macs: multiply-accumulates of one sample's forward pass; None if they cannot be counted.
    """

    groups: tuple[Group, ...]
    num_parameters: int
    macs: int | None

    @classmethod
    def of(cls, flat_module: FlatModule, data: FederatedDataModule) -> Network:
        """Return the facts about the module as it is now; its values stay unchanged.

        Args:
            flat_module: holds the module.
            data: source of the sample for a forward pass.
        """
        model = flat_module.params.clone(), flat_module.read_buffers().clone(), flat_module.read_counters()
        macs = None  # of clients with loaders of their own, from which nothing is read beside the training
        if not data.reads_own_loaders:
            macs = count_macs(flat_module, data.client(data.largest_client), data.train.resident)
        flat_module.load(*model)
        return cls(
            groups_of(flat_module), sum(parameter.numel() for parameter in flat_module.module.parameters()), macs
        )


def groups_of(flat_module: FlatModule) -> tuple[Group, ...]:
    """Return the layers of the module, without personal parameters; parameters that it has frozen in the run are still sent."""
    return layer_groups(flat_module.module, flat_module.personal.layout.names, frozen_since=flat_module.layout.names)

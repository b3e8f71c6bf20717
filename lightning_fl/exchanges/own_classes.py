"""Training in which a client's loss sees only the classes of its own samples: the masked cross-entropy of HeteroFL (Diao, Ding
and Tarokh, ICLR 2021).

    z_c ← 0 in training for the classes c of which client k has no sample, z the outputs of the network's last linear layer

So the weights that lead to these outputs get no gradient on the client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from lightning_fl.data import FederatedDataModule
from lightning_fl.errors import require
from lightning_fl.slots import Job, Result

J = TypeVar("J", bound=Job)


def last_linear(module: nn.Module) -> nn.Linear:
    """Return the last linear layer of a module that passes `check_outputs`."""
    return [part for part in module.modules() if isinstance(part, nn.Linear)][-1]


def check_outputs(module: nn.Module, data: FederatedDataModule, method: str, does: str, flag: str) -> None:
    """Check that the outputs of the last linear layer of a module are those of the classes.

    Args:
        module: the network.
        data: samples of the clients.
        method: name of the method, for the sentence.
        does: what the method does with the outputs of classes, for the sentence.
        flag: flag of the method that asks for it.

    Raises:
        UserError: samples have no classes, or the module has no such layer.
    """
    labels = data.train.labels
    require(
        labels is not None and len(labels) > 0,
        f"{method} {does}, and the samples have no classes: leave out {flag}.",
    )
    assert labels is not None
    num_classes = int(labels.max()) + 1
    require(
        any(isinstance(part, nn.Linear) for part in module.modules())
        and last_linear(module).out_features >= num_classes,
        f"{method} {does}, and {type(module).__name__} does not end in a linear layer with an output for each of {num_classes} "
        f"classes: leave out {flag}.",
    )


def train_on_own_classes(
    train: Callable[[J, Sequence[int]], Iterator[Result]],
    module: nn.Module,
    data: FederatedDataModule,
    job: J,
    clients: Sequence[int],
) -> Iterator[Result]:
    """Train clients whose losses see their own classes alone; clients with the same classes train next to each other.

    Args:
        train: trains clients on a job.
        module: the network.
        data: samples of the clients.
        job: job of the clients.
        clients: indices of the clients.
    """
    layer = last_linear(module)
    labels: Any = data.train.labels
    groups: dict[tuple[int, ...], list[int]] = {}
    for client in clients:
        groups.setdefault(tuple(np.unique(labels[data.client_indices[client]]).tolist()), []).append(client)
    for classes, members in groups.items():
        lacks = torch.ones(layer.out_features, dtype=torch.bool)
        lacks[list(classes)] = False
        if not lacks.any():
            yield from train(job, members)
            continue
        handle = layer.register_forward_hook(_Masked(lacks.to(layer.weight.device)))
        try:
            yield from train(job, members)
        finally:
            handle.remove()


class _Masked:
    """Hook of a layer that sets some of its outputs to 0 in training."""

    def __init__(self, lacks: Tensor) -> None:
        self.lacks = lacks

    def __call__(self, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        """Return the outputs (…, c) with 0 where the bools (c,) are True."""
        return output.masked_fill(self.lacks, 0) if layer.training else output

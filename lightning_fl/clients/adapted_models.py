"""Models that clients make from the server's on their own samples to predict with; see `lightning_fl.slots.Personal.adapt`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lightning_fl.checks.evaluation_mode import evaluating, keeping_attributes
from lightning_fl.data import FederatedDataModule
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.slots import Personal


@contextmanager
def adapted_model(flat_module: FlatModule, part: Personal, data: FederatedDataModule, client: int) -> Iterator[None]:
    """Load what a client makes of the model in the module, and load that again at the end.

    The gradient is that of the client's first minibatch, in the stored order and without augmentation, in training mode. Nothing
    else changes: random generators, attributes of the module and what it logs are afterwards what they were. A client without
    samples predicts with the model as it is.
    """
    content = next(iter(data.client(client).batches(data.batch_size)), None)
    if content is None:
        yield
        return
    params, buffers, counters = (
        flat_module.params.clone(),
        flat_module.read_buffers().clone(),
        flat_module.read_counters(),
    )

    def gradient(at: Tensor) -> Tensor:
        nonlocal buffers, counters
        module = flat_module.module
        with (
            flat_module.other_model(at, buffers, counters),
            isolate_rng(),
            keeping_attributes(list(module.modules())),
            evaluating(module),
            torch.enable_grad(),
            flat_module.lending({}, _drop),
        ):
            flat_module.seed(client)  # so that it does not matter which process measures the client
            module.train()
            with flat_module.fabric.strategy.precision.forward_context():
                loss, _ = flat_module.training_step(flat_module.transfer(content, data.train.resident), 0)
            found = gradient_of(flat_module, loss)
            buffers, counters = flat_module.read_buffers().clone(), flat_module.read_counters()
        return found

    adapted = part.adapt(params, gradient)
    with flat_module.other_model(adapted, buffers, counters):
        yield


def gradient_of(flat_module: FlatModule, loss: Tensor | None) -> Tensor:
    """Return the gradient (d,) of a loss by the module's parameters; 0 where it has none."""
    parameters = dict(zip(flat_module.layout.names, flat_module.parameters, strict=True))
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    found: dict[str, Tensor | None] = dict.fromkeys(parameters)
    if loss is not None and loss.requires_grad:
        gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        found |= dict(zip(trained, gradients, strict=True))
    views = {name: torch.zeros_like(parameters[name]) if x is None else x for name, x in found.items()}
    return flat_module.layout.flatten(views)


def _drop(*arguments: Any, **options: Any) -> None:
    """Replace the module's `log`, and drop the values."""

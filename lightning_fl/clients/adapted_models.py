"""Models that clients adapt to their own samples before they predict; see `lightning_fl.slots.Personal.adapt`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lightning_fl.checks.evaluation_mode import evaluating, keeping_attributes
from lightning_fl.clients.gradients import full_loss
from lightning_fl.data import FederatedDataModule
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.slots import Message, Personal


class ClientSamples:
    """Implementation of `lightning_fl.slots.OwnSamples`, while the module holds the server's model.

    Attributes:
        shared: entries that the server's steps send down with the model.
        buffers: float buffers (d_b,) after the last gradient.
        counters: integer buffers by name, likewise.
    """

    def __init__(self, flat_module: FlatModule, data: FederatedDataModule, client: int, shared: Message) -> None:
        self._flat_module, self._data, self._client, self.shared = flat_module, data, client, shared
        self.buffers, self.counters = flat_module.read_buffers().clone(), flat_module.read_counters()

    def gradient(self, params: Tensor) -> Tensor:
        """Return the gradient of the first minibatch, in the stored order and without augmentation.

        Restores random generators and attributes of the module. Values that it logs are dropped.
        """
        flat_module, data, module = self._flat_module, self._data, self._flat_module.module
        content = next(iter(data.client(self._client).batches(data.batch_size)))
        with (
            flat_module.other_model(params, self.buffers, self.counters),
            isolate_rng(),
            keeping_attributes(list(module.modules())),
            evaluating(module),
            torch.enable_grad(),
            flat_module.dropping_logs(),
        ):
            flat_module.generators.seed(self._client)  # so that it does not matter which process measures the client
            module.train()
            with flat_module.fabric.autocast():
                loss, _ = flat_module.training_step(flat_module.transfer(content, data.train.resident), 0)
            found = gradient_of(flat_module, loss)
            self.buffers, self.counters = flat_module.read_buffers().clone(), flat_module.read_counters()
        return found

    def loss(self, params: Tensor) -> Tensor:
        """Return the mean loss on all samples."""
        flat_module, data, samples = self._flat_module, self._data, self._data.client(self._client)
        size = data.batch_size
        sizes = [min(size, len(samples) - start) for start in range(0, len(samples), size)]
        with flat_module.other_model(params, self.buffers, self.counters), isolate_rng():
            return full_loss(flat_module, samples.batches(size), sizes, data.train.resident)


@contextmanager
def adapted_model(
    flat_module: FlatModule, part: Personal, data: FederatedDataModule, client: int, shared: Message
) -> Iterator[None]:
    """Load a client's adaptation of the model in the module, and restore that model at the end.

    A client without samples predicts with the model as it is.
    """
    if not data.client_sizes[client]:
        yield
        return
    own = ClientSamples(flat_module, data, client, shared)
    adapted = part.adapt(flat_module.params.clone(), own)
    with flat_module.other_model(adapted, own.buffers, own.counters):
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

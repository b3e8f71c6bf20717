"""The one working module of a process: its parameters are views of flat vectors, so that every client is one copy away."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from lightning_fl.errors import UserError
from lightning_fl.hooks import Hooks
from lightning_fl.logs import LogCollector
from lightning_fl.optimization import ModuleOptimizer
from lightning_fl.tree import Layout, common_dtype


class Worker:
    """A LightningModule bound to flat storage.

    Attributes:
        module: the module, on the accelerator.
        fabric: for precision, autocast and backward.
        hooks: who listens to which Lightning hook.
        logs: what the module logs goes here.
        layout: where each trainable parameter lies.
        params: parameters (d,); the module's own are views of it.
        gradient: gradient (d,) of the last backward pass, where the rule reads it.
        buffer_layout, buffers: likewise for float buffers (d_b,).
        counters: the module's integer buffers, by name.
        optimizer: drives the module's optimiser; set by `configure_optimizer`.
        takes_index: whether `training_step` asks for the batch's index.
        skips_single_samples: whether a last batch of one sample is left out.
        batches_in_pass, steps_in_training: of the local training under way, for schedules that ask the trainer.
    """

    optimizer: ModuleOptimizer

    def __init__(self, module: LightningModule, fabric: Fabric, hooks: Hooks, channels_last: bool) -> None:
        self.module = module
        self.fabric = fabric
        self.hooks = hooks
        self.logs = LogCollector()
        trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        dtype = common_dtype(trainable)
        self.layout = Layout.of(trainable, channels_last)
        self.params = self.layout.flatten(
            {name: parameter.detach() for name, parameter in trainable.items()},
            torch.empty(self.layout.numel, dtype=dtype, device=fabric.device),
        )
        self.gradient = torch.zeros(0, dtype=dtype, device=fabric.device)
        self._parameters = list(trainable.values())
        for parameter, view in zip(self._parameters, self.layout.views(self.params).values(), strict=True):
            parameter.data = view

        buffers = {name: buffer for name, buffer in module.named_buffers() if buffer.is_floating_point()}
        self.counters = {name: buffer for name, buffer in module.named_buffers() if not buffer.is_floating_point()}
        self.buffer_layout = Layout.of(buffers)
        widest = dtype
        for buffer in buffers.values():
            widest = torch.promote_types(widest, buffer.dtype)
        self.buffers = self.buffer_layout.flatten(
            buffers, torch.empty(self.buffer_layout.numel, dtype=widest, device=fabric.device)
        )
        self._buffer_views = self.buffer_layout.views(self.buffers)
        self._buffer_homes = {name: _home(module, name) for name in buffers}
        for name, buffer in buffers.items():
            if buffer.dtype == widest:
                buffer.data = self._buffer_views[name]
        self.takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        self.batches_in_pass = 0
        self.steps_in_training = 0
        # A batch of one has no variance: batch normalisation refuses to train on it.
        self.skips_single_samples = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules())

    def configure_optimizer(self, flat_gradient: bool) -> None:
        """Set up the module's optimiser; with `flat_gradient` every gradient is a view of `gradient`.

        Raises:
            UserError: the module has nothing to train, or not one optimiser.
        """
        if not self._parameters:
            raise UserError(f"{type(self.module).__name__} has no trainable parameter: there is nothing to federate.")
        self._gradient_views: list[Tensor] = []
        if flat_gradient:
            self.gradient = torch.zeros_like(self.params)
            self._gradient_views = list(self.layout.views(self.gradient).values())
        self.zero_gradient()
        self.optimizer = ModuleOptimizer(self.module, self.layout, self.params, self.gradient, flat_gradient)

    @property
    def has_optimizer(self) -> bool:
        """Whether `configure_optimizer` has been called."""
        return hasattr(self, "optimizer")

    def release(self) -> None:
        """Give the module tensors of its own again, with the values it has now."""
        for parameter in self._parameters:
            parameter.grad = None
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
        for owner, leaf in self._buffer_homes.values():
            getattr(owner, leaf).data = getattr(owner, leaf).data.clone()

    def load(self, params: Tensor, buffers: Tensor, counters: dict[str, Tensor]) -> None:
        """Put a model into the module: one copy of the parameters, one of the float buffers."""
        self.params.copy_(params)
        if self.buffer_layout.names:
            self.buffers.copy_(buffers)
            for name, (owner, leaf) in self._buffer_homes.items():
                buffer = getattr(owner, leaf)
                if buffer.data_ptr() != self._buffer_views[name].data_ptr():
                    buffer.copy_(self._buffer_views[name])
        for name, buffer in self.counters.items():
            buffer.copy_(counters[name])

    def read_buffers(self) -> Tensor:
        """The module's float buffers (d_b,), also those that it replaced instead of writing to."""
        for name, (owner, leaf) in self._buffer_homes.items():
            buffer = getattr(owner, leaf)
            if buffer.data_ptr() != self._buffer_views[name].data_ptr():
                self._buffer_views[name].copy_(buffer)
        return self.buffers

    def zero_gradient(self) -> None:
        """Forget the gradient of the last step; views of the flat gradient are put back where something removed them."""
        if not self._gradient_views:
            for parameter in self._parameters:
                parameter.grad = None
            return
        self.gradient.zero_()
        if self._parameters[0].grad is not self._gradient_views[0]:
            for parameter, view in zip(self._parameters, self._gradient_views, strict=True):
                parameter.grad = view

    def clip_gradient(self, value: float, algorithm: str) -> None:
        """Clip in place, as Lightning's `gradient_clip_val` and `gradient_clip_algorithm` say."""
        if algorithm == "value":
            nn.utils.clip_grad_value_(self._parameters, value)
        else:
            nn.utils.clip_grad_norm_(self._parameters, value)

    def transfer(self, batch: Any, resident: bool) -> Any:
        """Bring a batch to the accelerator, where a resident one already is, and let the batch hooks change it."""
        if resident and not self.hooks.changes_batches:
            return batch
        return self.hooks.transfer_batch(batch, self.fabric.device)

    def seed(self, seed: int) -> None:
        """Seed every global random generator a module may draw from, so that what it draws depends on `seed` alone."""
        torch.default_generator.manual_seed(seed)
        if self.fabric.device.type == "cuda":
            torch.cuda.default_generators[self.fabric.device.index or 0].manual_seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002 -- modules and transforms draw from the global one
        random.seed(seed)


def _home(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf

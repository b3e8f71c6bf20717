"""Lightning's strategy of one device, whose processes and collectives are Fabric's.

Fabric launches the processes of a run and distributes the clients over them. A trainer never wraps its module, because DDP
would average gradients of different clients.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.optim import Optimizer

from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.flat_module.hooks import Hooks
from lightning_fl.flat_module.optimizers.manual_optimizers import ManualOptimizers
from lightning_fl.flat_module.optimizers.module_optimizer import ModuleOptimizer

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "64-true")
"""Precisions of a federation."""


class FabricStrategy(SingleDeviceStrategy):
    """One device for each process of Fabric; ranks, barriers and reductions are those of all processes.

    Attributes:
        fabric: Fabric, which has launched the processes.
        hooks: calls the hooks of a backward pass that the module makes itself; set when a session begins.
        by_lightning: True if Lightning's own loop trains the clients of a fit.
    """

    strategy_name = "fabric"
    hooks: Hooks
    by_lightning = False

    def __init__(self, fabric: Fabric) -> None:
        super().__init__(device=fabric.device)
        self.fabric = fabric
        self.global_rank, self.local_rank = fabric.global_rank, fabric.local_rank
        self.world_size, self.node_rank = fabric.world_size, fabric.node_rank
        self.num_nodes = getattr(fabric.strategy, "num_nodes", 1)
        self.checkpoint_io = fabric.strategy.checkpoint_io

    @property
    def is_global_zero(self) -> bool:
        """True in the process that writes the files of the run."""
        return self.fabric.is_global_zero

    def barrier(self, *arguments: Any, **options: Any) -> None:
        """Wait for all processes."""
        self.fabric.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of process `src`."""
        return self.fabric.broadcast(obj, src)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the tensors of all processes, stacked along a new first axis if there are several."""
        return self.fabric.all_gather(tensor, group=group, sync_grads=sync_grads)  # type: ignore[return-value]

    def reduce(self, tensor: Any, *arguments: Any, **options: Any) -> Any:
        """Return the mean over processes, or the reduction given as `reduce_op`."""
        return self.fabric.all_reduce(tensor, reduce_op=options.get("reduce_op") or "mean")

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """True if `decision` is true in all processes, or in any if `all` is False."""
        votes = self.fabric.all_reduce(torch.tensor(int(decision), device=self.root_device), reduce_op="sum")
        return int(votes) == self.world_size if all else int(votes) > 0  # type: ignore[arg-type]

    def validation_step(self, *arguments: Any, **named: Any) -> Any:
        """Return what the module's `validation_step` returns, by a compiled graph if the run asks for it."""
        with self.precision_plugin.val_step_context():
            return self._flat_module.evaluation_step("validation_step", *arguments, **named)

    def test_step(self, *arguments: Any, **named: Any) -> Any:
        """Return what the module's `test_step` returns, by a compiled graph if the run asks for it."""
        with self.precision_plugin.test_step_context():
            return self._flat_module.evaluation_step("test_step", *arguments, **named)

    @property
    def _flat_module(self) -> FlatModule:
        trainer: Any = self.lightning_module.trainer  # type: ignore[union-attr]
        flat_module: FlatModule = trainer.active_module
        return flat_module

    def _backward_of_fabric(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *arguments: Any, **options: Any
    ) -> Tensor:
        """Make a backward pass of a module that makes its steps itself, with its hooks."""
        self.hooks.call("on_before_backward", closure_loss)
        self.fabric.backward(closure_loss, *arguments, **options)
        self.hooks.call("on_after_backward")
        return closure_loss

    def adopt(self, optimizer: ModuleOptimizer | ManualOptimizers | None) -> None:
        """Show the module's optimisers, and schedulers, which all clients share; none for None."""
        self.optimizers = [] if optimizer is None else list(optimizer.optimizers)
        vars(self).pop("backward", None)
        if isinstance(optimizer, ManualOptimizers):
            if not self.by_lightning:  # whose own loop makes Lightning's backward passes
                self.backward = self._backward_of_fabric  # type: ignore[method-assign]
            self._lightning_optimizers = list(optimizer.wrapped)  # which count the steps of a client
        self.lr_scheduler_configs = [] if optimizer is None else optimizer.schedules.configs

    def follow_replaced(self, optimizer: ModuleOptimizer | ManualOptimizers) -> None:
        """Let the clients' optimiser follow one that a hook has put in its place, as `setup_optimizers` does.

        Raises:
            UserError: it cannot.
        """
        is_same = list(map(id, self.optimizers)) == list(map(id, optimizer.optimizers))
        if not is_same or self.lr_scheduler_configs != optimizer.schedules.configs:
            optimizer.follow_replaced(self.optimizers, self.lr_scheduler_configs)
            self.adopt(optimizer)


def lightning_flags(fabric: Fabric) -> dict[str, Any]:
    """Return the flags with which Lightning's trainer runs in the processes of `fabric` and adds nothing of its own to a run."""
    device, precision = fabric.device, str(fabric.strategy.precision.precision)
    is_cuda = device.type == "cuda"
    return {
        "strategy": FabricStrategy(fabric),
        "accelerator": "cuda" if is_cuda else "cpu",  # the strategy knows other devices
        "devices": [device.index] if is_cuda and device.index is not None else 1,
        "precision": precision if precision in PRECISIONS else "32-true",
        "use_distributed_sampler": False,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }

"""A federation follows a structured pruning of its module, whoever made it.

Callbacks cut the module in place (`lightning_fl.pruning.prune`) and know nothing of federations. Everything that has the shape
of parameters or buffers then follows by the same lists of places (`lightning_fl.cut`): the server's model and its steps' states,
what all clients keep, the memory of the codecs on both sides. The module is laid out anew, layers and multiply-accumulates are
found again, and the method says what crosses because of it (`Algorithm.announce`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.fabric import Fabric
from torch import nn

from lightning_fl.errors import UserError
from lightning_fl.federation import Federation
from lightning_fl.groups import layer_groups
from lightning_fl.macs import count_macs
from lightning_fl.pruning import Plan, plans_of, prune
from lightning_fl.runners.ranks import gather_objects
from lightning_fl.worker import Worker

PLANS = "pruning_plans"
"""Key of a checkpoint whose model has been pruned: all that was done to the dense network, in its order."""


def follow(federation: Federation) -> None:
    """Make the federation follow where callbacks have pruned the module since the last call.

    Raises:
        UserError: processes have pruned it differently.
    """
    worker, run = federation.worker, federation.run
    plans = worker.new_plans
    _check_agreement(worker.fabric, plans)
    if not plans:
        return
    for plan in plans:
        if plan.axes:
            federation.announce(plan)
            run.surgery(plan)
    worker.fabric.barrier()  # where states are files that one process of a machine writes, they are there for all
    worker.lay_out_anew()
    _look_again(federation)


def rebuild(federation: Federation, plans: Sequence[Plan]) -> None:
    """Prune the module as that of the run that is taken up, which has been cut already."""
    if plans:
        prune_bound(federation.worker, plans)
        _look_again(federation)


def prune_bound(worker: Worker, plans: Sequence[Plan]) -> None:
    """Prune a module that is bound to flat storage, and bind it anew."""
    optimizers = [worker.optimizer.optimizer] if worker.has_optimizer else []
    for plan in plans:
        prune(worker.module, plan, optimizers)
    worker.lay_out_anew()


def _look_again(federation: Federation) -> None:
    """Find out what the federation knows of the module."""
    worker, data = federation.worker, federation.data
    model = worker.params.clone(), worker.read_buffers().clone(), worker.read_counters()
    federation.groups = layer_groups(worker.module)
    federation.macs = count_macs(worker, data.client(int(data.client_sizes.argmax())), data.train.resident)
    worker.load(*model)


def as_saved(module: nn.Module) -> list[dict[str, Any]]:
    """The plans that a module has been cut down to, in plain containers, for a checkpoint."""
    return [dict(vars(plan)) for plan in plans_of(module)]


def missing_plans(module: nn.Module, checkpoint: dict[str, Any]) -> list[Plan]:
    """What has still to be done to a module before it has the shapes of a checkpoint's; nothing if it would not help.

    Raises:
        UserError: the module has been pruned further.
    """
    saved, done = [Plan(**plain) for plain in checkpoint.get(PLANS, [])], len(plans_of(module))
    wanted = {name: tuple(x.shape) for name, x in checkpoint["state_dict"].items()}
    shapes = {name: tuple(x.shape) for name, x in module.state_dict().items()}
    if shapes == wanted:
        return []
    if done > len(saved):
        raise UserError(
            f"{type(module).__name__} has been pruned since the checkpoint was written, which cannot be undone: "
            "give a new one."
        )
    missing = saved[done:]
    for plan in missing:
        shapes = {name: _cut_shape(name, shape, plan) for name, shape in shapes.items()}
    return missing if shapes == wanted else []


def _cut_shape(name: str, shape: tuple[int, ...], plan: Plan) -> tuple[int, ...]:
    """The shape that a plan leaves of a tensor; () if the plan is not for it."""
    sizes = list(shape)
    for axis, kept in plan.axes.get(name, {}).items():
        if axis >= len(sizes) or int(kept.max()) >= sizes[axis]:
            return ()
        sizes[axis] = len(kept)
    return tuple(sizes)


def _check_agreement(fabric: Fabric, plans: Sequence[Plan]) -> None:
    """Raise `UserError` unless all processes have pruned their modules alike."""
    if fabric.world_size == 1:
        return
    kept = [
        {name: {axis: x.tolist() for axis, x in axes.items()} for name, axes in plan.axes.items()} for plan in plans
    ]
    if any(theirs != kept for theirs in gather_objects(fabric, kept)):
        raise UserError(
            "the processes have pruned their models differently: what a callback prunes must be the same in each, so it must "
            "not depend on a random number or on samples that only one of them has seen."
        )

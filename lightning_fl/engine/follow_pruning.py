"""Adapt a federation to structured pruning of its module by callbacks.

Callbacks prune the module in place (`lightning_fl.pruning.prune`), independently of federations. Everything that has the shape
of parameters or buffers is then pruned by the same lists of positions (`lightning_fl.vectors.pruning_map`): the server's model
and its steps' states, all clients' states, the memory of the codecs on both sides. The module is laid out again, its layers and
multiply-accumulates are determined again, and the method sends the messages that follow (`Algorithm.broadcast_pruning`).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from lightning_fl.algorithms import Algorithm
from lightning_fl.engine.between_rounds import broadcast_pruning
from lightning_fl.engine.engine import Engine
from lightning_fl.errors import require
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.processes import check_agreement, gather_objects
from lightning_fl.pruning import Plan, plans_of, prune
from lightning_fl.pruning.apply_plan import PLANS


def follow(engine: Engine) -> None:
    """Adapt the federation to callbacks' prunings of the module since the last call.

    Raises:
        UserError: a personal parameter or a step's state cannot follow, or processes, whose clients' states are in files, have
            pruned it differently; without files the next exchange of the round says so.
    """
    flat_module, run = engine.flat_module, engine.run
    plans, fabric = flat_module.new_plans, flat_module.fabric
    engine.prunings = _checksum(plans, engine.prunings)
    if run.keeps_files and fabric.world_size > 1:
        # Before the processes wait for each other below; otherwise the next exchange checks it.
        check_agreement(gather_objects(fabric, engine.prunings))
    if not plans:
        return
    require_prunable(engine.algorithm, "a callback")
    for name in (*flat_module.personal.leaves, *flat_module.personal.buffers.views):
        require(
            all(name not in plan.axes for plan in plans),
            f"pruning would cut {name!r}, which is personal to each client: prune other layers, or do not make it personal.",
        )
    for plan in plans:
        broadcast_pruning(engine, plan)
        if plan.axes:
            run.prune(plan)
    if run.keeps_files:
        fabric.barrier()  # wait: one process of a machine writes the state files that the others read
    flat_module.lay_out_anew()
    engine.refresh_network()


def require_prunable(algorithm: Algorithm, callback: str) -> None:
    """Raise `UserError` if a callback would remove filters, and the state of a server step cannot follow."""
    algorithm.check_pruning(callback)
    for step in algorithm.steps:
        require(
            all(inner.follows_pruning for inner in step.steps()),
            f"{callback} would remove filters, but {step!r} keeps numbers for rows or columns of the weights, which cannot "
            "follow: use another server optimiser, such as Adam, or no pruning.",
        )


def as_saved(module: nn.Module) -> dict[str, Any]:
    """Return the prunings of a module as a checkpoint's entry; {} if it is dense."""
    plans = plans_of(module)
    return {PLANS: [dict(vars(plan)) for plan in plans]} if plans else {}


def rebuild(engine: Engine, checkpoint: dict[str, Any]) -> None:
    """Prune module and run as in a checkpoint, and load the checkpoint's run.

    Raises:
        UserError: the checkpoint does not fit; the module is unchanged.
    """
    flat_module, run = engine.flat_module, engine.run
    plans = missing_plans(flat_module.module, checkpoint)
    for plan in plans:
        run.prune(plan)
    run.load_state_dict(checkpoint["federation"]["run"])
    if plans:
        prune_bound(flat_module, plans)
        engine.refresh_network()
    elif PLANS in checkpoint:
        flat_module.adopt_plans(_saved_plans(checkpoint))


def prune_bound(flat_module: FlatModule, plans: Sequence[Plan]) -> None:
    """Prune a module that is bound to flat storage, and bind it again."""
    optimizers = flat_module.optimizer.optimizers if flat_module.has_optimizer else []
    for plan in plans:
        prune(flat_module.module, plan, optimizers)
    flat_module.lay_out_anew()


def missing_plans(module: nn.Module, checkpoint: dict[str, Any]) -> list[Plan]:
    """Return the prunings that a module lacks for the shapes of a checkpoint; [] if it has them or these would not suffice.

    Raises:
        UserError: the module is pruned further than the checkpoint's.
    """
    wanted, shapes = _shapes(checkpoint["state_dict"]), _shapes(module.state_dict())
    if shapes == wanted:
        return []
    saved, present = _saved_plans(checkpoint), len(plans_of(module))
    name = type(module).__name__
    require(
        present <= len(saved),
        f"this {name} is pruned further than the model of the checkpoint, and what is pruned does not come back: give a new "
        f"{name}.",
    )
    missing = saved[present:]
    first_names = _first_names(module)
    for plan in missing:
        shapes = {name: _cut_shape(first_names.get(name, name), shape, plan) for name, shape in shapes.items()}
    return missing if shapes == wanted else []


def _first_names(module: nn.Module) -> dict[str, str]:
    """Return the first name, which plans use, of each parameter and buffer; tied ones have several."""
    firsts: dict[int, str] = {}
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: firsts.setdefault(id(tensor), name) for name, tensor in named}


def _saved_plans(checkpoint: dict[str, Any]) -> list[Plan]:
    return [Plan(**plain) for plain in checkpoint.get(PLANS, [])]


def _shapes(state_dict: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in state_dict.items() if isinstance(x, Tensor)}


def _cut_shape(name: str, shape: tuple[int, ...], plan: Plan) -> tuple[int, ...]:
    """Return the shape of a tensor after a plan; () if the plan does not fit it."""
    sizes = list(shape)
    for axis, indices in plan.axes.get(name, {}).items():
        if axis >= len(sizes) or int(indices.max()) >= sizes[axis]:
            return ()
        sizes[axis] = len(indices)
    return tuple(sizes)


def _checksum(plans: Sequence[Plan], earlier: int) -> int:
    """Return the checksum of the earlier prunings and of these."""
    for plan in plans:
        axes_of_tensors = {name: {axis: x.tolist() for axis, x in axes.items()} for name, axes in plan.axes.items()}
        earlier = zlib.crc32(repr(axes_of_tensors).encode(), earlier)
    return earlier

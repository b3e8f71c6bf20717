"""Adapt a federation to callbacks and hooks that let more of its module train, as Lightning's BaseFinetuning does.

Between rounds they set `requires_grad` of frozen parameters, and may add groups to the optimiser. Clients train and send the new
parameters from the next round on, beginning with their present values, which all clients have. So everything that has the shape
of the parameters grows (`lightning_fl.vectors.growth`): the server's model and its steps' states, all clients' states, the memory
of the codecs. A parameter that is frozen again stays in the messages.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

from torch import nn

from lightning_fl.engine.engine import Engine
from lightning_fl.engine.network import groups_of
from lightning_fl.errors import require
from lightning_fl.flat_module.flat_module import FlatModule

KEY = "trainable"
"""Key in the saved learning rates of a run."""


def follow(engine: Engine) -> bool:
    """Adapt the federation to what callbacks and hooks have unfrozen, and to their groups of the optimiser, since the last call.

    Returns:
        True if clients train more parameters than before.

    Raises:
        UserError: an unfrozen parameter is personal to each client, or a state cannot follow.
    """
    flat_module, run, method = engine.flat_module, engine.run, engine.algorithm
    unfrozen = flat_module.unfrozen
    if not unfrozen and not flat_module.optimizer.has_other_groups:
        return False
    what = f"lets {unfrozen[0]} train" if unfrozen else "changes the groups of the optimizer"
    require(
        method.pace is None,
        f"a callback or hook {what} in the middle of the run, and clients of {method.name} train on earlier models: use a method "
        "whose rounds wait for their clients, such as FedAvg.",
    )
    personal = method.owned(flat_module.module).parameters
    for name in unfrozen:
        require(
            name not in personal,
            f"a callback or hook lets {name} train in the middle of the run, but it is personal to each client, and their states "
            "lack it: set requires_grad in __init__ or configure_model, or do not make it personal.",
        )
    flat_module.lay_out_anew(unfrozen)
    if not unfrozen:
        return False
    engine.prunings = zlib.crc32(repr(unfrozen).encode(), engine.prunings)
    steps = dict(zip(method.step_names(), method.steps, strict=True))
    run.grow(flat_module.layout, flat_module.params, method.rule, steps, method.name)
    if run.keeps_files:
        flat_module.fabric.barrier()  # wait: one process of a machine writes the state files that the others read
    engine.network = replace(engine.network, groups=groups_of(flat_module))
    method.check(engine.context, engine.server_side(), engine.population.cohort_size)
    return True


def as_saved(flat_module: FlatModule) -> dict[str, Any]:
    """Return which parameters train, and in which groups, to be saved with the rates; {} if that is as in the beginning."""
    optimizer = flat_module.optimizer
    trained = flat_module.trained_names
    if trained == flat_module.trained_at_first and optimizer.group_names == optimizer.groups_at_first:
        return {}
    statistics = {name: part.track_running_stats for name, part in _norms(flat_module.module)}
    entry = {
        "names": sorted(trained),
        "layout": list(flat_module.layout.names),
        "groups": optimizer.group_names,
        "track_running_stats": statistics,
    }
    return {KEY: entry}


def rebuild(flat_module: FlatModule, saved: dict[str, Any], engine: Engine | None = None) -> None:
    """Let what trained in a saved run train in the module, and in the run that goes on, if there is one.

    Args:
        flat_module: holds the module.
        saved: the run's learning rates, with what `as_saved` returned.
        engine: engine of the run, before it is loaded.

    Raises:
        UserError: a state cannot follow.
    """
    if KEY not in saved:
        return
    entry, module = saved[KEY], flat_module.module
    for name, part in _norms(module):
        part.track_running_stats = entry["track_running_stats"].get(name, part.track_running_stats)
    parameters = dict(module.named_parameters())
    trained, sent = set(entry["names"]), set(entry["layout"])
    for name, parameter in parameters.items():
        parameter.requires_grad = name in trained | sent
    if flat_module.has_optimizer:
        flat_module.optimizer.set_groups([[[parameters[n] for n in group] for group in one] for one in entry["groups"]])
    if engine is None:
        flat_module.lay_out_anew(flat_module.unfrozen)
    else:
        follow(engine)
    for name in sent - trained:
        parameters[name].requires_grad = False


def _norms(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the layers of which Lightning's callbacks switch the running statistics off while they are frozen, by name."""
    return [(name, part) for name, part in module.named_modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]

"""Adapt a federation to `torch.nn.utils.prune`, by which Lightning's ModelPruning prunes the server's model between rounds.

torch keeps the parameter of a pruned `weight` as `weight_orig`, adds a buffer `weight_mask`, and computes `weight` from both
before each forward. The parameter is the same object, so the federation goes on training and sending it under its first name,
under the mask (`Run.set_mask`). The module's masks are the server's: clients train under them, and nothing averages them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelPruning
from torch import nn
from torch.nn.utils import prune

from lightning_fl.checks import is_a
from lightning_fl.engine.engine import Engine
from lightning_fl.errors import require
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.pruning import Masks
from lightning_fl.state.run_state import PRUNING

KEY = "torch_pruning"
"""Key in the federation of a checkpoint."""


def masks_of(flat_module: FlatModule) -> Masks:
    """Return the masks of torch's prunings of trained parameters, by the names of the layout.

    Raises:
        UserError: a pruned parameter is personal to each client, or belongs to several layers.
    """
    names = dict(zip(flat_module.parameters, flat_module.layout.names, strict=True))
    personal = {parameter: name for name, parameter in flat_module.personal.leaves.items()}
    masks: Masks = {}
    for _, part, leaf in _pruned(flat_module.module):
        parameter = part.get_parameter(f"{leaf}_orig")
        require(
            parameter not in personal,
            f"ModelPruning prunes {personal.get(parameter)!r}, which is personal to each client, by the server's values: name "
            "others in parameters_to_prune.",
        )
        if parameter in names:
            name = names[parameter]
            require(
                len(flat_module.holders(name)) == 1,
                f"ModelPruning prunes {name!r}, which several layers share, for one of them: name others in parameters_to_prune.",
            )
            masks[name] = part.get_buffer(f"{leaf}_mask").bool()
    return masks


@torch.no_grad()
def begin(engine: Engine) -> None:
    """Let callbacks prune the server's model, by random numbers that are the same in all processes."""
    engine.flat_module.generators.seed(engine.run.torch_seeds(PRUNING)[0])
    for _, part, leaf in _pruned(engine.flat_module.module):
        setattr(part, leaf, part.get_buffer(f"{leaf}_mask") * part.get_parameter(f"{leaf}_orig"))


def as_saved(module: LightningModule, callbacks: Iterable[Callback]) -> dict[str, Any]:
    """Return torch's prunings, and the first values to which ModelPruning resets weights, to be saved; {} if there are none."""
    masks = {f"{path}.{leaf}": part.get_buffer(f"{leaf}_mask").clone() for path, part, leaf in _pruned(module)}
    first = {name: getattr(layer, leaf).detach().clone() for name, leaf, layer in _first_layers(module, callbacks)}
    return {KEY: {"masks": masks, "first": first}} if masks or first else {}


def without_masks(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the weights of a checkpoint under the names of the module before it was pruned.

    A checkpoint within a round may have masks that its run lacks, which a callback has made after the round's training.
    """
    state = dict(state_dict)
    for name in [name.removesuffix("_orig") for name in state if name.endswith("_orig")]:
        if f"{name}_mask" in state:  # else `make_pruning_permanent` has done it
            state[name] = state.pop(f"{name}_orig") * state.pop(f"{name}_mask")
    return state


def rebuild(module: LightningModule, callbacks: Iterable[Callback], saved: dict[str, Any]) -> None:
    """Prune a module as in a checkpoint, and let ModelPruning reset weights to the values of the saved run."""
    entry = saved.get(KEY, {"masks": {}, "first": {}})
    for name, leaf, layer in _first_layers(module, callbacks):
        getattr(layer, leaf).data = entry["first"][name]
    for name, mask in entry["masks"].items():
        path, _, leaf = name.rpartition(".")
        part = module.get_submodule(path)
        prune.custom_from_mask(part, leaf, mask.to(part.get_parameter(leaf).device))


def _pruned(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield the layers that torch has pruned: path, layer, and first name of the parameter within it."""
    for path, part in module.named_modules():
        for name in list(part._parameters):
            leaf = name.removesuffix("_orig")
            if leaf != name and f"{leaf}_mask" in part._buffers:
                yield path, part, leaf


def _first_layers(module: nn.Module, callbacks: Iterable[Callback]) -> Iterator[tuple[str, str, Any]]:
    """Yield what ModelPruning resets: the parameter's name, its name in the layer, and the layer's copy with the first value."""
    paths = {part: path for path, part in module.named_modules()}
    for callback in callbacks:
        if is_a(callback, ModelPruning):
            pruning: Any = callback
            for layer in (pruning._original_layers or {}).values():
                for index, leaf in layer["names"]:
                    yield f"{paths[pruning._parameters_to_prune[index][0]]}.{leaf}", leaf, layer["data"]

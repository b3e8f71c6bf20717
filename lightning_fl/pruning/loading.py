"""Loading what has been pruned: a module takes on the shapes of the weights that come in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from lightning_fl.pruning.apply_plan import PLANS, plans_of, replace_data, tell_shape

Module = TypeVar("Module", bound=nn.Module)


class Prunable:
    """Put before LightningModule among the bases: the module's checkpoints load, pruned or not.

    `load_from_checkpoint` builds the module that its hyper-parameters describe, which this cuts down to the weights found:

        class MyModule(Prunable, LightningModule): ...
    """

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take on the shapes of the checkpoint's weights."""
        assert isinstance(self, nn.Module)
        shrink(self, checkpoint["state_dict"])
        super().on_load_checkpoint(checkpoint)  # type: ignore[misc]


def shrink(module: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Give the parameters and buffers of a module the smaller shapes that pruning has left in `state_dict`; values become zeros.

    Only what pruning filters leaves behind counts: some convolution has fewer filters, and no linear layer fewer outputs.
    Otherwise nothing is done, and loading the weights will say what does not fit. A module that was pruned in this process also
    grows back to weights from before.

    Args:
        module: whose `load_state_dict` is about to be called with these weights.
        state_dict: tensors by their names.
    """
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    changed = {
        name: state_dict[name].shape
        for name, tensor in own.items()
        if name in state_dict and not is_lazy(tensor) and tensor.shape != state_dict[name].shape
    }
    owners = {name: module.get_submodule(name.rpartition(".")[0]) for name in changed}
    filters = [n for n, shape in changed.items() if isinstance(owners[n], _ConvNd) and shape[:1] != own[n].shape[:1]]
    grows = bool(plans_of(module))
    if not filters or not all(_by_pruning(owners[n], own[n].shape, shape, grows) for n, shape in changed.items()):
        return
    for name, shape in changed.items():
        old = own[name]
        channels_last = old.dim() == 4 and not old.is_contiguous()
        new = torch.zeros(shape, dtype=old.dtype, device=old.device)
        new = new.contiguous(memory_format=torch.channels_last) if channels_last else new
        if isinstance(old, nn.Parameter):
            replace_data(old, new)
        else:
            setattr(owners[name], name.rpartition(".")[2], new)
    for owner in owners.values():
        tell_shape(owner)
    vars(module).pop(PLANS, None)  # they are not what led here


def shrink_when_loading(module: nn.Module) -> Any:
    """Let every `load_state_dict` of a module `shrink` it first, until `remove()` of what this returns."""

    def before(part: nn.Module, state_dict: Mapping[str, Tensor], prefix: str, *rest: Any) -> None:
        shrink(part, {name.removeprefix(prefix): x for name, x in state_dict.items() if name.startswith(prefix)})

    return module.register_load_state_dict_pre_hook(before)


def load_pruned(module_class: type[Module], path: str | Path, **kwargs: Any) -> Module:
    """`module_class.load_from_checkpoint(path, **kwargs)`, for a LightningModule of any class that may have been pruned.

    Args:
        module_class: the LightningModule's class.
        path: the checkpoint.
        kwargs: of `load_from_checkpoint`: hyper-parameters to override, `map_location`, `strict` …
    """
    if issubclass(module_class, Prunable):
        return module_class.load_from_checkpoint(path, **kwargs)
    shrinking: Any = type(module_class.__name__, (Prunable, module_class), {"__module__": module_class.__module__})
    module = shrinking.load_from_checkpoint(path, **kwargs)
    module.__class__ = module_class
    return module


def _by_pruning(owner: nn.Module, old: torch.Size, new: torch.Size, grows: bool) -> bool:
    """Whether pruning filters could have made this of a tensor."""
    if len(old) != len(new) or (isinstance(owner, nn.Linear) and old[0] != new[0]):
        return False
    pairs = list(zip(old, new, strict=True))
    return all(n <= o for o, n in pairs) or (grows and all(n >= o for o, n in pairs))

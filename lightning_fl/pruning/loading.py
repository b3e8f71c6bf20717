"""Load pruned weights: a module takes the shapes of the weights in the checkpoint or state dict."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from lightning_fl.pruning.apply_plan import PLANS, replace_data, tell_shape

Module = TypeVar("Module", bound=nn.Module)


class Prunable:
    """Base class, before LightningModule, of modules whose checkpoints load both pruned and unpruned.

    `load_from_checkpoint` builds the module from its hyper-parameters; this class cuts it to the checkpoint's weights:

        class MyModule(Prunable, LightningModule): ...
    """

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the shapes of the checkpoint's weights."""
        assert isinstance(self, nn.Module)
        shrink(self, checkpoint["state_dict"])
        super().on_load_checkpoint(checkpoint)  # type: ignore[misc]


def shrink(module: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Give the parameters and buffers of a module the smaller shapes of a pruned `state_dict`; values become zeros.

    This acts only if the shapes can come from pruning filters: some convolution has fewer filters, and no linear layer
    has fewer outputs. Otherwise nothing changes, and loading the weights raises PyTorch's own error. A module pruned or
    shrunk in this process also grows back to the shapes of weights from before.

    Args:
        module: module that will load these weights.
        state_dict: tensors by their names.
    """
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    changed = {
        name: state_dict[name].shape
        for name, tensor in tensors.items()
        if name in state_dict and not is_lazy(tensor) and tensor.shape != state_dict[name].shape
    }
    owners = {name: module.get_submodule(name.rpartition(".")[0]) for name in changed}
    filters = [
        n for n, shape in changed.items() if isinstance(owners[n], _ConvNd) and shape[:1] != tensors[n].shape[:1]
    ]
    grows = PLANS in vars(module)
    if not filters or not all(_by_pruning(owners[n], tensors[n].shape, shape, grows) for n, shape in changed.items()):
        return
    for name, shape in changed.items():
        old = tensors[name]
        new = torch.empty_permuted(shape, old.dim_order(), dtype=old.dtype, device=old.device).zero_()
        if isinstance(old, nn.Parameter):
            replace_data(old, new)
        else:
            setattr(owners[name], name.rpartition(".")[2], new)
    for owner in owners.values():
        tell_shape(owner)
    vars(module)[PLANS] = []  # the new shapes do not come from the plans so far


def shrink_when_loading(module: nn.Module) -> Any:
    """`shrink` a module before every `load_state_dict`, until `remove()` of the returned handle is called."""

    def before(part: nn.Module, state_dict: Mapping[str, Tensor], prefix: str, *rest: Any) -> None:
        shrink(part, {name.removeprefix(prefix): x for name, x in state_dict.items() if name.startswith(prefix)})

    return module.register_load_state_dict_pre_hook(before)


def load_pruned(module_class: type[Module], path: str | Path, **kwargs: Any) -> Module:
    """Call `module_class.load_from_checkpoint(path, **kwargs)` for any LightningModule class, pruned or not.

    Args:
        module_class: the LightningModule's class.
        path: the checkpoint.
        kwargs: arguments of `load_from_checkpoint`: hyper-parameters to override, `map_location`, `strict` …
    """
    if issubclass(module_class, Prunable):
        return module_class.load_from_checkpoint(path, **kwargs)
    shrinking: Any = type(module_class.__name__, (Prunable, module_class), {"__module__": module_class.__module__})
    module = shrinking.load_from_checkpoint(path, **kwargs)
    module.__class__ = module_class
    return module


def _by_pruning(owner: nn.Module, old: torch.Size, new: torch.Size, grows: bool) -> bool:
    """True if pruning filters can change a tensor's shape from `old` to `new`, or back if `grows`."""
    if len(old) != len(new) or (isinstance(owner, nn.Linear) and old[0] != new[0]):
        return False
    pairs = list(zip(old, new, strict=True))
    return all(n <= o for o, n in pairs) or (grows and all(n >= o for o, n in pairs))

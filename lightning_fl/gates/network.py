"""Add gates to the convolutions of any network, find them and remove them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from lightning_fl.checks import check_name_parts, checked, name_parts, overrides
from lightning_fl.errors import UserError, require
from lightning_fl.gates.gate import Gate, Keep, Mode, num_kept

SKIPPED = ("shortcut", "downsample")


@checked
def add_gates(
    network: nn.Module,
    keep: Keep = 0.7071,
    mode: Mode = "ste",
    detach_input: bool = True,
    skip: Sequence[str] = SKIPPED,
    seed: int = 0,
) -> dict[str, Gate]:
    """Give every convolution a gate, in place: `conv1` gets the child `conv1.gate`, everything else keeps its name.

    The gate reads the convolution's input. The mask is applied after the normalisation that follows the convolution
    among the children of the same module (so that dropped channels are exactly 0), or else after the convolution. A
    layer that keeps all its channels gets no gate. A forward pass that computes this normalisation before the convolution,
    or not at all, raises `UserError`. If the network or a part of it is compiled, all graphs of `torch.compile` are dropped, so
    that they are made anew with the gates. A graph from outside, such as `torch.compile(network)`, has to be made after this.

    Args:
        network: any module with convolutions.
        keep: share of the channels that stay, in (0, 1]. The MACs of a chain fall with its square.
        mode: `ste`, `multiply`, which also scales by π, or `index`, which only the lasso trains.
        detach_input: True if a gate's gradient stops at its input.
        skip: whole parts of the names of convolutions that get no gate; by default the shortcuts of residual blocks.
        seed: seed of the gates' initial weights.

    Returns:
        The gates, by the names of their convolutions.

    Raises:
        UserError: there is no convolution to gate or no layer of a given name, the network already has gates, or an
            argument is out of its range.

    >>> network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    >>> add_gates(network, keep=0.5)
    {'0': Gate(3, 8, kept=4, mode='ste')}
    >>> (network(torch.randn(2, 3, 5, 5)).amax((2, 3)) > 0).sum(1).tolist()
    [4, 4]
    """
    name = type(network).__name__
    require(not gates_of(network), f"{name} has gates already: remove them with remove_gates first.")
    skip = name_parts(skip)
    check_name_parts("skip", skip, network, SKIPPED)
    convolutions = [layer for layer in layers(network) if not _is_skipped(layer[0], skip)]
    late = [hook for hook in ("configure_model", "setup") if overrides(hook, network)]
    hint = f" Gates are added before {late[0]} is called: make the layers in __init__." if late else ""
    require(
        bool(convolutions),
        f"{name} has no convolution to gate: dynamic pruning chooses channels of convolutions.{hint}",
    )
    generator = torch.Generator().manual_seed(seed)
    for path, convolution, norm in convolutions:
        num_open = num_kept(keep, convolution.out_channels)
        if num_open == convolution.out_channels:
            continue
        pixel_axes = len(convolution.kernel_size)
        gate = Gate(
            convolution.in_channels,
            convolution.out_channels,
            num_open,
            pixel_axes,
            mode,
            detach_input,
            generator=generator,
        )
        gate.to(convolution.weight)
        convolution.gate = gate
        convolution.register_forward_pre_hook(gate.look)
        (convolution if norm is None else norm).register_forward_hook(gate.close)
        if norm is not None:
            parent = network.get_submodule(path.rpartition(".")[0])
            parent.register_forward_pre_hook(gate.forget)
            parent.register_forward_hook(gate.check_closed)
    gates = gates_of(network)
    if gates:
        _compile_again(network)
    return gates


def gates_of(network: nn.Module) -> dict[str, Gate]:
    """Return the gates of a network, by the names of their convolutions."""
    return {name: gate for name, layer in network.named_modules() if isinstance(gate := _gate(layer), Gate)}


def describe_gates(network: nn.Module) -> str:
    """Return how many convolutions have gates, and what share of the network's parameters these convolutions hold.

    >>> network = nn.Sequential(nn.Conv2d(3, 8, 1, bias=False), nn.Flatten(), nn.Linear(24, 9, bias=False))
    >>> _ = add_gates(network, keep=0.5)
    >>> describe_gates(network)
    '1 of 1 convolutions, which hold 10.0% of the parameters'
    """
    gate_names = gate_parameters(network)
    total = sum(p.numel() for name, p in network.named_parameters() if name not in gate_names)
    convolutions = layers(network)
    gated = [layer for _, layer, _ in convolutions if isinstance(_gate(layer), Gate)]
    held = sum(layer.weight.numel() + (0 if layer.bias is None else layer.bias.numel()) for layer in gated)
    return f"{len(gated)} of {len(convolutions)} convolutions, which hold {held / max(1, total):.1%} of the parameters"


def gate_parameters(network: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of all gates, by their names in the network."""
    paths = [f"{name}.gate." if name else "gate." for name in gates_of(network)]
    return {name: p for name, p in network.named_parameters() if name.startswith(tuple(paths))}


def remove_gates(network: nn.Module) -> None:
    """Remove all gates, so that the network is dense again; compiled graphs are dropped as by `add_gates`."""
    if gates_of(network):
        _compile_again(network)
    for path, convolution, norm in layers(network):
        gate = _gate(convolution)
        if isinstance(gate, Gate):
            del convolution.gate
            for owner in (convolution, norm, network.get_submodule(path.rpartition(".")[0])):
                if owner is not None:
                    _unhook(owner._forward_pre_hooks, gate)
                    _unhook(owner._forward_hooks, gate)


@contextmanager
def without_gates(network: nn.Module) -> Iterator[None]:
    """Compute all channels of the network inside this context."""
    gates = gates_of(network).values()
    before = [gate.active for gate in gates]
    try:
        for gate in gates:
            gate.active = False
        yield
    finally:
        for gate, active in zip(gates, before, strict=True):
            gate.active = active


def layers(network: nn.Module) -> list[tuple[str, Any, nn.Module | None]]:
    """Return every convolution once: name, layer, and the normalisation of its channels that follows it, or None."""
    convolutions: dict[int, tuple[str, Any, nn.Module | None]] = {}
    if isinstance(network, _ConvNd):
        return [("", network, None)]
    for path, parent in network.named_modules():
        children = list(parent.named_children())
        for (name, child), (_, following) in zip_longest(children, children[1:], fillvalue=("", None)):
            if isinstance(child, _ConvNd) and not isinstance(child, _ConvTransposeNd):
                norm = following if _normalised(following) == child.out_channels else None
                convolutions.setdefault(id(child), (f"{path}.{name}" if path else name, child, norm))
    return list(convolutions.values())


def _normalised(module: nn.Module | None) -> int | None:
    """Return the number of channels of a normalisation; None for any other module."""
    if isinstance(module, _NormBase):
        return module.num_features
    return module.num_channels if isinstance(module, nn.GroupNorm) else None


def _gate(layer: nn.Module) -> nn.Module | None:
    return layer._modules.get("gate") if isinstance(layer, _ConvNd) else None


def _is_skipped(name: str, skip: Sequence[str]) -> bool:
    return any(part in skip for part in name.split("."))


def _compile_again(network: nn.Module) -> None:
    """Drop compiled graphs if a part of the network has some: they do not notice that hooks of a module have changed."""
    by_lightning = getattr(network, "_compiler_ctx", None) is not None
    if by_lightning or any(part._compiled_call_impl or "_orig_mod" in part._modules for part in network.modules()):
        torch.compiler.reset()


def _unhook(hooks: dict[int, Callable[..., Any]], gate: Gate) -> None:
    for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is gate]:
        del hooks[key]


def only_gated(network: nn.Module) -> list[tuple[Any, nn.Module | None, Gate]]:
    """Return every convolution that has a gate, the normalisation that follows it (or None), and the gate.

    Raises:
        UserError: the network has no gates.
    """
    gated = [(layer, norm, gate) for _, layer, norm in layers(network) if isinstance(gate := _gate(layer), Gate)]
    if not gated:
        raise UserError(f"{type(network).__name__} has no gates: add them with add_gates first.")
    return gated

"""Inference that computes what the gates leave and nothing else.

Of a gated convolution only the rows of the chosen channels are computed, from those columns whose input channel is not zero
throughout: in a chain those that the gate before has chosen, K_{l−1} · K_l of C_{l−1} · C_l weights. A batch normalisation behind
it works on the chosen channels alone. The rest is put in as zeros, so that any network can follow.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.flop_counter import FlopCounterMode

from lightning_fl.errors import UserError, require
from lightning_fl.gates.gate import Gate
from lightning_fl.gates.network import only_gated


@contextmanager
def sliced(network: nn.Module, shared: bool = False) -> Iterator[None]:
    """Inside, a gated network in evaluation mode computes its chosen channels only, with the outputs of the masked network.

    Convolutions in groups, and those behind which a normalisation mixes channels, are computed whole and masked.

    Args:
        network: with gates.
        shared: choose one mask for the whole batch, by the mean of π over it. Otherwise the samples of a batch must agree, as a
            single one does.

    Raises:
        UserError: it has no gates or is in training mode; later, a batch whose samples choose different channels.
    """
    found = only_gated(network)
    require(not network.training, "sliced inference is for networks in evaluation mode: call eval() first.")
    before = [(gate, gate.active, gate.shared) for _, _, gate in found]
    layers = [_SlicedLayer(*layer) for layer in found if _can_slice(*layer[:2])]
    try:
        for _, _, gate in found:
            gate.shared = shared
        for layer in layers:
            layer.take_over()
        yield
    finally:
        for layer in layers:
            layer.give_back()
        for gate, active, was_shared in before:
            gate.active, gate.shared = active, was_shared


def count_sliced_macs(network: nn.Module, inputs: Tensor) -> int:
    """Multiply-accumulates of one forward pass as `sliced` computes it, gates included; biases and pooling are left out.

    Args:
        network: with gates, in evaluation mode.
        inputs: a batch of one sample, or of samples that are to share a mask.
    """
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sliced(network, shared=len(inputs) > 1), counter:
        network(inputs)
    return int(counter.get_total_flops()) // 2


def _can_slice(convolution: Any, norm: nn.Module | None) -> bool:
    if convolution.groups > 1:
        return False
    return norm is None or (isinstance(norm, _BatchNorm) and norm.running_mean is not None)


class _SlicedLayer:
    """A convolution and the batch normalisation behind it, whose `forward`s it takes over."""

    def __init__(self, convolution: Any, norm: Any, gate: Gate) -> None:
        self.convolution, self.norm, self.gate = convolution, norm, gate
        self._rows = torch.empty(0, dtype=torch.long)
        self._mask = torch.empty(0)

    def take_over(self) -> None:
        """Compute in place of the layer."""
        self._was_active, self.gate.active = self.gate.active, False
        if self._was_active:
            self.convolution.forward = self.convolve
            if self.norm is not None:
                self.norm.forward = self.normalise

    def give_back(self) -> None:
        """Let the layer compute itself."""
        for layer in filter(None, (self.convolution, self.norm)):
            vars(layer).pop("forward", None)

    def convolve(self, x: Tensor) -> Tensor:
        """(B, C_in, …) → the chosen channels (B, K, …), among zeros if no normalisation follows."""
        layer = self.convolution
        self._mask = self.gate(x)
        self._rows = _agreed(self._mask)
        columns = x.flatten(2).ne(0).any(-1).any(0).nonzero().flatten()
        if not len(columns):
            columns = x.new_zeros(1, dtype=torch.long)  # a convolution of nothing is not defined
        weight = layer.weight.index_select(0, self._rows)
        if len(columns) < x.shape[1]:
            x, weight = x.index_select(1, columns), weight.index_select(1, columns)
        bias = None if layer.bias is None else layer.bias[self._rows]
        y = layer._conv_forward(x, weight, bias)
        return y if self.norm is not None else self._among_zeros(y)

    def normalise(self, y: Tensor) -> Tensor:
        """(B, K, …) → (B, C_out, …)."""
        norm, rows = self.norm, self._rows
        scale = None if norm.weight is None else norm.weight[rows]
        shift = None if norm.bias is None else norm.bias[rows]
        y = F.batch_norm(y, norm.running_mean[rows], norm.running_var[rows], scale, shift, eps=norm.eps)
        return self._among_zeros(y)

    def _among_zeros(self, y: Tensor) -> Tensor:
        if self.gate.mode == "multiply":
            y = y * self.gate.spread(self._mask.index_select(1, self._rows)).to(y.dtype)
        whole = y.new_zeros(len(y), self.gate.weight.shape[0], *y.shape[2:])
        return whole.index_copy_(1, self._rows, y)


def _agreed(mask: Tensor) -> Tensor:
    """The channels that all samples of the batch choose.

    Raises:
        UserError: they do not agree.
    """
    chosen = mask != 0
    if not bool((chosen == chosen[:1]).all()):
        raise UserError(
            "the samples of the batch choose different channels, so their weights cannot be sliced together: give one sample "
            "at a time, or sliced(network, shared=True), which chooses for the batch as a whole."
        )
    return chosen[0].nonzero().flatten()

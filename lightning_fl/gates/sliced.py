"""Inference that computes only the channels that the gates choose.

A gated convolution uses only the weight rows of the chosen channels and the columns of input channels that are not all
zero. In a chain, the latter are those chosen by the previous gate: K_{l−1} · K_l of C_{l−1} · C_l weights. A batch
normalisation after it works on the chosen channels only. Zeros fill the other channels, so any layer can follow.
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
    """Compute only the chosen channels of a gated network inside this context; the outputs equal the masked network's.

    Convolutions with groups, and those followed by a normalisation that mixes channels, are computed whole and masked.

    Args:
        network: network with gates, in evaluation mode.
        shared: True to choose one mask for the whole batch, by its mean of π. Otherwise all samples of a batch must
            choose the same channels, as a single sample does.

    Raises:
        UserError: it has no gates or is in training mode; later, if samples of a batch choose different channels.
    """
    gated = only_gated(network)
    require(not network.training, "sliced inference needs a network in evaluation mode: call eval() first.")
    before = [(gate, gate.active, gate.shared) for _, _, gate in gated]
    layers = [_SlicedLayer(*layer) for layer in gated if _can_slice(*layer[:2])]
    try:
        for _, _, gate in gated:
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
    """Count multiply-accumulates of one forward pass in `sliced`, including gates, without biases and pooling.

    Args:
        network: network with gates, in evaluation mode.
        inputs: a batch of one sample, or of samples that share a mask.
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
    """Replacement for the `forward` of a convolution and of the batch normalisation after it."""

    def __init__(self, convolution: Any, norm: Any, gate: Gate) -> None:
        self.convolution, self.norm, self.gate = convolution, norm, gate
        self._rows = torch.empty(0, dtype=torch.long)
        self._mask = torch.empty(0)

    def take_over(self) -> None:
        """Replace the layers' `forward`."""
        self._was_active, self.gate.active = self.gate.active, False
        if self._was_active:
            self.convolution.forward = self.convolve
            if self.norm is not None:
                self.norm.forward = self.normalise

    def give_back(self) -> None:
        """Restore the layers' `forward`."""
        for layer in filter(None, (self.convolution, self.norm)):
            vars(layer).pop("forward", None)

    def convolve(self, inputs: Tensor) -> Tensor:
        """Map (B, C_in, …) to the chosen channels (B, K, …), or without a normalisation to (B, C_out, …) with zeros."""
        layer = self.convolution
        self._mask = self.gate(inputs)
        self._rows = _agreed(self._mask)
        columns = inputs.flatten(2).ne(0).any(-1).any(0).nonzero().flatten()
        if not len(columns):
            columns = inputs.new_zeros(1, dtype=torch.long)  # a convolution needs at least one input channel
        weight = layer.weight.index_select(0, self._rows)
        if len(columns) < inputs.shape[1]:
            inputs, weight = inputs.index_select(1, columns), weight.index_select(1, columns)
        bias = None if layer.bias is None else layer.bias[self._rows]
        y = layer._conv_forward(inputs, weight, bias)
        return y if self.norm is not None else self._among_zeros(y)

    def normalise(self, y: Tensor) -> Tensor:
        """Normalise the chosen channels (B, K, …) and fill the others with zeros: (B, C_out, …)."""
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
    """Return the channels that all samples of the batch choose.

    Raises:
        UserError: the samples choose different channels.
    """
    chosen = mask != 0
    if not bool((chosen == chosen[:1]).all()):
        raise UserError(
            "the samples of the batch choose different channels, so their weights cannot be sliced together: pass one "
            "sample at a time, or use sliced(network, shared=True), which chooses channels for the whole batch."
        )
    return chosen[0].nonzero().flatten()

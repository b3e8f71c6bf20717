"""Count the multiply-accumulates of a module and its layers with torch's own counter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lightning_fl.checks.evaluation_mode import evaluating
from lightning_fl.data import Selection
from lightning_fl.flat_module.flat_module import FlatModule


def count_macs(flat_module: FlatModule, samples: Selection, resident: bool) -> int | None:
    """Count the multiply-accumulates of one sample's `forward`: convolutions and matrix products, without biases.

    Buffers may change (batch normalisation counts batches), so the caller must load the model afterwards.

    Args:
        flat_module: holds the module.
        samples: samples for `forward`; the first two are used, because normalisation over a batch needs two.
        resident: True if they are on the accelerator.

    Returns:
        The count; None if `forward` accepts neither a batch nor the batch's first tensor alone.
    """
    counter = _count(flat_module, samples, resident)
    return None if counter is None else int(counter.get_total_flops()) // 2 // min(len(samples), 2)


def count_layer_macs(flat_module: FlatModule, samples: Selection, resident: bool) -> dict[str, int] | None:
    """Count as `count_macs` does, but for each submodule by its name, at every level of nesting."""
    counter = _count(flat_module, samples, resident)
    if counter is None:
        return None
    flops = {path: sum(by_kind.values()) for path, by_kind in counter.get_flop_counts().items()}
    return {
        path.partition(".")[2]: int(count) // 2 // min(len(samples), 2) for path, count in flops.items() if "." in path
    }


def _count(flat_module: FlatModule, samples: Selection, resident: bool) -> FlopCounterMode | None:
    """Count the operations of `forward` on two samples; None if it needs other arguments."""
    batch = flat_module.transfer(next(iter(samples.batches(2))), resident)
    inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
    return count_flops(flat_module, inputs) if isinstance(batch, (Tensor, tuple, list)) else None


def count_flops(
    flat_module: FlatModule, inputs: Any, inside: AbstractContextManager[Any] | None = None
) -> FlopCounterMode | None:
    """Run `forward` on `inputs` under torch's counter, within a context if one is given; None if it needs other arguments."""
    counter = FlopCounterMode(display=False)
    with (
        torch.random.fork_rng(flat_module.generators.cuda_devices),
        torch.no_grad(),
        evaluating(flat_module.module),
        flat_module.fabric.autocast(),
        inside or nullcontext(),
        _plain_kernels(),
        counter,
    ):
        try:
            flat_module.module(inputs)
        except Exception:  # `forward` needs other arguments, so nothing can be counted
            return None
    return counter


@contextmanager
def _plain_kernels() -> Iterator[None]:
    """Do without fused kernels of recurrent layers and attention, which some versions of torch cannot count."""
    cpu: Any = torch.backends.mkldnn  # whose types are those of the descriptors
    gpu, attention = torch.backends.cudnn, torch.backends.mha
    before = cpu.enabled, gpu.enabled, attention.get_fastpath_enabled()
    try:
        cpu.enabled = gpu.enabled = False
        attention.set_fastpath_enabled(False)
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        cpu.enabled, gpu.enabled = before[:2]
        attention.set_fastpath_enabled(before[2])

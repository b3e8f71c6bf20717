"""Multiply-accumulates of a module, counted by torch itself while it runs one sample."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_fl.runners.local import Selection
from lightning_fl.worker import Worker


def count_macs(worker: Worker, samples: Selection, resident: bool) -> int:
    """Multiply-accumulates of one sample's forward pass: convolutions and matrix products, without biases.

    Args:
        worker: holds the module; its state and random generators are as before.
        samples: samples for `training_step`, of which the first is used.
        resident: whether they lie on the accelerator.
    """
    module = worker.module
    batch = worker.transfer(next(iter(samples.batches(1))), resident)
    batch = worker.fabric.strategy.precision.convert_input(batch)
    was_training = module.training
    module.eval()
    arguments = (batch, 0) if worker.takes_index else (batch,)
    forward_context = worker.fabric.strategy.precision.forward_context()
    with torch.random.fork_rng(), torch.no_grad(), forward_context, FlopCounterMode(display=False) as counter:
        module.training_step(*arguments)
    worker.logs.take()
    module.train(was_training)
    return int(counter.get_total_flops()) // 2

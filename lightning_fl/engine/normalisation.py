"""Check that batch normalisation has something to train on: more than one value for each channel."""

from __future__ import annotations

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_fl.checks.evaluation_mode import evaluating
from lightning_fl.clients.local_schedule import LocalSchedule
from lightning_fl.data import FederatedDataModule
from lightning_fl.errors import UserError, require
from lightning_fl.flat_module.flat_module import FlatModule

REMEDY = "or use a normalisation without batches, such as torch.nn.GroupNorm"


def check_single_samples(flat_module: FlatModule, data: FederatedDataModule, schedule: LocalSchedule) -> None:
    """Check the batches of one sample of a module with batch normalisation, and warn of clients that only have such a batch.

    Buffers may change, so the caller must load the model afterwards.

    Raises:
        UserError: no client can train.
    """
    if not flat_module.skips_single_samples:
        return
    name, sizes = type(flat_module.module).__name__, data.client_sizes[data.client_sizes > 0]
    idle = sum(schedule.pass_batches(int(size)) == 0 for size in sizes)
    advice = f"give clients more samples, {REMEDY}"
    require(
        idle < len(sizes),
        f"{name} has batch normalisation, which cannot train on one sample, and no client has more: {advice}.",
    )
    if idle:
        rank_zero_warn(
            f"{name} has batch normalisation, which cannot train on one sample: {idle} of {len(sizes)} clients have no more, so "
            f"they train nothing, although they are selected and charged: {advice}."
        )
    lone = int(((sizes > 1) & (sizes % schedule.batch_size == 1)).sum())
    if lone and schedule.batch_size > 1 and not schedule.drop_last:
        rank_zero_info(
            f"{lone} of {len(sizes)} clients leave out their last batch of one sample, on which batch normalisation cannot train."
        )
    if data.batch_size == 1 and _fails_on_one(flat_module, data):
        raise UserError(
            f"{name} has batch normalisation, which cannot train on batches of one sample here: set batch_size to 2 or more, "
            f"{REMEDY}."
        )


def _fails_on_one(flat_module: FlatModule, data: FederatedDataModule) -> bool:
    """True if `forward` in training mode fails on one sample for want of a second value in a channel."""
    samples = data.client(data.largest_client)
    inputs = flat_module.inputs(next(iter(samples.batches(1))), data.train.resident)
    with (
        torch.random.fork_rng(flat_module.generators.cuda_devices),
        torch.no_grad(),
        evaluating(flat_module.module),
        flat_module.fabric.autocast(),
    ):
        flat_module.module.train()
        try:
            flat_module.module(inputs)
        except Exception as error:  # `forward` may need other arguments
            return "more than 1 value per channel" in str(error)
    return False

"""Validate, test and predict with the model that the flat module holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized
from contextlib import AbstractContextManager
from math import inf, nan
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_fl.clients.flat_module import FlatModule
from lightning_fl.evaluation_mode import evaluating
from lightning_fl.processes import gather_objects


def as_loaders(loaders: Any) -> list[Iterable[Any]]:
    """Return a loader, a list of loaders or None as a list."""
    if loaders is None:
        return []
    return list(loaders) if isinstance(loaders, (list, tuple)) else [loaders]


def num_batches(loaders: Sequence[Iterable[Any]], limit: int | float | None) -> list[int | float]:
    """Return the batches to run of each loader under Lightning's `limit_*_batches` (a count, a fraction or None for all)."""
    counts: list[int | float] = []
    for loader in loaders:
        length = len(loader) if isinstance(loader, Sized) else inf
        if isinstance(limit, int):
            counts.append(min(length, limit))
        else:
            counts.append(length if limit is None or limit == 1.0 else int(length * limit))
    return counts


def evaluate(
    flat_module: FlatModule,
    stage: str,
    loaders: Sequence[Iterable[Any]],
    limits: Sequence[int | float],
    inference_mode: bool,
    publish: Callable[[dict[str, float]], None],
) -> tuple[dict[str, float], list[list[Any]]]:
    """Run `<stage>_step` over all loaders in evaluation mode; ranks take turns with the batches, except in `predict`.

    Args:
        flat_module: holds the model.
        stage: `validation`, `test` or `predict`; also the prefix of the hooks.
        loaders: loaders of the data.
        limits: batches to run of each loader.
        inference_mode: True for `torch.inference_mode`, False for `torch.no_grad`.
        publish: called with the averages before the last hook, in which callbacks read them.

    Returns:
        The averages over samples of the values that the module logged, and each loader's outputs (only for `predict`).
    """
    module, hooks, logs = flat_module.module, flat_module.hooks, flat_module.logs
    step = getattr(module, f"{stage}_step")
    takes_index = is_param_in_hook_signature(step, "batch_idx", min_args=2)
    takes_loader = is_param_in_hook_signature(step, "dataloader_idx")
    fabric = flat_module.fabric
    rank, num_ranks = fabric.global_rank, fabric.world_size
    no_grad: AbstractContextManager[Any] = torch.inference_mode() if inference_mode else torch.no_grad()
    outputs: list[list[Any]] = [[] for _ in loaders]
    logs.take()
    hooks.call(f"on_{stage}_model_eval")
    with evaluating(module), no_grad:
        hooks.call(f"on_{stage}_start")
        hooks.call(f"on_{stage}_epoch_start")
        for loader_index, (loader, limit) in enumerate(zip(loaders, limits, strict=True)):
            logs.dataloader_suffix = f"/dataloader_idx_{loader_index}" if len(loaders) > 1 else ""
            resident = getattr(getattr(loader, "samples", None), "resident", False)
            for index, batch in enumerate(loader):
                if index >= limit:
                    break
                if stage != "predict" and index % num_ranks != rank:
                    continue
                batch = flat_module.transfer(batch, resident)
                logs.batch_size = extract_batch_size(batch)
                hooks.call(f"on_{stage}_batch_start", batch, index, loader_index)
                arguments = [batch] + [index] * takes_index + [loader_index] * takes_loader
                with fabric.autocast():
                    output = step(*arguments)
                hooks.call(f"on_{stage}_batch_end", output, batch, index, loader_index)
                if stage == "predict":
                    outputs[loader_index].append(output)
        logs.dataloader_suffix = ""
        hooks.call(f"on_{stage}_epoch_end")
        averages = logs.averages(gather_objects(fabric, move_data_to_device(logs.take(), torch.device("cpu"))))
        publish(averages)
        hooks.call(f"on_{stage}_end")
    hooks.call(f"on_{stage}_model_train")
    return averages, outputs


def measure(flat_module: FlatModule, stage: str, batches: Iterable[Any], resident: bool) -> dict[str, float]:
    """Return the averages that a module logs when `<stage>_step` runs over `batches` in evaluation mode; ranks take turns.

    The module's own hooks before and after the epoch run, too, because some modules log there; callbacks are not called.

    Args:
        flat_module: holds the model.
        stage: `validation` or `test`.
        batches: batches of the data.
        resident: True if they are on the accelerator.

    Returns:
        Averages over samples, the same on every rank.
    """
    module, logs, fabric = flat_module.module, flat_module.logs, flat_module.fabric
    step = getattr(module, f"{stage}_step")
    takes_index = is_param_in_hook_signature(step, "batch_idx", min_args=2)
    logs.take()
    with evaluating(module), torch.no_grad():
        getattr(module, f"on_{stage}_epoch_start")()
        for index, batch in enumerate(batches):
            if index % fabric.world_size == fabric.global_rank:
                batch = flat_module.transfer(batch, resident)
                logs.batch_size = extract_batch_size(batch)
                with fabric.autocast():
                    step(batch, *[index] * takes_index)
        getattr(module, f"on_{stage}_epoch_end")()
    return logs.averages(gather_objects(fabric, move_data_to_device(logs.take(), torch.device("cpu"))))


def mean_training_loss(flat_module: FlatModule, batches: Iterable[Any], resident: bool) -> float:
    """Return the mean over samples of the loss of `training_step` in evaluation mode; ranks take turns.

    Values that the module logs are dropped.

    Args:
        flat_module: holds the model.
        batches: batches of the data.
        resident: True if they are on the accelerator.

    Returns:
        Mean loss, the same on every rank; NaN if there was no loss.
    """
    module, fabric = flat_module.module, flat_module.fabric
    total = num_samples = 0.0
    with evaluating(module), torch.no_grad(), flat_module.lending({}, _nothing):
        for index, batch in enumerate(batches):
            if index % fabric.world_size == fabric.global_rank:
                batch = flat_module.transfer(batch, resident)
                with fabric.autocast():
                    loss, _ = flat_module.training_step(batch, index)
                if loss is not None:
                    size = extract_batch_size(batch)
                    total, num_samples = total + float(loss) * size, num_samples + size
    total, num_samples = (sum(parts) for parts in zip(*gather_objects(fabric, (total, num_samples)), strict=True))
    return total / num_samples if num_samples else nan


def _nothing(*arguments: Any, **options: Any) -> None:
    pass

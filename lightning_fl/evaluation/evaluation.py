"""Validate, test and predict with the model that the flat module holds."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from math import inf, nan
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_fl.callbacks import BackdoorProbe
from lightning_fl.data.descriptions import describe_batch
from lightning_fl.errors import UserError, noting, require
from lightning_fl.evaluation.predictions import Predictions
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.flat_module.module_logs import LogCollector
from lightning_fl.processes import gather_logs, gather_objects
from lightning_fl.switches.evaluation_mode import evaluating, measuring


def as_loaders(loaders: Any) -> CombinedLoader:
    """Return a loader, a list or mapping of loaders, a `CombinedLoader` or None as Lightning iterates over them."""
    if isinstance(loaders, CombinedLoader):
        return loaders
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec")  # Lightning's own, of torch
        return CombinedLoader([] if loaders is None else loaders, "sequential")


def num_batches(loaders: CombinedLoader, limit: int | float | None) -> list[int | float]:
    """Return the batches to run of each loader under Lightning's `limit_*_batches` (a count, a fraction or None for all).

    Raises:
        UserError: a fraction is less than one batch, or a loader has no length to take a fraction of.
    """
    counts: list[int | float] = []
    for loader in loaders.flattened:
        length = sized_len(loader)
        if limit is None or isinstance(limit, int) or limit == 1.0:
            counts.append(min(inf if length is None else length, limit if isinstance(limit, int) else inf))
            continue
        source = type(getattr(loader, "dataset", loader)).__name__
        require(
            length is not None,
            f"a limit of {limit} of the batches needs a loader with a length, which {source} lacks: use a whole number.",
        )
        assert length is not None
        counts.append(int(length * limit))
        require(
            counts[-1] > 0 or not length or not limit,
            f"a limit of {limit} of the {length} batches of {source} is less than one: use a whole number of batches.",
        )
    return counts


def is_sequential(loaders: CombinedLoader) -> bool:
    """True if each batch comes from one loader, and not from all of them."""
    return loaders._mode == "sequential"


def are_resident(loaders: CombinedLoader) -> bool:
    """True if all batches are on the accelerator already."""
    return all(getattr(getattr(loader, "samples", None), "resident", False) for loader in loaders.flattened)


def limited(loaders: CombinedLoader, limits: Sequence[int | float]) -> Iterator[tuple[Any, int, int]]:
    """Yield each batch with its index and the index of its loader, at most `limits` batches of each loader."""
    if not sum(limits):
        return
    loaders.limits = list(limits)
    try:
        for count, numbered in enumerate(loaders, start=1):
            yield numbered
            if count == sized_len(loaders):
                break
    finally:
        # This ends the workers of loaders that do not keep them until the next pass.
        loaders._iterator = None


def evaluate(
    flat_module: FlatModule,
    stage: str,
    loaders: CombinedLoader,
    limits: Sequence[int | float],
    inference_mode: bool,
    publish: Callable[[dict[str, float]], None],
    predictions: Predictions | None = None,
) -> dict[str, float]:
    """Run `<stage>_step` over all loaders in evaluation mode; ranks take turns with the batches, except in `predict`.

    Args:
        flat_module: holds the model.
        stage: `validation`, `test` or `predict`; also the prefix of the hooks.
        loaders: loaders of the data.
        limits: batches to run of each loader.
        inference_mode: True for `torch.inference_mode`, False for `torch.no_grad`.
        publish: called with the averages before the last hook, in which callbacks read them.
        predictions: gets what `predict_step` returns.

    Returns:
        The averages over samples of the values that the module logged.
    """
    module, hooks, logs = flat_module.module, flat_module.hooks, flat_module.logs
    step = getattr(module, f"{stage}_step")
    takes_index = is_param_in_hook_signature(step, "batch_idx", min_args=2)
    several = is_sequential(loaders) and len(loaders.flattened) > 1
    takes_loader = is_param_in_hook_signature(step, "dataloader_idx", explicit=not several)
    fabric = flat_module.fabric
    rank, num_ranks = fabric.global_rank, fabric.world_size
    no_grad: AbstractContextManager[Any] = torch.inference_mode() if inference_mode else torch.no_grad()
    resident = are_resident(loaders)
    logs.take()
    own_eval, own_train = (hooks.module_overrides(f"on_{stage}_model_{mode}") for mode in ("eval", "train"))
    with evaluating(module, not own_eval, not own_train), no_grad:
        hooks.call(f"on_{stage}_model_eval")
        hooks.call(f"on_{stage}_start")
        hooks.call(f"on_{stage}_epoch_start")
        for batch, index, loader_index in limited(loaders, limits):
            if stage != "predict" and index % num_ranks != rank:
                continue
            logs.dataloader_suffix = f"/dataloader_idx_{loader_index}" if several else ""
            batch = flat_module.transfer(batch, resident, loader_index)
            logs.batch_size = partial(_batch_size, batch)
            place = (index, loader_index) if several else (index,)
            hooks.call(f"on_{stage}_batch_start", batch, *place)
            arguments = [batch] + [index] * takes_index + [loader_index] * takes_loader
            with fabric.autocast(), noting(lambda: f"{stage}_step read batch {index}: {describe_batch(batch)}."):  # noqa: B023
                output = step(*arguments)
            if predictions is not None:
                predictions.add(loader_index, batch, output)
            hooks.call(f"on_{stage}_batch_end", output, batch, *place)
        logs.batch_size = 1
        logs.dataloader_suffix = ""
        hooks.call(f"on_{stage}_epoch_end")
        averages = logs.averages(*gather_logs(fabric, logs)[:2])
        publish(averages)
        hooks.call(f"on_{stage}_end")
        hooks.call(f"on_{stage}_model_train")
    return averages


def measure(
    flat_module: FlatModule,
    stage: str,
    batches: Iterable[Any],
    resident: bool,
    alone: bool = False,
    probes: Sequence[BackdoorProbe] = (),
) -> dict[str, float]:
    """Return the averages that a module logs when `<stage>_step` runs over `batches` in evaluation mode; ranks take turns.

    The module's own hooks before and after the epoch run, too, because some modules log there; of callbacks only probes are
    called. The module's torchmetrics objects and other attributes are afterwards what they were.

    Args:
        flat_module: holds the model.
        stage: `validation` or `test`.
        batches: batches of the data.
        resident: True if they are on the accelerator.
        alone: True if this rank runs all batches, without the others.
        probes: callbacks that measure each batch, too.

    Returns:
        Averages over samples, the same on every rank unless `alone`.
    """
    module, logs, fabric = flat_module.module, flat_module.logs, flat_module.fabric
    step = getattr(module, f"{stage}_step")
    takes_index = is_param_in_hook_signature(step, "batch_idx", min_args=2)
    logs.take()
    with evaluating(module), measuring(module), _without_others(logs) if alone else nullcontext():
        with torch.no_grad():
            getattr(module, f"on_{stage}_epoch_start")()
            for index, batch in enumerate(batches):
                if alone or index % fabric.world_size == fabric.global_rank:
                    batch = flat_module.transfer(batch, resident)
                    logs.batch_size = partial(_batch_size, batch)
                    with fabric.autocast():
                        step(batch, *[index] * takes_index)
                        for probe in probes:
                            probe.measure(module, batch)
            logs.batch_size = 1
            getattr(module, f"on_{stage}_epoch_end")()
        return logs.averages([logs.take()]) if alone else logs.averages(*gather_logs(fabric, logs)[:2])


@contextmanager
def _without_others(logs: LogCollector) -> Iterator[None]:
    """Let metrics of torchmetrics wait for no other process, because that one measures something else."""
    others = logs.gather, logs.gather_tensors
    if logs.gather is not None:
        logs.gather, logs.gather_tensors = _as_only, _as_only
    try:
        yield
    finally:
        logs.gather, logs.gather_tensors = others


def _as_only(mine: Any) -> list[Any]:
    """Return what this process has, as if there were no others."""
    return [mine]


def mean_training_loss(flat_module: FlatModule, batches: Iterable[Any], sizes: Sequence[int], resident: bool) -> float:
    """Return the mean over samples of the loss of `training_step` in evaluation mode; ranks take turns.

    Values that the module logs are dropped, and its attributes are afterwards what they were.

    Args:
        flat_module: holds the model.
        batches: batches of the data.
        sizes: number of samples of each batch.
        resident: True if they are on the accelerator.

    Returns:
        Mean loss, the same on every rank; NaN if there was no loss.
    """
    module, fabric = flat_module.module, flat_module.fabric
    total = num_samples = 0.0
    with evaluating(module), measuring(module), torch.no_grad(), flat_module.lending({}, _nothing):
        for index, (batch, size) in enumerate(zip(batches, sizes, strict=True)):
            if index % fabric.world_size == fabric.global_rank:
                batch = flat_module.transfer(batch, resident)
                with fabric.autocast():
                    loss, _ = flat_module.training_step(batch, index)
                if loss is not None:
                    total, num_samples = total + float(loss) * size, num_samples + size
    total, num_samples = (sum(parts) for parts in zip(*gather_objects(fabric, (total, num_samples)), strict=True))
    return total / num_samples if num_samples else nan


def _batch_size(batch: Any) -> int:
    """Return the number of samples that Lightning finds in a batch."""
    try:
        return extract_batch_size(batch)
    except MisconfigurationException:
        raise UserError(
            f"self.log finds no number of samples in a batch of class {type(batch).__name__}: use "
            "self.log(name, value, batch_size=…)."
        ) from None


def _nothing(*arguments: Any, **options: Any) -> None:
    pass

"""Values that a module logs in an evaluation whose batches are divided among the processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from math import nan
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_fl.flat_module.metric_values import computed, watched
from lightning_fl.internals import Metrics, ResultCollection, ResultMetadata, ResultMetric, ResultSync

Gather = Callable[[Any], list[Any]]


class SharedResults(ResultCollection):
    """Lightning's collection of logged values, summed in float64; `share` merges it over the processes.

    Attributes:
        replacing: values that the method has measured, by the logged names that they replace.
        hidden: logged names to leave out.
        marks_undefined: True if a torchmetrics object is NaN where it is undefined, such as AUROC of samples of one class, in
            place of a number that means nothing.
    """

    def __init__(self) -> None:
        super().__init__(training=False)
        self.marks_undefined = False
        self.replacing: Mapping[str, float] = {}
        self.hidden: set[str] = set()
        self._shared: set[str] = set()
        self._logged_elsewhere: set[str] = set()

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        """Add a value to those of its name."""
        self._shared.discard(key)
        super().update_metrics(key, value.double() if isinstance(value, Tensor) else value, batch_size)

    def valid_items(self) -> Iterator[tuple[str, ResultMetric]]:  # type: ignore[override]
        """Yield the names with a value; a mean over no sample has none."""
        return (
            (key, item)
            for key, item in super().valid_items()
            if not (item.is_tensor and item.meta.is_mean_reduction and item.meta.on_epoch and not _has_samples(item))
        )

    def metrics(self, on_step: bool) -> Metrics:
        """Return the values for callbacks, loggers and progress bar."""
        metrics = super().metrics(on_step)
        if on_step or self.dataloader_idx is not None:
            return metrics
        values = {name: torch.tensor(value, dtype=torch.float64) for name, value in self.replacing.items()}
        for kind in ("callback", "log"):
            metrics[kind] |= values
        metrics["pbar"] |= {name: self.replacing[name] for name in metrics["pbar"].keys() & values.keys()}
        for shown in (metrics["callback"], metrics["log"], metrics["pbar"]):
            for name in self.hidden & shown.keys():
                del shown[name]
        return metrics

    # Static in Lightning, which calls it of the collection.
    def _get_cache(self, result_metric: ResultMetric, on_step: bool) -> Tensor | None:  # type: ignore[override]
        if not self.marks_undefined or result_metric.is_tensor or on_step or result_metric._computed is not None:
            return super()._get_cache(result_metric, on_step)
        value, undefined = watched(lambda: super(SharedResults, self)._get_cache(result_metric, on_step))
        if undefined:
            value = torch.tensor(nan)
            result_metric._computed = value  # type: ignore[assignment]
        return value

    def averages(self) -> dict[str, float]:
        """Return the value of each name over the whole evaluation, of all loaders; not under Lightning's names with suffix."""
        values = {}
        for item in self.values():
            if item.has_reset or not item.meta.on_epoch or (item.is_tensor and not _has_samples(item)):
                continue
            value = self._get_cache(item, on_step=False)
            if value is not None:
                values[self._forked_name(item, on_step=False)[0]] = float(value)
        return values

    @property
    def unlogged_names(self) -> set[str]:
        """Names that loggers do not get."""
        return {self._forked_name(item, on_step=False)[0] for item in self.values() if not item.meta.logger}

    @property
    def loaders(self) -> dict[str, int]:
        """Index of the loader whose steps logged a name, if there are several loaders."""
        indices = {self._forked_name(item, on_step=False)[0]: item.meta.dataloader_idx for item in self.values()}
        return {name: index for name, index in indices.items() if index is not None}

    def share(
        self, gather: Gather | None, gather_tensors: Callable[[Tensor], list[Tensor]], module: LightningModule
    ) -> None:
        """Replace the values logged here since the last call by those of all processes, which call it together.

        Args:
            gather: returns the objects of all processes, given that of this one; None if there is only one.
            gather_tensors: the same for a tensor, on the host.
            module: module that logs; the torchmetrics objects are its attributes.
        """
        if gather is None:
            return
        paths = {id(part): path for path, part in module.named_modules()}
        mine = {
            key: (_facts(item.meta), _state(item) if item.is_tensor else paths[id(item.value)])
            for key, item in self.items()
            if not item.has_reset and item.meta.on_epoch and key not in self._shared
        }
        parts = gather(mine)
        for key in {key: None for part in parts for key in part}:
            facts, _ = next(part[key] for part in parts if key in part)
            states = [part[key][1] for part in parts if key in part]
            if key not in self or self[key].has_reset:
                self._logged_elsewhere.add(key)
                self[key] = ResultMetric(_metadata(facts), is_tensor=not isinstance(states[0], str))
            item = self[key]
            item.has_reset = False
            if isinstance(states[0], str):
                item.value = module.get_submodule(states[0])
                item._computed = computed(item.value, gather_tensors)
            else:
                _set_state(item, states)
            self._shared.add(key)

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """Drop the values; at the end of an evaluation also those that replace them."""
        super().reset(metrics, fx)
        for key in [key for key in self._logged_elsewhere if self[key].has_reset]:
            del self[key]  # the next evaluation may log it here, with metadata that differ: how this process reduces
            self._logged_elsewhere.remove(key)
        if fx is None:
            self._shared.clear()
            self.replacing, self.hidden = {}, set()


def _has_samples(item: ResultMetric) -> bool:
    return not item.meta.is_mean_reduction or bool(item.cumulated_batch_size)


def _facts(meta: ResultMetadata) -> dict[str, Any]:
    """Return the fields of a value's metadata that another process needs."""
    return {field.name: getattr(meta, field.name) for field in fields(meta) if field.name != "_sync"}


def _metadata(facts: dict[str, Any]) -> ResultMetadata:
    meta = ResultMetadata(**facts)
    meta.sync = ResultSync()
    return meta


def _state(item: ResultMetric) -> tuple[float, float]:
    """Return a value's sum, or other reduction, and the samples that it is over."""
    return float(item.value), float(item.cumulated_batch_size) if item.meta.is_mean_reduction else 1.0


def _set_state(item: ResultMetric, states: list[tuple[float, float]]) -> None:
    """Reduce the states of all processes."""
    values = torch.tensor([value for value, _ in states], dtype=torch.float64)
    if item.meta.is_mean_reduction:
        item.value, item.cumulated_batch_size = values.sum(), torch.tensor(sum(samples for _, samples in states))
        item._computed = item.value / item.cumulated_batch_size if item.cumulated_batch_size else None
    else:
        item.value = item._computed = item.meta.reduce_fx(values)

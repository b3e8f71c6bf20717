"""Averages of the values that modules log with `self.log`: over batches, clients and data loaders, weighted by samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_fl.errors import UserError, require
from lightning_fl.flat_module.metric_values import computed

LOSS = "train/loss"
REDUCTIONS = ("mean", "avg", "sum", "min", "max")
OWN_LOSS = "train/loss of steps"
"""Name under which `add_loss` logs losses; in `averages`, values that the module logs as `train/loss` replace them."""
Sums = dict[str | tuple[str, str], tuple[Any, float]]
"""For each name, (sum of value × samples, samples); for a reduction other than the mean, (all values, 0). A pair is a name and
Lightning's name with suffix for the same value. The first is a tensor, or after `on_host` a float or a list of numbers."""


class LogCollector:
    """Replace `LightningModule.log` while a trainer runs the module.

    In a federation a value logged in a step is averaged over the client's steps and over the clients, weighted by samples,
    and reported once a round. `reduce_fx` other than the mean ("sum", "min", "max" or a function of the stacked values) is
    applied to all values of the round. torchmetrics objects are computed at the end of the round, and reset after its hooks.

    Lightning gives a value that is logged on step and on epoch two names with suffix: `<name>_epoch`, here the value of the
    round, and in training `<name>_step`, here the mean over clients of their last step's value.

    Attributes:
        gather: returns the objects of all processes, given that of this one; None if there is only one.
        gather_tensors: the same for a tensor, on the host.
        computes_for_each_client: True if `take` computes torchmetrics objects, whose states do not go on to the next client.
        suffixed: for each name, the values of its names with suffix, which callbacks may monitor and loggers do not get.
    """

    def __init__(self, is_training: Callable[[], bool] = lambda: False, module: nn.Module | None = None) -> None:
        """Start without values.

        Args:
            is_training: returns True during a local training, in which Lightning logs on step unless told otherwise.
            module: module that logs.
        """
        self.gather: Callable[[Any], list[Any]] | None = None
        self.gather_tensors: Callable[[Tensor], list[Tensor]] = _alone
        self.computes_for_each_client = False
        self._module = module
        self.batch_size: int | Callable[[], int] = 1
        self._is_training = is_training
        self._module_logs_loss: bool | None = None
        self.progress_bar_names: set[str] = set()
        self.unlogged_names: set[str] = set()
        self.synchronised_names: set[str] = set()
        self._metrics: dict[str, Metric] = {}
        self._computed_metrics: list[Metric] = []
        self._reductions: dict[str, str | Callable[..., Any]] = {}
        self.suffixed: dict[str, dict[str, float]] = {}
        self._forms: dict[str, dict[str, str]] = {}
        self._values: dict[str, list[Any]] = {}
        self._weights: dict[str, list[float]] = {}

    @torch.compiler.disable  # a compiled step would be compiled again for every further value
    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[..., Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Record a value; same signature as `LightningModule.log`, but `on_step` does not report single steps.

        Raises:
            UserError: the name is no text, the value no single number, or the reduction has an unknown name.
        """
        require(isinstance(name, str), f"self.log({name!r}, …) needs a text as its name, such as 'train/loss'.")
        if not isinstance(value, Metric):
            self._check_value(name, value)
        if isinstance(reduce_fx, str):
            reduce_fx = reduce_fx.lower()
            require(
                reduce_fx in REDUCTIONS,
                f"self.log({name!r}, …) has reduce_fx={reduce_fx!r}; allowed: {', '.join(REDUCTIONS)}, or a function.",
            )
        is_training = self._is_training()
        if name not in self._values:
            self._values[name], self._weights[name] = [], []
            self._reductions[name] = reduce_fx
            if prog_bar:
                self.progress_bar_names.add(name)
            if logger is False:
                self.unlogged_names.add(name)
            if sync_dist:
                self.synchronised_names.add(name)
            if (is_training if on_step is None else on_step) and (not is_training if on_epoch is None else on_epoch):
                forms = ("epoch", "step") if is_training else ("epoch",)
                self._forms[name] = {form: f"{name}_{form}" for form in forms}
        if isinstance(value, Metric):
            self._metrics[name] = value
            if self.computes_for_each_client and is_training:
                self._weights[name].append(self._samples_of(name) if batch_size is None else batch_size)
            return
        self._append(name, value, self._samples_of(name) if batch_size is None else batch_size)

    def _append(self, name: str, value: Any, weight: float) -> None:
        """Append a value to those of a name; a copy, as in Lightning, because the module may go on to change it in place."""
        self._values[name].append(value.detach().clone() if isinstance(value, Tensor) else value)
        self._weights[name].append(weight)

    def _check_value(self, name: str, value: Any) -> None:
        if not _is_number(value):
            several = isinstance(value, (Mapping, MetricCollection))
            remedy = "self.log_dict logs several values" if several else "log a mean or another number of it"
            raise UserError(f"self.log({name!r}, …) gets {_kind(value)}, but logs one number or a Metric: {remedy}.")

    def _samples_of(self, name: str) -> int:
        """Return the samples of the batch; ask for their number only if a mean needs it."""
        if callable(self.batch_size):
            if not self._is_mean(name):
                return 1
            self.batch_size = self.batch_size()
        return self.batch_size

    def add_loss(self, loss: Tensor) -> None:
        """Log the loss of a training step as `train/loss`, unless the module logs it itself."""
        if self._module_logs_loss is None:
            self._module_logs_loss = LOSS in self._values
        if self._module_logs_loss:
            return
        if OWN_LOSS in self._values:
            self._append(OWN_LOSS, loss, self._samples_of(OWN_LOSS))
        else:
            self.log(OWN_LOSS, loss)

    @property
    def _name_of_loss(self) -> str:
        return LOSS if self._values.get(LOSS) else OWN_LOSS

    def last_loss(self, count: int) -> tuple[float, float] | None:
        """Return the mean over samples of the last `count` values of `train/loss`, or of all if fewer, and the samples.

        None if there is no value.
        """
        name = self._name_of_loss
        values, weights = self._values.get(name, [])[-count:], self._weights.get(name, [])[-count:]
        return (_mean(_stacked(values), weights), sum(weights)) if values else None

    def take(self) -> Sums:
        """Return the sums of the values logged since the last call, and drop the values."""
        sums: Sums = {}
        for name in [name for name in self._metrics if self._weights[name]]:  # of a client that keeps its own
            value = torch.as_tensor(computed(self._metrics.pop(name), _alone)).detach().double()
            sums[name] = value * sum(self._weights[name]), sum(self._weights[name])
        for name, values in self._values.items():
            weights = self._weights[name]
            if not values or (self._is_mean(name) and not any(weights)):  # a mean over no sample
                continue
            logged = _stacked(values)
            stacked = logged.double()
            if self._is_mean(name):
                factors = torch.tensor(weights, dtype=torch.float64).to(stacked.device, non_blocking=True)
                sums[name] = (stacked @ factors, sum(weights))
            else:
                stays_whole = isinstance(self._reductions[name], str) and logged.dtype == torch.int64
                sums[name] = (logged if stays_whole else stacked, 0.0)
            for form, other in self._forms.get(name, {}).items():
                if form == "epoch":
                    sums[name, other] = sums[name]
                elif weights[-1]:
                    sums[name, other] = (stacked[-1] * weights[-1], weights[-1])
        for name in self._values:
            self._values[name], self._weights[name] = [], []
        return sums

    def _is_mean(self, name: str) -> bool:
        return self._reductions[name] in ("mean", "avg", torch.mean)

    def forget(self) -> None:
        """Drop everything logged since the last call of `take`, torchmetrics objects included."""
        self.take()
        for metric in self._metrics.values():
            metric.reset()
        self._metrics.clear()

    def averages(self, parts: Sequence[Sums], knowledge: Sequence[LoggedNames] | None = None) -> dict[str, float]:
        """Combine the sums of several clients, and compute the torchmetrics objects, which `end_round` resets.

        Args:
            parts: the sums, of all processes.
            knowledge: `knowledge` of each process, if it has been gathered already.

        Raises:
            UserError: a torchmetrics object computes something else than one number.
        """
        parts = on_host(parts)
        reduced = self._learn_from_others(parts, knowledge)
        averages: dict[str, float] = {}
        for key in {key: None for part in parts for key in part}:
            entries = [part[key] for part in parts if key in part]
            weight = sum(weight for _, weight in entries)
            name, other = key if isinstance(key, tuple) else (key, None)
            value = sum(total for total, _ in entries) / weight if weight else reduced[name]
            if other is None:
                averages[name] = value
            else:
                self.suffixed.setdefault(name, {})[other] = value
        if OWN_LOSS in averages:
            own_loss = averages.pop(OWN_LOSS)
            averages.setdefault(LOSS, own_loss)
        for name, metric in self._metrics.items():
            averages[name] = self._compute(name, metric)
            for form, other in self._forms.get(name, {}).items():
                form_value = averages[name] if form == "epoch" else metric._forward_cache
                if form_value is not None:  # a metric that was updated without `forward` has no value of a step
                    self.suffixed.setdefault(name, {})[other] = float(torch.as_tensor(form_value).detach())
        self._computed_metrics += self._metrics.values()
        self._metrics.clear()
        return averages

    def end_round(self) -> None:
        """Reset the computed torchmetrics objects, which hooks at the end of a round may still read and log, as in Lightning."""
        for metric in self._computed_metrics:
            metric.reset()
        self._computed_metrics.clear()

    def _compute(self, name: str, metric: Metric) -> float:
        value = metric.compute() if self.gather is None else computed(metric, self.gather_tensors)
        require(
            _is_number(value),
            f"The `.compute()` return of the metric logged as {name!r} must be a tensor of one number, got {value!r}.",
        )
        return float(value)

    def knowledge(self) -> LoggedNames:
        """Return facts about this process's logged names for processes whose clients or batches log others."""
        means = {name for name in self._reductions if self._is_mean(name)}
        reductions = {name: how if isinstance(how, str) else None for name, how in self._reductions.items()}
        return LoggedNames(
            self.progress_bar_names,
            self.unlogged_names,
            self.synchronised_names,
            self._forms,
            {} if self.gather is None else self._metric_paths(),
            {name: how for name, how in reductions.items() if name not in means},
        )

    def _learn_from_others(self, parts: Sequence[Sums], knowledge: Sequence[LoggedNames] | None) -> dict[str, float]:
        """Learn how other processes log; return reductions other than the mean.

        All processes then compute the same metrics in the same order, because each exchanges its state with the others.
        """
        names = {name for part in parts for name, (_, weight) in part.items() if isinstance(name, str) and not weight}

        def reduced(name: str, how: str | Callable[..., Any]) -> float:
            values = [value for part in parts if name in part for value in part[name][0]]
            dtype = torch.int64 if all(isinstance(value, int) for value in values) else torch.float64
            return _reduce(how, torch.tensor(values, dtype=dtype)).item()

        reductions = {name: reduced(name, self._reductions[name]) for name in names & self._reductions.keys()}
        if self.gather is None:
            return reductions
        paths: dict[str, str] = {}
        knowledge = self.gather(self.knowledge()) if knowledge is None else knowledge
        for other in knowledge:
            self.progress_bar_names |= other.progress_bar_names
            self.unlogged_names |= other.unlogged_names
            self._forms |= other.forms
            reductions |= {
                name: reduced(name, how)
                for name, how in other.reductions.items()
                if how is not None and name in names - reductions.keys()
            }
            paths |= other.metrics
        if any(name not in other.reductions for name in names for other in knowledge) and any(
            how is None for name in names for other in knowledge for how in [other.reductions.get(name, "")]
        ):  # a function, which not every process has
            reductions = {name: value for values in self.gather(reductions) for name, value in values.items()}
        if self._module is not None:
            self._metrics = {name: self._module.get_submodule(path) for name, path in paths.items()}  # type: ignore[misc]
        return reductions

    def _metric_paths(self) -> dict[str, str]:
        """Return the paths in the module of the metrics to compute, by their logged names."""
        if not self._metrics or self._module is None:
            return {}
        paths = {id(part): path for path, part in self._module.named_modules()}
        for name, metric in self._metrics.items():
            require(
                id(metric) in paths,
                f"self.log({name!r}, …) gets a {type(metric).__name__} that is no attribute of the module, so that processes "
                "cannot share it: assign it to an attribute in __init__.",
            )
        return {name: paths[id(metric)] for name, metric in self._metrics.items()}


class LoggedNames(NamedTuple):
    """Knowledge of a process about logged names: as in `LogCollector`, paths of metrics, and reductions other than the mean.

    A reduction that is a function has None here: processes cannot send it.
    """

    progress_bar_names: set[str]
    unlogged_names: set[str]
    synchronised_names: set[str]
    forms: dict[str, dict[str, str]]
    metrics: dict[str, str]
    reductions: dict[str, str | None]


class RowLogs(LogCollector):
    """Collect the values of several clients that log at once: every value is a vector with one entry for each of `rows`."""

    def __init__(self, collector: LogCollector) -> None:
        """Start without values; `collector` reports the values logged here."""
        super().__init__(lambda: True)
        self.rows: Sequence[int] = ()
        self.progress_bar_names, self.unlogged_names = collector.progress_bar_names, collector.unlogged_names
        self._reductions, self._forms = collector._reductions, collector._forms
        self._rows: dict[str, list[Sequence[int]]] = {}

    def log(self, name: str, value: Any, *how: Any, **named: Any) -> None:
        """Record a value of each client; same signature as `LightningModule.log`."""
        if isinstance(value, Metric):
            raise UserError(f"{name} is a torchmetrics object, which cannot distinguish several clients.")
        super().log(name, value, *how, **named)

    def _append(self, name: str, value: Any, weight: float) -> None:
        super()._append(name, value.reshape(len(self.rows)), weight)
        self._rows.setdefault(name, []).append(self.rows)

    def _check_value(self, name: str, value: Any) -> None:
        """Raise `UserError` unless there is one number for each client."""
        if isinstance(value, Tensor) and value.numel() == len(self.rows):
            return
        super()._check_value(name, value[0] if isinstance(value, Tensor) and value.dim() else value)

    def last_losses(self, counts: Sequence[int]) -> list[float | None]:
        """Return `last_loss` for each client, with its own count of values."""
        name = self._name_of_loss
        if not self._values.get(name):
            return [None] * len(counts)
        flat, rows, weights = self._flat(name)
        positions = [(rows == row).nonzero().squeeze(1)[-count:] for row, count in enumerate(counts)]
        return [_mean(flat[position], weights[position]) if len(position) else None for position in positions]

    def _flat(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return all values of a name, with the row and the weight of each."""
        values, parts = self._values[name], self._rows[name]
        flat = torch.cat(_together(values)).double().cpu()  # the host waits once, after the stack's last step
        rows = torch.tensor([row for part in parts for row in part], device=flat.device)
        weights = [float(w) for w, part in zip(self._weights[name], parts, strict=True) for _ in part]
        return flat, rows, flat.new_tensor(weights)

    def take_rows(self, num_rows: int) -> list[Sums]:
        """Return the sums of the values that each client logged."""
        taken: list[Sums] = [{} for _ in range(num_rows)]

        def share_out(key: str | tuple[str, str], totals: Tensor, samples: Tensor) -> None:
            for total, weight, sums in zip(totals, samples.tolist(), taken, strict=True):
                if weight:
                    sums[key] = (total, weight)

        for name in self._values:
            flat, rows, weights = self._flat(name)
            if self._is_mean(name):
                weighted = torch.stack([flat, torch.ones_like(flat)]) * weights
                share_out(name, *flat.new_zeros(2, num_rows).index_add_(1, rows, weighted))
            else:
                for row in rows.unique().tolist():
                    taken[row][name] = (flat[rows == row], 0.0)
            if name in self._forms:
                for sums in taken:
                    if name in sums:
                        sums[name, self._forms[name]["epoch"]] = sums[name]
                positions = torch.arange(len(rows), device=rows.device)
                last = rows.new_full((num_rows,), -1).scatter_reduce_(0, rows, positions, "amax")
                share_out((name, self._forms[name]["step"]), flat[last] * weights[last], weights[last] * (last >= 0))
        return taken


def merged(parts: Sequence[Sums]) -> Sums:
    """Return the sums of values that were logged in several trainings of one client, or by several processes, on the host."""
    sums: Sums = {}
    for part in on_host(parts):  # where values that a reduction has yet to see are lists, which are joined
        for key, (value, weight) in part.items():
            before, earlier = sums.get(key, (None, 0.0))
            sums[key] = (value if before is None else before + value, earlier + weight)
    return sums


def on_host(parts: Sequence[Sums]) -> list[Sums]:
    """Return sums as numbers and lists of numbers, for which the host waits once, whatever the number of clients."""
    tensors = [total for part in parts for total, _ in part.values() if isinstance(total, Tensor)]
    if not tensors or tensors[0].device.type == "cpu":
        numbers = iter([tensor.tolist() for tensor in tensors])
    else:
        # Integers stay whole, so they cross by themselves.
        crossed = {
            is_real: iter(torch.cat([x.reshape(-1) for x in tensors if x.is_floating_point() == is_real]).tolist())
            for is_real in {tensor.is_floating_point() for tensor in tensors}
        }
        listed = [[next(crossed[x.is_floating_point()]) for _ in range(x.numel())] for x in tensors]
        numbers = iter([row if x.dim() else row[0] for x, row in zip(tensors, listed, strict=True)])
    return [
        {key: (next(numbers) if isinstance(total, Tensor) else total, weight) for key, (total, weight) in part.items()}
        for part in parts
    ]


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, (Number, np.generic))


def _kind(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _alone(mine: Tensor) -> list[Tensor]:
    """Return the tensor of the only process."""
    return [mine]


def _stacked(values: Sequence[Any]) -> Tensor:
    """Return logged values (n,), on the accelerator if any of them is there."""
    return torch.stack(_together([torch.as_tensor(value).squeeze() for value in values]))


def _together(tensors: list[Tensor]) -> list[Tensor]:
    """Return tensors on one device: a module may log a number in one step and a tensor in another."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) == 1:
        return tensors
    (device,) = (device for device in devices if device.type != "cpu")
    return [tensor.to(device) for tensor in tensors]


def _mean(values: Tensor, weights: Tensor | list[float]) -> float:
    """Return the weighted mean as a Python float."""
    values = values.double()
    weights = torch.as_tensor(weights, dtype=torch.float64, device=values.device)
    return float(values @ weights / weights.sum())


def _reduce(reduction: str | Callable[..., Any], values: Tensor) -> Tensor:
    named: Mapping[str, Callable[..., Any]] = {"sum": torch.sum, "min": torch.min, "max": torch.max}
    return torch.as_tensor((named[reduction] if isinstance(reduction, str) else reduction)(values))

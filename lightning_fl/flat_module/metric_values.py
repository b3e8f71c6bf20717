"""Values of torchmetrics objects: over all processes, and where they are undefined."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric

UNDEFINED = re.compile(r"^No (positive|negative) samples (found )?in targets?")
"""Start of the warning with which torchmetrics returns a number for a metric, such as AUROC, of samples that lack a class."""


def computed(metric: Metric, gather_tensors: Callable[[Tensor], list[Tensor]]) -> Any:
    """Compute a metric over all processes, of which some may have no values.

    Args:
        metric: the metric, also one made of others.
        gather_tensors: returns the tensors of all processes, given that of this one.
    """

    def from_all(state: Tensor, group: Any = None) -> list[Tensor]:
        # torchmetrics itself waits forever if an empty list of labels, whose dtype it cannot know, meets a list of integers.
        states = [other.to(state.device) for other in gather_tensors(state)]
        return [other for other in states if other.numel()] or [state]

    parts = [part for part in metric.modules() if isinstance(part, Metric)]
    before = [part.dist_sync_fn for part in parts]
    for part in parts:
        part.dist_sync_fn = part.dist_sync_fn or from_all
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The ``compute`` method of metric .* was called before")
            return metric.compute()
    finally:
        for part, function in zip(parts, before, strict=True):
            part.dist_sync_fn = function


@contextmanager
def unsynchronised(module: nn.Module) -> Iterator[None]:
    """Let the torchmetrics objects of a module compute values of this process alone, without a word to the others."""
    metrics = [part for part in module.modules() if isinstance(part, Metric)]
    before = [metric.distributed_available_fn for metric in metrics]
    for metric in metrics:
        metric.distributed_available_fn = lambda: False
    try:
        yield
    finally:
        for metric, function in zip(metrics, before, strict=True):
            metric.distributed_available_fn = function


def watched(compute: Callable[[], Any]) -> tuple[Any, bool]:
    """Return the value of a metric, and True if torchmetrics says that it is undefined; other warnings are shown.

    Args:
        compute: computes the metric.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        value = compute()
    others = [one for one in said if not UNDEFINED.search(str(one.message))]
    for one in others:
        warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    return value, len(others) < len(said)

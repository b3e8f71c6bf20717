"""A step of a module on tensors without data, which tells whether a graph can hold it, and what it logs and writes to."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map
from torchmetrics import Metric

from lightning_fl.checks.evaluation_mode import keeping_attributes
from lightning_fl.flat_module.plain_attributes import PlainAttributes
from lightning_fl.vectors.layout import Tree

T = TypeVar("T")


class CannotCompile(Exception):  # noqa: N818 -- a decision, after which the step runs eagerly
    """The step does something that a graph cannot hold."""


class Log(NamedTuple):
    """Name of a value that a step logs, and the further arguments of `self.log`."""

    name: str
    how: tuple[Any, ...]
    named: dict[str, Any]


def try_step(
    flat_module: Any, step_name: str, batch: Any, step: Callable[[Any, Tree], T]
) -> tuple[T, list[Log], list[str]]:
    """Make a step on tensors without data, which leaves no trace in the module.

    Args:
        flat_module: holds the module.
        step_name: name of the step, for the reasons.
        batch: the batch.
        step: makes the step, given the batch and the module's trainable parameters, all without data.

    Returns:
        What `step` returns, what it logs, and the names of the parameters and buffers that it writes to.

    Raises:
        CannotCompile: a graph cannot hold the step.
    """
    module = flat_module.module
    fakes, logs = FakeTensorMode(allow_non_fake_inputs=True), list[Log]()
    names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    lent = {name: fakes.from_tensor(tensor.detach()) for name, tensor in _present(flat_module, names).items()}
    leaves = {name: lent[name].requires_grad_() for name, p in module.named_parameters() if p.requires_grad}
    versions = {name: lent[name]._version for name in lent}

    def record(name: str, value: Any, *how: Any, **named: Any) -> None:
        if isinstance(value, Metric):
            raise CannotCompile(f"{step_name} logs {name!r} as a torchmetrics object")
        if any(isinstance(x, Tensor) for x in tree_leaves((how, named))):
            raise CannotCompile(f"{step_name} logs {name!r} with a tensor as an argument of self.log")
        logs.append(Log(name, how, named))

    with keeping_attributes(flat_module.own_parts):
        attributes, random_states = PlainAttributes(module), _host_random()
        metrics = [metric for metric in module.modules() if isinstance(metric, Metric)]
        updates = [metric.update_count for metric in metrics]
        with fakes, flat_module.lending(lent, record):
            given = tree_map(lambda x: fakes.from_tensor(x) if isinstance(x, Tensor) else x, batch)
            result = step(given, leaves)
            now = _present(flat_module, names)
        if changed := attributes.changed():
            raise CannotCompile(f"{step_name} changes {' and '.join(map(repr, changed))} of the module")
        if updates != [metric.update_count for metric in metrics]:
            raise CannotCompile(f"{step_name} updates a torchmetrics object")
        if random_states != _host_random():
            raise CannotCompile(f"{step_name} draws random numbers of Python or NumPy")
    if replaced := [name for name in names if now[name] is not lent[name]]:
        raise CannotCompile(f"{step_name} replaces the buffer {replaced[0]!r} instead of writing to it")
    return result, logs, [written for written in names if lent[written]._version != versions[written]]


def _present(flat_module: Any, names: list[str]) -> dict[str, Tensor]:
    """Return the module's present parameters and buffers of these names."""
    return {name: home[leaf] for name in names for home, leaf in flat_module.holders(name)[:1]}


def _host_random() -> tuple[Any, ...]:
    """Return the states of the global generators of Python and NumPy."""
    name, keys, *more = np.random.get_state()  # noqa: NPY002
    return random.getstate(), name, tuple(keys), *more

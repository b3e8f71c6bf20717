"""Representations of samples by a client's model and by other models, which a rule compares in a penalty (MOON)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_fl.checks.evaluation_mode import evaluating, keeping_attributes
from lightning_fl.clients.client_job import Batch, ClientJob
from lightning_fl.errors import nearest, require
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.slots import LocalTraining, Rule
from lightning_fl.vectors.layer_groups import FACTORS


def representation_layer(module: nn.Module, rule: Rule) -> tuple[str, nn.Module]:
    """Return the part of a module whose input is the representation of a sample, and its name.

    Raises:
        UserError: the module has no linear layer, or no part of the name that the user gives.
    """
    parts = {name: part for name, part in module.named_modules() if name}
    if (name := rule.representation) is not None:
        require(name in parts, f"{type(module).__name__} has no layer {name!r}; {nearest(name, parts)}.")
        return name, parts[name]
    linear = [
        name for name, part in parts.items() if isinstance(part, nn.Linear) and FACTORS.isdisjoint(name.split("."))
    ]
    require(
        bool(linear),
        f"{type(rule).__name__} compares the inputs of the last linear layer, and {type(module).__name__} has none: name the "
        f"layer whose inputs represent a sample; {nearest('', parts)}.",
    )
    return linear[-1], parts[linear[-1]]


class Representations:
    """Reads the representations of each minibatch by the models that a client's rule compares."""

    def __init__(self, flat_module: FlatModule, job: ClientJob, local: LocalTraining) -> None:
        """Find the layer, and the models that do not change during the training."""
        self._flat_module, self._job = flat_module, job
        self._name, self._layer = representation_layer(flat_module.module, job.rule)
        self._models = job.rule.compared(local)

    @torch.compiler.set_stance("force_eager")  # a compiled module calls no hook that comes later
    def training_step(self, batch: Batch) -> tuple[Any, Any, Tensor | None]:
        """Return the result of the module's `training_step`, and the penalty (); None if the module skips the batch."""
        others = self._of_others(batch)
        own: list[Tensor] = []
        with self._added_to(own):
            loss, output = self._flat_module.training_step(batch.content, batch.batch_index)
        if loss is None:
            return loss, output, None
        return loss, output, self._job.rule.penalty(self._joined(own), others)

    def _of_others(self, batch: Batch) -> list[Tensor]:
        """Return the representations by the other models, in evaluation mode; nothing of the module changes.

        The module's random draws, such as those of an augmentation, repeat for each model, and for the client's own after them.
        """
        flat_module, counters = self._flat_module, self._job.counters
        (params, buffers), *_ = self._models
        repeat_draws = flat_module.generators.keep()
        representations = []
        with (
            torch.no_grad(),
            evaluating(flat_module.module),
            keeping_attributes(flat_module.own_parts),
            flat_module.other_model(params, buffers, counters),
            flat_module.dropping_logs(),
        ):
            for params, buffers in self._models:
                flat_module.load(params, buffers, counters)
                inputs: list[Tensor] = []
                with self._added_to(inputs):
                    flat_module.training_step(batch.copied().content, batch.batch_index)
                representations.append(self._joined(inputs))
                repeat_draws()
        return representations

    def _added_to(self, inputs: list[Tensor]) -> RemovableHandle:
        """Add every input of the layer to a list, inside the context."""

        def watch(layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            inputs.append(given[0] if given else next(iter(named.values())))

        return self._layer.register_forward_pre_hook(watch, with_kwargs=True)

    def _joined(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the inputs of all calls of the layer as rows (n, f), at least in float32."""
        require(
            bool(inputs),
            f"training_step of {type(self._flat_module.module).__name__} does not call {self._name}, whose inputs "
            f"{type(self._job.rule).__name__} compares: name another layer.",
        )
        joined = torch.cat([rows.flatten(1) for rows in inputs])
        return joined.to(torch.promote_types(joined.dtype, torch.float32))

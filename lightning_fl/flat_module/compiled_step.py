"""The training steps of a run by compiled graphs."""

from __future__ import annotations

from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from lightning_fl.flat_module.compiled_graphs import CompiledGraphs
from lightning_fl.flat_module.step_graph import Gradient, StackGraph, StackOutput, StackStep, StepGraph, TrainingStep


@final
class CompiledStep(CompiledGraphs):
    """Compute the loss of a training step and its gradient by compiled graphs.

    Attributes:
        gradient: gradient of the last loss, until it is added to that of the step; None if there is none.
    """

    what, does = "training step", "trains"

    def __init__(self, flat_module: Any) -> None:
        super().__init__(flat_module)
        self._step = TrainingStep(flat_module.module)
        self.gradient: Gradient | None = None

    def __call__(self, batch: Any, index: int) -> tuple[Tensor, Any] | None:
        """Return the loss and the complete output of `training_step`; None if it has to run eagerly."""
        self.gradient = None
        if self.why_not or not torch.is_grad_enabled():
            return None
        self._flat_module.bind_replaced()
        computed = self._computed(partial(StepGraph, self._step, self._flat_module), batch, index)
        if computed is None:
            return None
        loss, output, self.gradient = computed
        return loss, output

    def of_stack(self, batch: Any, step: StackStep) -> StackOutput | None:
        """Compute a step of a stack, whose batches have a leading axis (n, …); None if it has to run eagerly."""
        if self.why_not or not torch.is_grad_enabled():
            return None
        computed: StackOutput | None = self._computed(
            partial(StackGraph, self._step, self._flat_module), batch, step, kind="stack"
        )
        return computed

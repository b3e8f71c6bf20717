"""Self-distillation within a client: Horváth et al., FjORD, NeurIPS 2021 (arXiv:2102.13451).

    loss of a batch = F(y) + KL(softmax(z) ‖ softmax(z_p))

z is the output of the client's whole network for the batch. z_p is the output of its first units, a share p that the
step has drawn. F is the module's own loss of the whole network; z takes no gradient from the second term, which is 0 if
p is the largest share. The paper has a temperature T and a weight α of the second term; both are 1 here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div
from torch.utils.hooks import RemovableHandle

from lightning_fl.checks.evaluation_mode import keeping_attributes
from lightning_fl.clients.client_job import Batch
from lightning_fl.errors import require
from lightning_fl.exchanges.own_classes import last_linear
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.flat_module.ordered_dropout import OrderedDropout


class SelfDistillation:
    """Computes the losses of a client whose whole network teaches its first units."""

    def __init__(self, flat_module: FlatModule, dropout: OrderedDropout) -> None:
        self._flat_module, self._dropout = flat_module, dropout
        self._layer = last_linear(flat_module.module)

    @torch.compiler.set_stance("force_eager")  # a compiled module calls no hook that comes later
    def training_step(self, batch: Batch) -> tuple[Any, Any, Tensor | None]:
        """Return the result of `training_step` with the whole network, and the second term (); None if it is 0.

        The module repeats its random draws for the first units, so that both networks see the same samples. The second
        forward pass changes only buffers: it logs nothing, and attributes keep the values of the first pass.
        """
        flat_module, narrows = self._flat_module, self._dropout.draw()
        again, repeat_draws = (batch.copied(), flat_module.generators.keep()) if narrows else (batch, None)
        taught_by: list[Tensor] = []
        with self._dropout.suspended(), self._added_to(taught_by):
            loss, output = flat_module.training_step(batch.content, batch.batch_index)
        if loss is None or repeat_draws is None:
            return loss, output, None
        repeat_draws()
        taught: list[Tensor] = []
        with keeping_attributes(flat_module.own_parts), flat_module.dropping_logs(), self._added_to(taught):
            flat_module.training_step(again.content, again.batch_index)
        teacher, student = self._log_probabilities(taught_by).detach(), self._log_probabilities(taught)
        return loss, output, kl_div(student, teacher, reduction="batchmean", log_target=True)

    def _added_to(self, outputs: list[Tensor]) -> RemovableHandle:
        """Add every output of the last linear layer to a list, inside the context."""
        return self._layer.register_forward_hook(lambda layer, inputs, output: outputs.append(output))

    def _log_probabilities(self, outputs: list[Tensor]) -> Tensor:
        """Return the logarithms of the classes' probabilities (n, c) by all calls of the layer, at least in float32."""
        require(
            bool(outputs),
            f"training_step of {type(self._flat_module.module).__name__} does not call its last linear layer, whose outputs "
            "self-distillation compares: leave out distilled.",
        )
        joined = torch.cat([output.flatten(0, -2) for output in outputs])
        return joined.to(torch.promote_types(joined.dtype, torch.float32)).log_softmax(-1)

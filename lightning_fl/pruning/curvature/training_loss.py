"""`TrainingLoss`: curvature of a LightningModule's training loss, computed on a copy; the module does not change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from lightning_fl.checks import checked
from lightning_fl.errors import UserError, require
from lightning_fl.pruning.curvature.products import (
    Function,
    Product,
    as_function,
    gauss_newton_product,
    hessian_product,
    trainable,
)
from lightning_fl.pruning.trial import eager_copy


class TrainingLoss:
    """Loss of a module's `training_step` as a function of its trainable parameters.

    Dropout is off and batch normalisation uses its running statistics. Logs of the step are discarded.

    Attributes:
        point: current parameters of the module, in the order of `trainable`.
    """

    @checked
    def __init__(self, module: LightningModule, curvature: Literal["hessian", "ggn"] = "hessian") -> None:
        """Copy the module.

        Args:
            module: any module with automatic optimisation.
            curvature: `hessian`, or `ggn` for the generalised Gauss-Newton matrix of a classifier whose `forward`
                returns logits and whose loss is their cross-entropy.
        """
        name = type(module).__name__
        require(
            module.automatic_optimization,
            f"{name} steps its optimisers itself (automatic_optimization = False), so AdaptivePruning finds no loss to measure "
            "in its training_step: use FilterPruning, whose rate is given.",
        )
        self._name = name
        self._twin = _twin(module)
        self._takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        self._kind = curvature
        self.point: list[Tensor] = list(trainable(self._twin).values())

    def curvature(self, batch: Any) -> Callable[[Sequence[Tensor]], Product]:
        """Return the curvature of the loss of a batch as a function of the point.

        Raises:
            UserError: training_step returns no loss; or for `ggn`, the module is no classifier with cross-entropy loss.
        """
        loss = as_function(self._twin, lambda twin: self._loss(twin, batch))
        if self._kind == "hessian":
            return lambda point: self._tried(lambda: hessian_product(loss, point))
        outputs, labels = self._classifier(loss, batch)
        return lambda point: self._tried(
            lambda: gauss_newton_product(outputs, lambda logits: F.cross_entropy(logits, labels), point)
        )

    def _loss(self, twin: nn.Module, batch: Any) -> Tensor:
        result = twin.training_step(batch, *[0] * self._takes_index)  # type: ignore[operator]
        loss = result["loss"] if isinstance(result, dict) else result
        if not isinstance(loss, Tensor):
            raise UserError(f"the training_step of {self._name} returns no loss, but {type(loss).__name__}.")
        return loss

    def _classifier(self, loss: Function, batch: Any) -> tuple[Function, Tensor]:
        """Return the logits as a function of the parameters, and the labels; raise if the loss is not theirs."""
        sentence = (
            f"curvature='ggn' needs a classifier: {self._name}.forward(batch[0]) must return logits (n, C), and the "
            "loss must be their mean cross-entropy with the classes batch[1]; otherwise use curvature='hessian'."
        )
        require(isinstance(batch, (tuple, list)) and len(batch) == 2, sentence)
        inputs, labels = batch
        outputs = as_function(self._twin, lambda twin: twin(inputs))
        with torch.no_grad():
            try:
                expected = F.cross_entropy(outputs(self.point), labels)
            except Exception as error:
                raise UserError(f"{sentence} It fails: {error}") from error
            same = torch.allclose(expected, loss(self.point), rtol=1e-3, equal_nan=True)
        require(same, sentence)
        return outputs, labels

    def _tried(self, build: Callable[[], Product]) -> Product:
        """Build a product whose errors name the remedy."""
        product = self._explained(build)
        return lambda vector: self._explained(lambda: product(vector))

    def _explained(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:  # torch's errors about a missing derivative, of several classes
            if "not implemented" not in str(error):
                raise
            other = "ggn" if self._kind == "hessian" else "hessian"
            raise UserError(
                f"the loss of {self._name} cannot be differentiated twice: {error}; curvature={other!r} may work."
            ) from error


def _twin(module: LightningModule) -> LightningModule:
    """Return a copy in evaluation mode that has the same trainer and logs nothing."""
    trainer = vars(module).get("_trainer")
    twin: Any = eager_copy(module)
    for name in ("log", "log_dict"):
        vars(twin)[name] = _nothing
    if trainer is not None:
        twin.trainer = trainer
    return twin.eval()


def _nothing(*arguments: Any, **options: Any) -> None:
    pass

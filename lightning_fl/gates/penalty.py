"""The lasso that makes gates sparse: L_g = λ Σ_l mean over the batch of ‖z_l‖₁, z before the sigmoid (FedDP).

It is added to the loss that a training step returns. So every scaling of the loss (accumulation, mixed precision) also
scales the lasso, and one backward pass computes both gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_fl.gates.gate import Gate


def lasso(outputs: Sequence[Tensor]) -> Tensor | float:
    """Return Σ_l mean over the batch of ‖z_l‖₁.

    Args:
        outputs: z of each gate, (B, C).
    """
    return sum((z.abs().sum(-1).mean() for z in outputs), 0.0)


@contextmanager
def observed(gates: Iterable[Gate]) -> Iterator[list[Tensor]]:
    """Yield a list that collects z of every gate inside this context, in the order of the gates' forward passes."""
    gates, outputs = list(gates), list[Tensor]()
    try:
        for gate in gates:
            gate.outputs = outputs
        yield outputs
    finally:
        for gate in gates:
            gate.outputs = None


class penalised:  # noqa: N801 -- used like the function that it wraps
    """A `training_step` that adds λ times the lasso of some gates to its loss."""

    def __init__(self, step: Callable[..., Any], gates: Sequence[Gate], strength: float) -> None:
        """Wrap a training step.

        Args:
            step: a bound `training_step`.
            gates: gates whose outputs are penalised.
            strength: λ ≥ 0.
        """
        self.step = step
        # Lightning reads the signature from here, and looks no deeper.
        self.__wrapped__ = getattr(step, "__wrapped__", step)
        self.gates = list(gates)
        self.strength = strength

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Return the step's result with the penalty added to its loss; warn if that has no gradient."""
        with observed(self.gates) as outputs:
            result = self.step(*arguments, **named)
        if result is None:
            return None
        trains = torch.is_grad_enabled() and any(gate.weight.requires_grad for gate in self.gates)
        if outputs and trains and not any(z.requires_grad for z in outputs):
            warnings.warn(
                "the penalty of the gates has no gradient, because the network is computed without gradients, as by "
                "torch.utils.checkpoint with use_reentrant=True: give it use_reentrant=False.",
                stacklevel=2,
            )
        penalty = self.strength * lasso(outputs)
        if isinstance(result, Mapping):
            return {**result, "loss": result["loss"] + penalty}
        return result + penalty

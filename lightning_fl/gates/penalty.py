"""The lasso that makes gates sparse: L_g = λ Σ_l mean over the batch of ‖z_l‖₁, z before the sigmoid (FedDP, eq. 5).

It is added to the loss that a training step returns, so that whatever scales the loss (accumulation, mixed precision) scales it
too, and one backward pass serves both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lightning_fl.gates.gate import Gate


def lasso(outputs: Sequence[Tensor]) -> Tensor | float:
    """Σ_l mean over the batch of ‖z_l‖₁.

    Args:
        outputs: z of the gates, each (B, C).
    """
    return sum((z.abs().sum(-1).mean() for z in outputs), 0.0)


@contextmanager
def observed(gates: Iterable[Gate]) -> Iterator[list[Tensor]]:
    """Inside, z of every gate goes to the list that this gives, in the order in which the gates are passed."""
    gates, outputs = list(gates), list[Tensor]()
    try:
        for gate in gates:
            gate.outputs = outputs
        yield outputs
    finally:
        for gate in gates:
            gate.outputs = None


class penalised:  # noqa: N801 -- used like the function that it wraps
    """A `training_step` whose loss has λ times the lasso of some gates in it."""

    def __init__(self, step: Callable[..., Any], gates: Sequence[Gate], strength: float) -> None:
        """Wrap.

        Args:
            step: a bound `training_step`.
            gates: whose outputs count.
            strength: λ ≥ 0.
        """
        self.__wrapped__ = step  # Lightning looks through wrappers for the step's signature
        self.gates = list(gates)
        self.strength = strength

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """What the step returns, its loss penalised."""
        with observed(self.gates) as outputs:
            result = self.__wrapped__(*arguments, **named)
        if result is None:
            return None
        penalty = self.strength * lasso(outputs)
        if isinstance(result, Mapping):
            return {**result, "loss": result["loss"] + penalty}
        return result + penalty

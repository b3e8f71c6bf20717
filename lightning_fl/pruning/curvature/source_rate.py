"""`SourceRate`: the pruning rate of a network for one source of data, from one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Interval
from torch import Tensor

from lightning_fl.checks import Called, Checked
from lightning_fl.checks.float32 import full_float32
from lightning_fl.pruning.curvature.products import Product
from lightning_fl.pruning.curvature.spectral_rates import gap_rate, lipschitz_constant, plateau_rate
from lightning_fl.pruning.curvature.spectrum import exact_spectrum, spectrum

EXACT = 2000
"""Largest number of parameters for which the gap is found in all eigenvalues."""


@dataclass(frozen=True)
class SourceRate(Checked):
    """Compute p*_k from the spectrum of the Hessian.

    Attributes:
        mode: `slq_plateau`, the rule of the authors' code; `gap`, the paper's rule; or `gap_of_all`, the paper's rule over all
            eigenvalues, including zeros.
        steps: number of Lanczos steps, at least 2.
        probes: number of random vectors, at least 1.
        max_rate: upper limit of the rate, in [0, 1).
    """

    mode: Annotated[Literal["slq_plateau", "gap", "gap_of_all"], Called("rate_mode")] = "slq_plateau"
    steps: Annotated[int, Ge(2), Called("lanczos_steps")] = 50
    probes: Annotated[int, Ge(1)] = 1
    max_rate: Annotated[float, Interval(ge=0, lt=1)] = 0.95

    @full_float32()
    def __call__(
        self,
        curvature: Callable[[Sequence[Tensor]], Product],
        point: Sequence[Tensor],
        initial: Sequence[Tensor] | None,
        generator: torch.Generator,
    ) -> float:
        """Return the rate of one source.

        Args:
            curvature: product with the Hessian of its loss at any point.
            point: the parameters w_T.
            initial: w_0, which only `gap` and `gap_of_all` use; None for w_T.
            generator: a CPU generator.

        Returns:
            A rate in [0, max_rate], or NaN if a value is not finite.
        """
        hessian, start = curvature(point), _vector_like(point)
        exact = self.mode != "slq_plateau" and len(start) <= EXACT
        eigenvalues = (
            exact_spectrum(hessian, start) if exact else spectrum(hessian, start, generator, self.steps, self.probes)
        )
        if not eigenvalues.is_finite:
            return float("nan")
        if self.mode == "slq_plateau":
            return plateau_rate(eigenvalues, self.max_rate)
        displacement = [before - now for before, now in zip(point if initial is None else initial, point, strict=True)]

        def on_the_way(share: float) -> Product:
            return curvature([now + share * step for now, step in zip(point, displacement, strict=True)])

        lipschitz = lipschitz_constant(hessian, on_the_way, start, generator)
        return gap_rate(eigenvalues, lipschitz, self.max_rate, of_all=self.mode == "gap_of_all")


def _vector_like(point: Sequence[Tensor]) -> Tensor:
    """Return a vector with a number for each parameter, in at least 32 bits, because half precision loses orthogonality."""
    dtype = torch.promote_types(point[0].dtype, torch.float32)
    return torch.empty(sum(part.numel() for part in point), dtype=dtype, device=point[0].device)

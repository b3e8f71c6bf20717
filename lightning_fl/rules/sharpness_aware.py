"""FedSAM's local rule (Qu et al., Generalized Federated Learning via Sharpness Aware Minimization, ICML 2022; Caldarola et al.,
Improving Generalization in Federated Learning by Seeking Flat Minima, ECCV 2022).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor

from lightning_fl.checks import Called
from lightning_fl.slots import Gradients, LocalTraining, Rule


@dataclass(frozen=True)
class SharpnessAware(Rule):
    """Step the module's own optimiser with the gradient at y + ρ g/‖g‖, where g is the gradient at y on the same minibatch.

    The norm is over all parameters that clients send. The clients' own parameters use the gradient at y. If g is 0, the point
    is y.

    Attributes:
        rho: radius ρ ≥ 0; 0 is FedAvg. Default of SAM's authors (Foret et al., ICLR 2021): 0.05.
    """

    reads = Gradients.MINIBATCH | Gradients.MINIBATCH_AT_POINT
    changeable = frozenset({"rho"})
    rho: Annotated[float, Ge(0), Called("rho, the radius of FedSAM's neighbourhood,")] = 0.05

    def point(self, local: LocalTraining) -> Tensor:
        """Return y + ρ g/‖g‖."""
        wide = torch.promote_types(local.gradient.dtype, torch.float32)
        norm = torch.linalg.vector_norm(local.gradient, dim=-1, keepdim=True, dtype=wide)
        factor = torch.where(norm > 0, self.rho / norm, 0.0).to(local.gradient.dtype)
        return torch.addcmul(local.params, local.gradient, factor)

    def correct(self, local: LocalTraining) -> None:
        """Replace the gradient by that at the point."""
        local.gradient.copy_(local.gradient_at_point)

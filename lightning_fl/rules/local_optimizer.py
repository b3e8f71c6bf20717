"""Local training with the module's own optimiser (FedAvg; McMahan et al., AISTATS 2017)."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_fl.slots import Gradients, Rule


@dataclass(frozen=True)
class LocalOptimizer(Rule):
    """y ← y − η g by the optimiser of `configure_optimizers`, whose state (momentum, moments) starts anew in every round."""

    reads = Gradients.NONE

"""Normalisation layers that every client keeps: FedBN (Li et al., ICLR 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_fl.slots import Owned, Personal

BATCH_NORMS: tuple[type[nn.Module], ...] = (nn.modules.batchnorm._BatchNorm,)
ALL_NORMS: tuple[type[nn.Module], ...] = (
    *BATCH_NORMS,
    nn.modules.instancenorm._InstanceNorm,
    nn.GroupNorm,
    nn.LayerNorm,
)


@dataclass(frozen=True)
class PersonalNorms(Personal):
    """Let every client keep scale, shift and running statistics of the norms.

    Attributes:
        norms: only batch norms (`batch`), or also group, layer and instance norms (`all`).
    """

    norms: Literal["batch", "all"] = "batch"

    def owned(self, module: nn.Module) -> Owned:
        """Return the parameters that are trained and the buffers of the norms; warn if there are none."""
        types = ALL_NORMS if self.norms == "all" else BATCH_NORMS
        names = {
            f"{path}.{leaf}" if path else leaf
            for path, part in module.named_modules()
            if isinstance(part, types)
            for leaf in (*part._parameters, *part._buffers)
        }
        if not names:
            rank_zero_warn(
                f"{type(module).__name__} has no {'' if self.norms == 'all' else 'batch '}norm, so clients keep none of their own"
                + ("." if self.norms == "all" else "; norms='all' keeps group, layer and instance norms.")
            )
        trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        return Owned(frozenset(names & trained), frozenset(name for name, _ in module.named_buffers() if name in names))

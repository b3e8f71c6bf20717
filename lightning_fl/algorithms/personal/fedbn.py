"""FedBN: Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021 (arXiv:2102.07623).

client k:  (y, b) ← (w, b_k);  (y, b) ← (y, b) − η ∇F_k(y, b)      b: scale, shift and running statistics of the norms
           b_k ← b;  upload Δ_k = y − w                            rule: the base method's
server:    as in the base method; FedAvg: w ← w + Σ_k n_k Δ_k / Σ_k n_k

A layer of c channels keeps 4c numbers off the link: γ and β, which are trained, and the running mean and variance. A client's
own b_k begin at the module's initial ones, so a client that has not yet taken part predicts poorly. The paper and the authors'
code average with equal weights: base `Algorithm(aggregator=WeightedMean("uniform"))`. The code picks the layers by "bn" in
their names, this class by their types. Weight decay leaves out γ and β, as it does all personal parameters, so with it FedBN of
one client is not FedAvg.
"""

from __future__ import annotations

from typing import Any, Literal

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_fl.algorithms.algorithm import Algorithm, is_or_wraps
from lightning_fl.algorithms.method import Wrapper
from lightning_fl.checks import check_choice
from lightning_fl.errors import require
from lightning_fl.slots import forwards

BATCH_NORMS: tuple[type[nn.Module], ...] = (nn.modules.batchnorm._BatchNorm,)
ALL_NORMS: tuple[type[nn.Module], ...] = (
    *BATCH_NORMS,
    nn.modules.instancenorm._InstanceNorm,
    nn.GroupNorm,
    nn.LayerNorm,
)


@forwards("base")
class FedBN(Wrapper):
    """Any method, with clients that keep their normalisation layers."""

    def __init__(self, base: Algorithm | None = None, norms: Literal["batch", "all"] = "batch", **slots: Any) -> None:
        """Take over the slots of the base method.

        Args:
            base: Method of all other layers: FedAvg, FedProx, SCAFFOLD …; FedAvg if not given.
            norms: Keep the batch norms, as in the paper, or `all` norms: group, layer and instance norms, too.
        """
        check_choice("norms", norms, ("batch", "all"))
        is_itself = isinstance(base, Algorithm) and is_or_wraps(base, FedBN)
        require(
            base is None or (isinstance(base, Algorithm) and not is_itself and base.trains_in_rounds),
            "base must be a method that trains clients in rounds, such as FedAvg(), FedProx() or SCAFFOLD(), got "
            f"{'FedBN itself' if is_itself else repr(base)}.",
        )
        super().__init__(base=Algorithm() if base is None else base, **slots)
        self.norms = norms

    def personal_parameters(self, module: nn.Module) -> list[str]:
        """Return scale and shift of the norms, and the base method's personal parameters."""
        norms = self._names(module)
        if not norms:
            rank_zero_warn(
                f"{type(module).__name__} has no {'' if self.norms == 'all' else 'batch '}norm, so FedBN keeps nothing on the "
                "clients and is its base method"
                + ("." if self.norms == "all" else "; norms='all' keeps group, layer and instance norms.")
            )
        own = {*self.base.personal_parameters(module), *norms}
        return [name for name, parameter in module.named_parameters() if parameter.requires_grad and name in own]

    def personal_buffers(self, module: nn.Module) -> list[str]:
        """Return the running statistics of the norms, and the base method's personal buffers."""
        own = {*self.base.personal_buffers(module), *self._names(module)}
        return [name for name, _ in module.named_buffers() if name in own]

    def _names(self, module: nn.Module) -> set[str]:
        """Return the names of all parameters and buffers of the norms."""
        types = ALL_NORMS if self.norms == "all" else BATCH_NORMS
        return {
            f"{path}.{leaf}" if path else leaf
            for path, part in module.named_modules()
            if isinstance(part, types)
            for leaf in (*part._parameters, *part._buffers)
        }

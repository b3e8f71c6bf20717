"""FedBN: Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021 (arXiv:2102.07623).

client k:  (y, b) ← (w, b_k);  (y, b) ← (y, b) − η ∇F_k(y, b)      b: scale, shift and running statistics of the norms
           b_k ← b;  upload Δ_k = y − w                            rule: the base method's, personal: PersonalNorms
server:    as in the base method; FedAvg: w ← w + Σ_k n_k Δ_k / Σ_k n_k

For a layer of c channels, 4c numbers are not sent: the trained γ and β, and the running mean and variance. A client's b_k
begin at the module's initial values, so a client that has not yet taken part predicts poorly. The paper and the authors'
code average with equal weights: base `Algorithm(aggregator=WeightedMean("uniform"))`. The authors' code finds the layers
by "bn" in their names, this class by their types. Weight decay skips γ and β, like all personal parameters, so with weight
decay FedBN with one client is not FedAvg.
"""

from __future__ import annotations

from typing import Any, Literal

from lightning_fl.algorithms.algorithm import Algorithm
from lightning_fl.algorithms.method import Wrapper
from lightning_fl.personal import PersonalNorms


class FedBN(Wrapper):
    """Any method; each client keeps its own normalisation layers."""

    def __init__(self, base: Algorithm | None = None, norms: Literal["batch", "all"] = "batch", **slots: Any) -> None:
        """Take over the slots of the base method.

        Args:
            base: Method of all other layers: FedAvg, FedProx, SCAFFOLD …; FedAvg if not given.
            norms: Keep the batch norms, as in the paper, or `all` norms: group, layer and instance norms, too.
        """
        super().__init__(base, [PersonalNorms(norms)], **slots)

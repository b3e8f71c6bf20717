"""IFCA: Ghosh et al., An Efficient Framework for Clustered Federated Learning, NeurIPS 2020 (arXiv:2006.04088), with averaged
models.

client k:  receives w_1 … w_C;  j = argmin_j F_k(w_j)              rule: BestModel
           y ← w_j;  y ← y − η ∇F_k(y);  upload y − w_j and j
           predicts with the w_j of the least F_k                  personal: BestOfModels
server:    w_j ← w_j + Σ n_k Δ_k / Σ n_k over the clients of j     aggregator: MeanOfEach, steps: Apply, FurtherModels

C models down, one model and C bits up; with C = 1 it is FedAvg. Clusters form if the models begin near enough to the clusters'
optima. A model that no client of a round chooses stays as it is; `ifca/models` counts the trained models. The paper draws all
models at random; here they are the module's initial model with some signs flipped at random. The paper averages with equal
weights, this class by samples.

`val/…` is the mean over the clients, each with the model that it chooses. `val/…_server`, `model.ckpt` and pruning by
magnitude use the first model. The C forward passes over a client's samples to compute losses count as time and energy
(`clients/loss_samples`), not as steps. Clients train one after the other.
"""

from __future__ import annotations

from typing import Annotated, Any

from annotated_types import Ge

from lightning_fl.aggregators import MeanOfEach, WeightedMean
from lightning_fl.algorithms.method import Method
from lightning_fl.personal import BestOfModels
from lightning_fl.rules import BestModel, LocalOptimizer
from lightning_fl.steps import Apply, FurtherModels


class IFCA(Method):
    """FedAvg for clusters: each client trains and uses the one of several models with the lowest loss on its samples."""

    def __init__(self, clusters: Annotated[int, Ge(1)] = 2, turned: float = 0.5, **slots: Any) -> None:
        """Fill the slots rule, aggregator, steps and personal.

        Args:
            clusters: Models C ≥ 1 of the server; 1 is FedAvg.
            turned: Probability in (0, 1) that the sign of a number of the module's model is turned in another one at the
                beginning; 0.5 draws it anew, less stays near pretrained weights.
        """
        is_one = clusters == 1
        super().__init__(
            (Apply(),) if is_one else (Apply(), FurtherModels(clusters, turned)),
            rule=LocalOptimizer() if is_one else BestModel(clusters),
            aggregator=WeightedMean() if is_one else MeanOfEach(clusters),
            steps=(),
            personal=() if is_one else [BestOfModels(clusters)],
            **slots,
        )

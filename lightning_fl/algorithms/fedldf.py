"""FedLDF and its baselines: Wang et al., Communication-Efficient Model Aggregation with Layer Divergence Feedback in Federated
Learning, IEEE Communications Letters 2024 (arXiv:2404.08324).

client k:  trains as in FedAvg; δ_kl = ‖w_k^(l) − w^(l)‖₂ goes up       exchange: LayerDivergence
server:    s_kl = 1 for the n clients with the largest δ_kl; goes down
client k:  sends w_k^(l) − w^(l) where s_kl = 1
server:    w^(l) ← w^(l) + Σ_k s_kl n_k Δ_k^(l) / Σ_k s_kl n_k           aggregator: MaskedMean, step: Apply

RandomLayers    s_kl = 1 for n clients drawn for each layer               exchange: DrawnLayers
HDFL            n drawn clients send their whole models                   exchange: DrawnClients
FedADP          each client sends the units that changed most             exchange: PrunedUnits

HDFL and FedADP are as in FedLDF's paper, which lets them send as much as FedLDF. HDFL itself (Zawad et al., HDFL: A
Heterogeneity and Client Dropout-Aware Federated Learning Framework, CCGrid 2023) does not choose clients at random. FedADP's
rule is ours, as the paper only names its pruning ratio.
"""

from __future__ import annotations

from typing import Any, Literal

from lightning_fl.aggregators import MaskedMean
from lightning_fl.algorithms.method import Method
from lightning_fl.exchanges import DrawnClients, DrawnLayers, LayerDivergence, PrunedUnits
from lightning_fl.vectors.layer_groups import Groups


class FedLDF(Method):
    """FedAvg in which, for each layer, only the n clients that diverged most send that layer."""

    def __init__(
        self,
        n: int = 4,
        groups: Groups = "layer",
        broadcast: Literal["selected", "all"] = "selected",
        print_groups: bool = False,
        **slots: Any,
    ) -> None:
        """Fill the exchange and aggregator slots.

        Args:
            n: Number of clients that send each layer, 1 ≤ n ≤ K; n = K is FedAvg.
            groups: Definition of a layer: `layer` (found in the network), `tensor` (each alone), or a map to parameters' names.
            broadcast: Charge the broadcast of the model to the K selected clients, or to all N.
            print_groups: Print the layers before the first round, as a map that groups takes.
        """
        exchange = LayerDivergence(n=n, groups=groups, broadcast=broadcast, print_groups=print_groups)
        super().__init__(exchange=exchange, aggregator=MaskedMean(), **slots)


class RandomLayers(Method):
    """FedAvg in which n clients, drawn anew for each layer, send that layer."""

    def __init__(self, n: int = 4, groups: Groups = "layer", print_groups: bool = False, **slots: Any) -> None:
        """Fill the exchange and aggregator slots.

        Args:
            n: Number of clients that send each layer, 1 ≤ n ≤ K; n = K is FedAvg.
            groups: Definition of a layer: `layer` (found in the network), `tensor` (each alone), or a map to parameters' names.
            print_groups: Print the layers before the first round, as a map that groups takes.
        """
        super().__init__(
            exchange=DrawnLayers(n=n, groups=groups, print_groups=print_groups), aggregator=MaskedMean(), **slots
        )


class HDFL(Method):
    """FedAvg in which n of the round's clients, drawn at random, send their models."""

    def __init__(self, n: int = 4, **slots: Any) -> None:
        """Fill the exchange and aggregator slots.

        Args:
            n: Number of clients that send their models, 1 ≤ n ≤ K; n = K is FedAvg.
        """
        super().__init__(exchange=DrawnClients(n=n), aggregator=MaskedMean(), **slots)


class FedADP(Method):
    """FedAvg in which each client sends the neurons and channels that changed most."""

    def __init__(
        self,
        keep: float = 0.2,
        score: Literal["delta", "magnitude"] = "delta",
        per_layer: bool = False,
        groups: Groups = "layer",
        print_groups: bool = False,
        **slots: Any,
    ) -> None:
        """Fill the exchange and aggregator slots.

        Args:
            keep: Share of the parameters that a client sends, in (0, 1]; 1 is FedAvg.
            score: Rank units by their change (`delta`) or by their trained weights (`magnitude`).
            per_layer: Keep the same share of each layer rather than of the whole model.
            groups: Definition of a layer: `layer` (found in the network), `tensor` (each alone), or a map to parameters' names.
            print_groups: Print the layers before the first round, as a map that groups takes.
        """
        exchange = PrunedUnits(keep=keep, score=score, per_layer=per_layer, groups=groups, print_groups=print_groups)
        super().__init__(exchange=exchange, aggregator=MaskedMean(), **slots)

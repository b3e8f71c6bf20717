"""Every client alone, the lower bound of a comparison, as `local` in Li et al., Ditto: Fair and Robust Federated Learning Through
Personalization, ICML 2021 (arXiv:2012.04221): what a client reaches with its own samples.

client k:  y_k ← y_k − η ∇F_k(y_k; minibatch), from where its last round ended             personal: TrainedAlone
server:    nothing: no byte crosses, and its model stays the initial one                  exchange: NoUploads

A round trains the clients of the round as FedAvg does with the same seed: as many optimiser steps on the same minibatches,
with the optimiser begun anew. All begin at the same initial model, with which a client predicts that has not taken part.
`val/accuracy` is the mean over the clients' models on the common samples, `val/accuracy_local` that on each client's own
held-out samples, `val/…_server` that of the initial model. If all clients take part in the first round, the models are the
second ones of Ditto with λ = 0, in half the time.
"""

from __future__ import annotations

from typing import Any

from lightning_fl.aggregators import WeightedMean
from lightning_fl.algorithms.method import Method
from lightning_fl.codecs import Dense
from lightning_fl.exchanges import NoUploads
from lightning_fl.personal import TrainedAlone
from lightning_fl.steps import Apply


class LocalOnly(Method):
    """Clients that each train a model of their own, alone: the lower bound of a comparison."""

    def __init__(self, **slots: Any) -> None:
        """Fill all slots but the rule."""
        super().__init__(
            (Apply(),),
            uplink=Dense(),
            downlink=Dense(),
            exchange=NoUploads(),
            aggregator=WeightedMean(),
            steps=(),
            personal=(TrainedAlone(),),
            **slots,
        )

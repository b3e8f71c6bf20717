"""Every client alone, the lower bound of a comparison, as `local` in Li et al., Ditto: Fair and Robust Federated Learning Through
Personalization, ICML 2021 (arXiv:2012.04221): what a client reaches with its own samples.

client k:  y_k ← y_k − η ∇F_k(y_k; minibatch), from where its last round ended             personal: TrainedAlone
server:    nothing: no byte crosses, and its model stays the initial one                  exchange: NoUploads

A round trains its clients as FedAvg does with the same seed: as many optimiser steps on the same minibatches, with a new
optimiser. All clients begin at the same initial model; a client that has not taken part predicts with it. `val/accuracy` is the
mean over the clients' models on the common samples, `val/accuracy_local` the mean on each client's own held-out samples, and
`val/…_server` the value of the initial model. If all clients take part in the first round, the models equal the personal models
of Ditto with λ = 0, in half the time.
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
    """Each client trains alone on its own samples: the lower bound of a comparison."""

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

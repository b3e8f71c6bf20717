"""Centralised training, the upper bound of a comparison, as in McMahan et al., Communication-Efficient Learning of Deep Networks
from Decentralized Data, AISTATS 2017 (arXiv:1602.05629), who compare FedAvg with SGD on the samples of all clients.

w ← w − η ∇F(w; minibatch of all clients' samples)              data: FederatedDataModule.pooled, exchange: InPlace

Module, optimiser, schedules, metric and evaluation are those of the other methods, and no byte is sent. A round makes as many
steps as K of N clients together in FedAvg: K·L with `local_steps` L, or E·K/N passes over all samples with `local_epochs` E.
With all clients in every round, a round equals E epochs of `lightning.Trainer` on `data.train_dataloader()`. With K < N each
round draws as many samples as a round's clients have on average. So the same settings compare with every other method round by
round, at the same number of gradients.

The optimiser restarts in every round, as a client's does. `lightning.Trainer` keeps the optimiser's state, so with momentum or
Adam its results differ. Training uses the clients' training samples, not the server's. `clients/selected` is 1; `dropout_rate`
and `straggler_rate` treat the one place as a client. With a clock it has the clock's own speeds, and is never late.
"""

from __future__ import annotations

from typing import Any

from lightning_fl.aggregators import WeightedMean
from lightning_fl.algorithms.method import Method
from lightning_fl.codecs import Dense
from lightning_fl.data import FederatedDataModule
from lightning_fl.exchanges import InPlace
from lightning_fl.steps import Apply


class Centralised(Method):
    """Training on all clients' samples in one place, with as many steps as a round's clients: the upper bound of a comparison."""

    pools_clients = True

    def __init__(self, **slots: Any) -> None:
        """Fill all slots but the rule."""
        super().__init__(
            (Apply(),),
            uplink=Dense(),
            downlink=Dense(),
            exchange=InPlace(),
            aggregator=WeightedMean(),
            steps=(),
            personal=(),
            **slots,
        )

    def arrange_data(self, data: FederatedDataModule) -> FederatedDataModule:
        """Give all samples to one client."""
        return data.pooled()

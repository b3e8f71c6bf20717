"""Centralised training, the upper bound of a comparison, as in McMahan et al., Communication-Efficient Learning of Deep Networks
from Decentralized Data, AISTATS 2017 (arXiv:1602.05629), who compare FedAvg with SGD on the samples of all clients.

w ← w − η ∇F(w; minibatch of all clients' samples)              data: FederatedDataModule.pooled, exchange: InPlace

It has the module, optimiser, schedules, metric and evaluation of the other methods, and no byte crosses. A round is as much
work as one of FedAvg: the steps that K of N clients would make together. With `local_steps` L these are K·L; with `local_epochs`
E it passes E·K/N times over all samples. With all clients in every round, a round is therefore E epochs of `lightning.Trainer`
on `data.train_dataloader()`; with K < N it reads as many samples as the clients of a round on average, drawn anew in each
round. So the same settings compare with every other method round by round, at the same cost in gradients.

The optimiser begins anew in every round, as a client's does; with momentum or Adam, `lightning.Trainer`, which keeps its state,
differs. The samples are those of the clients' training parts, not the server's. They are in one place, which is what
`clients/selected` counts; `dropout_rate` and `straggler_rate` apply to it as to a client. With a clock of clients it has the
clock's own speeds, and is never late.
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

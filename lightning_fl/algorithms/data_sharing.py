"""Data sharing: Zhao et al., Federated Learning with Non-IID Data, 2018 (arXiv:1806.00582), as in FedDUMAP (Liu et al., ACM
TIST 2024, doi:10.1145/3690648).

before the first round: every client that has samples receives min(n_0, cap · Σ_k n_k) of the server's samples, drawn at random
client k:  trains on its own and these samples; n_k counts both
the rest is FedAvg
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Interval

from lightning_fl.algorithms.method import Method
from lightning_fl.checks import Called, whole_share
from lightning_fl.data import FederatedDataModule
from lightning_fl.errors import require
from lightning_fl.slots import SetupTurn


class DataSharing(Method):
    """FedAvg with clients that also train on samples of the server."""

    def __init__(
        self,
        cap: Annotated[
            float, Interval(gt=0, le=1), Called("cap, the limit of the samples that a client receives,")
        ] = 0.05,
        warmup_epochs: Annotated[int, Ge(0)] = 0,
        **slots: Any,
    ) -> None:
        """Keep FedAvg's parts.

        Args:
            cap: Limit of what a client receives, as a share of all clients' samples, in (0, 1].
            warmup_epochs: Epochs of training on the server's samples before the first round, at least 0.
        """
        super().__init__(**slots)
        self.cap = cap
        self.warmup_epochs = warmup_epochs

    def arrange_data(self, data: FederatedDataModule) -> FederatedDataModule:
        """Give every client that has samples its part of the server's."""
        num_server = len(data.server_indices)
        require(
            num_server > 0,
            "DataSharing has no server data to share: set --data.server_fraction, for example 0.05.",
        )
        return data.share(min(num_server, whole_share(self.cap, int(data.client_indices.sizes.sum()))))

    def prepare(self, turn: SetupTurn) -> None:
        """Send the samples, as bytes if they are stored as bytes, warm up the model, and prepare further steps."""
        data = turn.data
        for client, held in enumerate(data.client_indices):
            received = held[np.isin(held, data.server_indices)]
            if len(received):
                turn.channel.send_down(
                    client, {f"data/{part}": x for part, x in enumerate(data.train.stored(received))}
                )
        if self.warmup_epochs:
            trained = turn.server.train(
                {"model": turn.params, "buffers": turn.buffers}, epochs=self.warmup_epochs
            ).message
            turn.params = turn.params + trained["model"]
            turn.buffers = turn.buffers + trained.get("buffers", 0)
        super().prepare(turn)

"""What the server's steps see and change: in a round, and before the first one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_fl.slots.exchange import Channel
from lightning_fl.slots.message import Message
from lightning_fl.slots.server import Learner, Server
from lightning_fl.slots.setting import Setting

if TYPE_CHECKING:
    from lightning_fl.data import FederatedDataModule


@dataclass
class ServerTurn:
    """What the server's steps see and change in one round.

    Attributes:
        setting: of the run.
        server: the server's own samples, and training on them.
        round: index of the round, from 0.
        clients: whose uploads were accepted.
        num_samples: their samples together, n'.
        shared: what the steps sent down with the model in this round.
        params: the model at the start of the round (d,), not to be changed.
        buffers: its float buffers (d_b,), not to be changed.
        merged: what the aggregator made of the uploads.
        proposal: the next model as the steps so far propose it (d,); a step replaces it.
        proposed_buffers: likewise for the buffers.
        mask: the parameters that pruning keeps (d,), all others being 0; None: all. A step may replace it.
        metrics: what the steps report, logged with the round.
    """

    setting: Setting
    server: Server
    round: int
    clients: Sequence[int]
    num_samples: float
    shared: Message
    params: Tensor
    buffers: Tensor
    merged: Message
    proposal: Tensor
    proposed_buffers: Tensor
    mask: Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    def move(self, message: Message, share: float) -> None:
        """Add `share` times the deltas of `message` to the proposal, and to what else is merged under their names."""
        for name, delta in message.items():
            if name == "model":
                self.proposal = self.proposal + share * delta
            elif name == "buffers":
                self.proposed_buffers = self.proposed_buffers + share * delta
            else:
                self.merged[name] = self.merged[name] + share * delta


@dataclass
class SetupTurn:
    """The turn before the first round; the ledger books what crosses in it as set-up. A resumed run does not repeat it.

    Attributes:
        setting: of the run.
        data: as the clients hold them in this method (`Algorithm.arrange_data`).
        channel: to and from the clients; numbers cross whole, whatever the codecs of the rounds.
        server: the server's own samples, and training on them.
        learner: trains models that are not yet the federation's.
        params: the initial model (d,); may be replaced.
        buffers: its float buffers (d_b,); may be replaced.
        mask: the parameters that pruning keeps (d,), all others being 0; None: all; may be replaced.
    """

    setting: Setting
    data: FederatedDataModule
    channel: Channel
    server: Server
    learner: Learner
    params: Tensor
    buffers: Tensor
    mask: Tensor | None = None

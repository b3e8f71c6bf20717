"""Data that the server's steps read and change in a round, and before the first round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_fl.slots.aggregator import kept_columns
from lightning_fl.slots.exchange import Channel, Uploader
from lightning_fl.slots.message import Message
from lightning_fl.slots.round_context import RoundContext
from lightning_fl.slots.server import Learner, Server

if TYPE_CHECKING:
    from lightning_fl.data import FederatedDataModule


@dataclass
class ServerTurn:
    """Data of one round that the server's steps read and change.

    Attributes:
        context: facts about the run.
        server: the server's own samples, and training on them.
        round: index of the round, from 0.
        clients: indices of the clients whose uploads were accepted.
        num_samples: number of their samples together, n'. In an asynchronous round, a client with two uploads counts twice.
        shared: entries that the steps sent down with the model in this round.
        params: model at the start of the round (d,), not to be changed.
        buffers: its float buffers (d_b,), not to be changed.
        merged: message that the aggregator returned, and the entries that the exchange provides.
        proposal: next model as proposed so far (d,), at first `params`; a step replaces it.
        proposed_buffers: next float buffers as proposed so far (d_b,), at first `buffers`; a step replaces them.
        mask: parameters that pruning keeps (d,), bools, all others being 0; None for all. A step may replace it.
        metrics: values that the steps report, by the name under which they are logged with the round.
        uploaders: clients of the rows of `uploads/…`, in their order; () if the aggregator keeps none.
    """

    context: RoundContext
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
    uploaders: Sequence[Uploader] = ()

    def uploads(self, name: str) -> Tensor:
        """Return the clients' vectors of an entry (K, ·) that the aggregator has kept, in the order of the clients."""
        rows = self.merged[f"uploads/{name}"]
        return rows[self._order] if self.uploaders else rows

    def report_kept(self, weights: Tensor) -> None:
        """Report `kept_columns` of the weights (K,) that a step has given to the uploads, in the order of the clients."""
        if self.uploaders:
            self.metrics |= kept_columns(weights, [self.uploaders[row] for row in self._order])

    @property
    def _order(self) -> list[int]:
        return sorted(range(len(self.uploaders)), key=lambda row: self.uploaders[row].client)

    def move(self, message: Message, share: float) -> None:
        """Add `share` times each delta of `message` to the proposal, the proposed buffers, or the merged entry of that name."""
        for name, delta in message.items():
            if name == "model":
                self.proposal = self.proposal + share * delta
            elif name == "buffers":
                self.proposed_buffers = self.proposed_buffers + share * delta
            else:
                self.merged[name] = self.merged[name] + share * delta


@dataclass
class SetupTurn:
    """Data of the turn before the first round. The ledger counts its transfers as set-up. A resumed run does not repeat it.

    Attributes:
        context: facts about the run.
        data: data as the clients hold them in this algorithm (`Algorithm.arrange_data`).
        channel: connection to the clients; it sends numbers uncompressed, not through the algorithm's codecs.
        server: the server's own samples, and training on them.
        learner: trains models apart from the federation's, such as teachers.
        params: initial model (d,); may be replaced.
        buffers: its float buffers (d_b,); may be replaced.
        mask: parameters that pruning keeps (d,), bools, all others being 0; None for all; may be replaced.
    """

    context: RoundContext
    data: FederatedDataModule
    channel: Channel
    server: Server
    learner: Learner
    params: Tensor
    buffers: Tensor
    mask: Tensor | None = None

"""Queries of callbacks to clients, such as a pruning rate of the model, and their communication costs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from lightning_fl.codecs import Dense
from lightning_fl.link.ledger import Ledger
from lightning_fl.link.link import Link
from lightning_fl.slots import Message, RoundContext


@dataclass
class CallbackQueries:
    """Queries about the model that clients have answered since the last round.

    Attributes:
        counts: number of values that each client has returned, by client.
        about: model of the queries, `model` (d,) and `buffers` (d_b,).
    """

    counts: dict[int, int] = field(default_factory=dict)
    about: Message = field(default_factory=dict)

    def record(self, client: int, count: int, about: Message) -> None:
        """Record that a client has returned `count` numbers about a model."""
        self.about = self.about or about
        self.counts[client] = self.counts.get(client, 0) + count

    def charge(self, ledger: Ledger, context: RoundContext, recipients: Collection[int]) -> Link:
        """Charge the next round for the queries, clear them, and return the link that they have crossed.

        Each client that answered receives the whole model and sends its numbers. Those that the next round's broadcast goes to
        receive the unpruned part with it, so they are charged only for the pruned part.

        Args:
            ledger: ledger of the run.
            context: context of the next round.
            recipients: clients that the broadcast of the next round goes to.
        """
        booked, layout = Ledger(), (context.unpruned or context).layout
        left = {"model": layout.numel, "buffers": context.buffer_layout.numel}
        rest = {name: x[left[name] :] for name, x in self.about.items()}  # any numbers will do: only their count costs
        link = Link(context, Dense(), Dense(), booked, timed=list(self.counts))
        link.send_to_all([client for client in self.counts if client not in recipients], self.about)
        link.send_to_all([client for client in self.counts if client in recipients], rest)
        for client, count in self.counts.items():
            link.send_up(client, {"scalars/answers": self.about["model"].new_zeros(count)})
        ledger.add(booked.round_bits, ahead=True)
        self.counts, self.about = {}, {}
        return link

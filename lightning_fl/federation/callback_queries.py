"""What callbacks ask of clients, such as how much of the model may be pruned, and what it takes to ask and to answer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from lightning_fl.codecs import Dense
from lightning_fl.communication.ledger import Ledger
from lightning_fl.communication.link import Link
from lightning_fl.slots import Message, Setting


@dataclass
class CallbackQueries:
    """Questions about the model that clients have answered since the last round.

    Attributes:
        counts: by client, how many numbers it has told.
        about: the model that it was asked about, `model` (d,) and `buffers` (d_b,).
    """

    counts: dict[int, int] = field(default_factory=dict)
    about: Message = field(default_factory=dict)

    def record(self, client: int, count: int, about: Message) -> None:
        """Take note of some numbers that a client has told."""
        self.about = self.about or about
        self.counts[client] = self.counts.get(client, 0) + count

    def charge(self, ledger: Ledger, setting: Setting, cohort: Collection[int]) -> None:
        """Count what has crossed as the next round's, and forget it.

        The model goes down whole to clients that were asked, and their numbers come up. Those that take part in the round
        receive what has been left of the model in any case, and so only the rest besides.

        Args:
            ledger: of the run.
            setting: of the round.
            cohort: its clients.
        """
        booked, layout = Ledger(), (setting.unpruned or setting).layout
        left = {"model": layout.numel, "buffers": setting.buffer_layout.numel}
        rest = {name: x[left[name] :] for name, x in self.about.items()}  # whichever numbers it is, they cost the same
        link = Link(setting, Dense(), Dense(), booked)
        link.send_to_all([client for client in self.counts if client not in cohort], self.about)
        link.send_to_all([client for client in self.counts if client in cohort], rest)
        for client, count in self.counts.items():
            link.send_up(client, {"scalars/answers": self.about["model"].new_zeros(count)})
        ledger.add_ahead(booked.round_bits)
        self.counts, self.about = {}, {}

"""Networks of clients that train smaller ones: their broadcasts, and what they compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from lightning_fl.data import FederatedDataModule
from lightning_fl.errors import require
from lightning_fl.evaluation.macs import count_macs
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.flat_module.smaller_network import SmallerNetwork, statistics_of
from lightning_fl.flat_module.static_statistics import settle_statistics, statistic_batches
from lightning_fl.link.link import Link
from lightning_fl.slots import Exchange, Message, RoundContext, Width
from lightning_fl.state.run_state import Run

Smaller = Mapping[int, tuple[SmallerNetwork, Message]]
"""Smaller network of each of some clients, and what the client has received of it."""
UNITS = "scalars/units"
"""Name of the seed of 64 bits that tells a client which units its network has."""


@dataclass(eq=False)
class NetworksOfClients:
    """Networks that the clients of a run train.

    Attributes:
        exchange: tells the width of each.
        flat_module: holds the whole network.
        data: samples of the clients.
    """

    exchange: Exchange
    flat_module: FlatModule
    data: FederatedDataModule
    _macs: dict[tuple[float, Any], int | None] = field(default_factory=dict, init=False)

    def network(self, width: Width) -> SmallerNetwork:
        """Return the network of a width; raise `UserError` if the module cannot be cut."""
        return self.flat_module.smaller_network(width, self._example)

    def broadcast(self, link: Link, clients: Sequence[int], whole: Message) -> tuple[Message, Smaller]:
        """Send each client its part of the model, to the clients of one network together.

        Args:
            link: link of the round.
            clients: clients to which the broadcast is charged.
            whole: message of the whole model, with its float buffers (d_b,).

        Returns:
            The model as the clients of the widest network receive it, with the rest as the server has it; the networks that are
            not the whole one, and what their clients have received.
        """
        message = whole if self.flat_module.buffer_layout.names else {n: x for n, x in whole.items() if n != "buffers"}
        by_width: dict[Width | None, list[int]] = {}
        for client in clients:
            by_width.setdefault(self._width(client, link.context), []).append(client)
        # The widest comes last.
        widths = sorted(by_width, key=lambda width: 1.0 if width is None else width.share)
        smaller: dict[int, tuple[SmallerNetwork, Message]] = {}
        received = whole
        for width in widths:
            if width is None:
                received = whole | link.broadcast(by_width[None], message)
                continue
            network = self.network(width)
            seed = {} if width.seed is None else {UNITS: torch.tensor([width.seed])}
            sent = link.broadcast(by_width[width], message | seed, network.sent)
            sent.pop(UNITS, None)
            received = whole | network.sent.scatter(network.sent.gather(sent), whole)
            smaller |= dict.fromkeys(by_width[width], (network, network.submodel.gather(received)))
        return received, smaller

    def _width(self, client: int, context: RoundContext) -> Width | None:
        """Return the width of a client's network; None for the whole one, if that has no static statistics."""
        width = self.exchange.width(client, context)
        return Width(1.0) if width is None and self._has_statistics else width

    @cached_property
    def _has_statistics(self) -> bool:
        return bool(statistics_of(self.flat_module.module))

    def check(self) -> None:
        """Raise `UserError` if the module cannot be cut, or makes its steps itself."""
        module = self.flat_module.module
        require(
            not self.flat_module.is_manual,
            f"{type(module).__name__} makes its steps itself (automatic_optimization is False), so that clients cannot train "
            "smaller networks of it: use a method whose clients train the whole one, such as FedAvg.",
        )
        for width in (Width(0.5), *self.exchange.validated_widths):
            self.network(width)

    def settle_statistics(self, run: Run) -> None:
        """Compute the static statistics of batch normalisations anew from samples, for the server's model of a run."""
        flat_module = self.flat_module
        if not self._has_statistics:
            return
        flat_module.load_server_model(run)
        settle_statistics(flat_module, statistic_batches(self.data), self.data.train.resident)
        run.buffers, run.counters = flat_module.read_buffers().clone(), flat_module.read_counters()

    def share(self, context: RoundContext, macs: int | None, client: int) -> float:
        """Return the multiply-accumulates of a client's network as a share of those of the whole one, which has `macs`.

        If its steps draw narrower networks, this is the mean over these, besides the widest if it teaches them.
        """
        width = self._width(client, context)
        if width is None or not macs:
            return 1.0
        widths = [Width(share) for share in width.in_steps] or [width]
        shares = [(self.macs(each) or macs) / macs for each in widths]
        if width.distils:
            *narrower, widest = shares
            return widest + sum(narrower) / len(shares)
        return sum(shares) / len(shares)

    def macs(self, width: Width) -> int | None:
        """Return the multiply-accumulates of a sample's forward pass; None if they cannot be counted."""
        key = width.share, self.flat_module.layout
        if key not in self._macs:
            samples, resident = self.data.client(self.data.largest_client), self.data.train.resident
            with self.flat_module.cut_to(self.network(width)):
                self._macs[key] = count_macs(self.flat_module, samples, resident)
        return self._macs[key]

    def _example(self) -> Any:
        samples = self.data.client(self.data.largest_client)
        return self.flat_module.inputs(next(iter(samples.batches(2))), self.data.train.resident)

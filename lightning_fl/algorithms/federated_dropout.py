"""Federated Dropout: Caldas et al., Expanding the Reach of Federated Learning by Reducing Client Resource Requirements, 2018
(arXiv:1812.07210).

round t:    of the c_l units of every hidden layer l, ⌈(1 − rate) c_l⌉ stay, drawn anew        exchange: DrawnUnits
client k:   receives these units' numbers as a smaller dense network, and a seed of 64 bits; trains it as in FedAvg
server:     every number is the mean of the clients that have it, and stays where none has it   aggregator: MaskedMean

Units are filters of convolutions and neurons of linear layers. Inputs and outputs of the network stay whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_fl.aggregators import MaskedMean
from lightning_fl.algorithms.method import Method
from lightning_fl.exchanges import DrawnUnits


class FederatedDropout(Method):
    """FedAvg in which clients train random smaller networks, drawn anew in each round."""

    def __init__(
        self,
        rate: float = 0.25,
        per_client: bool = False,
        scaled: bool = False,
        deadline: float | None = None,
        rates: Sequence[float] | None = None,
        **slots: Any,
    ) -> None:
        """Fill the exchange and aggregator slots.

        Args:
            rate: Share of the units of every hidden layer that are left out, in [0, 1); 0 is FedAvg.
            per_client: True if each client draws units of its own; False if all clients of a round have the same.
            scaled: True to divide the outputs of hidden layers by 1 − rate in training, as dropout does.
            deadline: Simulated seconds above 0: every client has the smallest of the rates with which a clock of clients expects
                its round to take no longer, or else the largest. None: all have `rate`.
            rates: Rates in [0, 1) among which the deadline decides, in place of `rate`.
        """
        exchange = DrawnUnits(rate, per_client, scaled, deadline, rates)
        super().__init__(exchange=exchange, aggregator=MaskedMean(), **slots)

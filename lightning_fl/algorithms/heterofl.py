"""HeteroFL: Diao et al., HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients, ICLR
2021 (arXiv:2010.01264).

client k of level r_k:  W_k = the first ⌈r_k c_l⌉ of the c_l units of every hidden layer l     exchange: FirstUnits
                        trains as in FedAvg; in training the outputs of hidden layers are divided by r_k (the Scaler), and with
                        `masked` those of classes that it lacks are 0 (the masked cross-entropy)
server:                 every number is the mean of the clients that have it, and stays where none has it
                                                                                               aggregator: MaskedMean

With a deadline, r_k is the widest level with which client k is expected to meet it. Clients are weighted by samples, as in
FedAvg; in the paper all clients have equally many. Stronger clients also train every number that a weak client has. Units of
layers whose outputs are added, as in a residual block, are chosen together. Inputs and outputs of the network stay whole.
"""

from __future__ import annotations

from typing import Any

from lightning_fl.aggregators import MaskedMean
from lightning_fl.algorithms.method import Method
from lightning_fl.exchanges import FirstUnits

LEVELS = {1.0: 0.5, 0.5: 0.3, 0.25: 0.2}


class HeteroFL(Method):
    """FedAvg in which weak clients train smaller networks, made of the first units of every hidden layer."""

    def __init__(
        self,
        levels: dict[float, float] | list[float] = LEVELS,
        fixed: bool = True,
        scaled: bool = True,
        deadline: float | None = None,
        masked: bool | None = None,
        **slots: Any,
    ) -> None:
        """Fill the exchange and aggregator slots.

        Args:
            levels: Share of the clients by level r, the share of a hidden layer's units that they train; {1: 1} is FedAvg.
                With a deadline, a list of levels will do.
            fixed: True if a client keeps its level, and the shares are exact; False if every client draws its level in each
                round.
            scaled: True to divide the outputs of hidden layers by r in training; for networks with normalisation.
            deadline: Simulated seconds above 0: every client trains the widest of the levels with which a clock of clients
                expects its round to take no longer, or else the smallest, and the shares mean nothing. None: by the shares.
            masked: True for the paper's masked cross-entropy: in training, outputs of the last linear layer are 0 where a client
                has no sample of their class.
        """
        exchange = FirstUnits(levels, fixed, scaled, deadline=deadline, masked=bool(masked))
        super().__init__(exchange=exchange, aggregator=MaskedMean(), **slots)

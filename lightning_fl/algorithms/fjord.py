"""FjORD: Horváth et al., FjORD: Fair and Accurate Federated Learning under Heterogeneous Targets with Ordered Dropout, NeurIPS
2021 (arXiv:2102.13451).

client k of width p_k:  every step draws p uniformly from the widths up to p_k, and trains the first ⌈p c_l⌉ of the c_l units of
                        every hidden layer l (ordered dropout); with `distilled` it trains all of p_k in every step, and those
                        of p < p_k on KL(softmax(z) ‖ softmax(z_p)) alone, z and z_p the outputs of both for the classes;
                        it receives and sends the network of p_k
                                                                                      exchange: FirstUnits, ordered
server:                 every number is the mean of the clients that have it, and stays where none has it
                                                                                      aggregator: MaskedMean

Each width is the largest of equally many clients; with a deadline p_k is the widest with which client k is expected to meet it.
Units that a step leaves out have a gradient of 0; momentum and weight decay of the module's optimiser still change them. In the
self-distillation temperature and weight are 1 (T = α = 1), as in Flower's baseline FjORD, and p_k learns nothing from p. A step
computes both networks on the same samples, with the same random draws of the module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_fl.aggregators import MaskedMean
from lightning_fl.algorithms.method import Method
from lightning_fl.errors import require
from lightning_fl.exchanges import FirstUnits


class FjORD(Method):
    """FedAvg with ordered dropout: in every step a client draws a width and trains the first units of every hidden layer."""

    def __init__(
        self,
        widths: Sequence[float] = (0.2, 0.4, 0.6, 0.8, 1.0),
        fixed: bool = True,
        deadline: float | None = None,
        distilled: bool | None = None,
        **slots: Any,
    ) -> None:
        """Fill the exchange and aggregator slots.

        Args:
            widths: Shares of a hidden layer's units that steps train; [1] is FedAvg.
            fixed: True if a client keeps its largest width, and each is that of as many clients; False if every client draws it
                in each round.
            deadline: Simulated seconds above 0: the largest width of every client is the widest with which a clock of clients
                expects its round to take no longer, or else the smallest. None: each is that of as many clients.
            distilled: True for the paper's self-distillation: a client's largest network trains on the loss in every step, and
                teaches its outputs for the classes to the one that the step draws.
        """
        given = widths if isinstance(widths, Sequence) else ()
        numbers = [width for width in given if isinstance(width, (int, float)) and 0 < width <= 1]
        require(
            0 < len(set(numbers)) == len(given),
            f"widths must be a list of different numbers in (0, 1], such as [0.5, 1.0], got {widths!r}.",
        )
        levels = {width: 1 / len(widths) for width in widths}
        exchange = FirstUnits(levels, fixed, scaled=False, ordered=True, deadline=deadline, distilled=bool(distilled))
        super().__init__(exchange=exchange, aggregator=MaskedMean(), **slots)

"""Parts and hyper-parameters that methods with Adam on the clients share."""

from __future__ import annotations

from typing import Any, Literal

from lightning_fl.aggregators import WeightedMean
from lightning_fl.algorithms.method import Method
from lightning_fl.codecs import Changes, Dense
from lightning_fl.rules import SharedAdam
from lightning_fl.slots import Codec
from lightning_fl.steps import Apply, Moments

Weighting = Literal["samples", "uniform"]
Downlink = Literal["dense", "union"]


class AdamOnClients(Method):
    """Base class of methods with Adam on the clients. A method describes only its further hyper-parameters.

    Args:
        alpha: Share of the coordinates that are sent, in (0, 1]; 1 is FedAdam.
        beta1: Decay β₁ of the first moment, in [0, 1).
        beta2: Decay β₂ of the second moment, in [0, 1).
        epsilon: ε > 0, inside the root.
        weighting: Average by `samples`, or with `uniform` weights as in the paper, where all minibatches have one size.
        downlink: Broadcast everything (`dense`), or only the changed coordinates (`union` of the masks).
        index_bits: Count ⌈log2 d⌉ bits per index, as sent (`ceil`), or log2 d, as in the paper (`exact`).
    """


class AveragedMoments(AdamOnClients):
    """Base class of FedAdam and its sparse variants."""

    def __init__(self, rule: SharedAdam, uplink: Codec, downlink: Downlink, weighting: Weighting, **slots: Any) -> None:
        """Fill the slots with FedAdam's parts, and with the codecs of uploads and broadcast."""
        super().__init__(
            (Apply(), Moments()),
            rule=rule,
            uplink=uplink,
            downlink=Changes() if downlink == "union" else Dense(),
            aggregator=WeightedMean(weighting),
            **slots,
        )

"""The simulated clock: duration of a round on real clients, as in the code of FedDUMAP's authors (Liu et al., 2024).

    seconds = computation + uplink volume / client bandwidth + downlink volume / server bandwidth

Volumes come from the ledger, summed over the clients of the round as in the authors' code; the server's computation is free.
The computation of a network with pruned filters is proportional to its remaining multiply-accumulates. If clients compute
gradients of more samples than their own, as in Data-sharing, Mime and Centralised, their computation is proportional to all of
these.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Interval

from lightning_fl.checks import check_fields

MEBIBYTE = 2**20
SIGMAS = ("computation_sigma", "uplink_sigma", "downlink_sigma", "jitter_sigma")
"""Fields with the spreads of a clock of clients."""


@dataclass(frozen=True)
class SimulatedClock:
    """Compute the seconds of a round from its bits and its computation.

    Attributes:
        computation_seconds: seconds of a client's local training in a round of FedAvg, at least 0, with the initial network
            and the clients' own samples; None: estimate from the multiply-accumulates. The authors measured 2.3 (CNN), 8.0
            (VGG-11), 10.1 (ResNet-18) and 1.3 (LeNet-5) for 400 CIFAR images and 5 epochs.
        macs_per_second: speed of a client for the estimate, in which a training step costs three forward passes.
        uplink_mebibytes_per_second: MiB/s towards the server; 6.25 is 50 Mbit/s.
        downlink_mebibytes_per_second: MiB/s from the server; 12.5 is 100 Mbit/s.
        devices: `phones` or `silos`, for such differences between clients. This and all further attributes make the clock a
            `ClientClock`: clients work in parallel, and the speeds above are the median client's.
        computation_sigma: spread of the clients' computing speeds, in [0, 10]: each is exp(sigma z) times the clock's, z
            normal.
        uplink_sigma: spread of the speeds of their uplinks, in [0, 10].
        downlink_sigma: spread of the speeds of their downlinks, in [0, 10].
        jitter_sigma: spread of each client's own times from round to round, in [0, 10].
        trace: CSV file with the speeds of every client, instead of the spreads: its columns macs_per_second,
            uplink_mebibytes_per_second and downlink_mebibytes_per_second, or FedScale's computation and communication.
    """

    is_of_clients = False
    """True if each client has a time of its own."""
    _called = "the clock's {}"
    computation_seconds: Annotated[float, Ge(0)] | None = None
    macs_per_second: Annotated[float, Gt(0)] = 1e11
    uplink_mebibytes_per_second: Annotated[float, Gt(0)] = 6.25
    downlink_mebibytes_per_second: Annotated[float, Gt(0)] = 12.5
    devices: Literal["phones", "silos"] | None = None
    computation_sigma: Annotated[float, Interval(ge=0, le=10)] | None = None
    uplink_sigma: Annotated[float, Interval(ge=0, le=10)] | None = None
    downlink_sigma: Annotated[float, Interval(ge=0, le=10)] | None = None
    jitter_sigma: Annotated[float, Interval(ge=0, le=10)] | None = None
    trace: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def seconds(self, uplink_bits: int, downlink_bits: int, macs: float, work: float = 1.0) -> float:
        """Return the seconds of one round.

        Args:
            uplink_bits: bits that all clients together sent.
            downlink_bits: bits that all clients together received.
            macs: multiply-accumulates of the forward passes of the client that trained most.
            work: multiply-accumulates of the clients, as a multiple of those that `computation_seconds` are for.

        >>> SimulatedClock(computation_seconds=2.5).seconds(0, 0, macs=1e9, work=6)
        15.0
        """
        measured = self.computation_seconds
        computation = 3 * macs / self.macs_per_second if measured is None else work * measured
        uplink = uplink_bits / 8 / MEBIBYTE / self.uplink_mebibytes_per_second
        downlink = downlink_bits / 8 / MEBIBYTE / self.downlink_mebibytes_per_second
        return computation + uplink + downlink

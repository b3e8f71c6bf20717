"""Clock of clients with different devices: each has its own speeds, all work in parallel, and a round waits for the slowest.

    t_k = D_k / downlink_k + computation_k + U_k / uplink_k          computation_k = 3 · multiply-accumulates_k / speed_k

D_k and U_k are the bits that client k receives and sends in the round. Its speeds are the clock's times exp(σ z), where z is
normal and fixed by the seed and k, so the clock's own speeds are the medians. With a trace, a row gives the client's speeds.
`computation_seconds` are the seconds of a client with the clock's own speed; computation_k is then these seconds times speed /
speed_k, and for a straggler times the share of its steps. The server's computation is free, and turns of a round have no
barriers of their own.

FedScale (Lai et al., ICML 2022) gives for each device the milliseconds of a sample's forward pass (a training step takes three
times as long), and the kbit/s of its network in both directions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lightning_fl.errors import require
from lightning_fl.features.clock.csv_table import CLIENT, read_csv
from lightning_fl.features.clock.simulated_clock import MEBIBYTE, SIGMAS, SimulatedClock

OWN = ("devices", *SIGMAS, "trace")
"""Fields that make a clock one of clients."""
PRESETS: dict[str, tuple[float, float, float, float]] = {
    "phones": (0.9, 1.2, 1.2, 0.2),
    "silos": (0.5, 0.5, 0.5, 0.1),
}
"""Values of `SIGMAS`; `ClientClock` says where they come from."""
SPEEDS = ("macs_per_second", "uplink_mebibytes_per_second", "downlink_mebibytes_per_second")
FEDSCALE = ("computation", "communication")
TRACE_COLUMNS = [(*client, *names) for names in (SPEEDS, FEDSCALE) for client in ((CLIENT,), ())]
KBIT_PER_SECOND = 1000 / 8 / MEBIBYTE


class Device(NamedTuple):
    """Speeds of one client.

    Attributes:
        macs_per_second: multiply-accumulates in a second; nan if `seconds_per_sample` is given instead.
        uplink: MiB/s towards the server.
        downlink: MiB/s from the server.
        seconds_per_sample: seconds of the forward pass of a sample with the network as the run begins; None if unknown.
    """

    macs_per_second: float
    uplink: float
    downlink: float
    seconds_per_sample: float | None = None


class Training(NamedTuple):
    """Local training of one client in a round.

    Attributes:
        samples: samples whose gradients it computes, for all models that it trains.
        measured: samples that the clock's `computation_seconds` are for.
        macs: multiply-accumulates of a sample's forward pass.
        share: these as a fraction of those when the run began.
    """

    samples: float
    measured: float
    macs: float
    share: float


@dataclass(frozen=True)
class ClientClock(SimulatedClock):
    """Compute the seconds of each client of a round from its own bits, computation and speeds; clients are parallel.

    The spreads are 0 unless they are given, or `devices` sets them. Both presets are judgements; the median speeds stay the
    clock's:

        devices  computation_sigma  uplink_sigma, downlink_sigma  jitter_sigma
        phones   0.9                1.2                           0.2
        silos    0.5                0.5                           0.1

    - `phones`: for Oort (Lai et al., OSDI 2021) and FedScale (Lai et al., ICML 2022), which draw on AI Benchmark and MobiPerf,
      phones differ by an order of magnitude in computation and more in their networks. 0.9 puts the 10th and the 90th
      percentile 10 times apart, 1.2 puts them 22 times apart.
    - `silos`: institutions with servers differ by a generation or two of accelerators; 0.5 puts the percentiles 3.6 times apart.
      Links between data centres differed up to 12 times between pairs of regions in Gaia (Hsieh et al., NSDI 2017), which are
      2.5 standard deviations of 0.5 on both sides of the median.

    Attributes:
        devices: `phones` or `silos`, for the spreads above; a given spread overrides the preset's.
        computation_sigma: spread σ of the clients' computing speeds, in [0, 10]: each is exp(σ z) times the clock's.
        uplink_sigma: spread of the speeds of their uplinks, in [0, 10].
        downlink_sigma: spread of the speeds of their downlinks, in [0, 10].
        jitter_sigma: spread in [0, 10] of a client's speed from round to round: a factor exp(σ z), drawn in each round.
        trace: CSV file of speeds, with the columns macs_per_second, uplink_mebibytes_per_second and
            downlink_mebibytes_per_second, or FedScale's computation (ms for the forward pass of a sample) and communication
            (kbit/s). A column client assigns each row to the client with this index, from 0. Without it clients get the rows
            in a random order, repeated if there are more clients than rows.
    """

    is_of_clients = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trace is not None:
            spreads = ("devices", *SIGMAS[:3])
            names = [name for name in spreads if getattr(self, name) not in (None, 0)]
            require(
                not names,
                f"the clock's trace has the speeds of every client, and {' and '.join(names)} would draw them: give one of both.",
            )

    @classmethod
    def of(cls, clock: SimulatedClock) -> SimulatedClock:
        """Return the clock of clients with the settings of a clock, if a setting of such a clock is given; else the clock."""
        if isinstance(clock, cls) or all(getattr(clock, name) is None for name in OWN):
            return clock
        return cls(**{field.name: getattr(clock, field.name) for field in fields(clock)})

    @cached_property
    def sigmas(self) -> tuple[float, ...]:
        """Spreads of computation, uplink, downlink and jitter: those given, or else the preset's, or else 0."""
        preset = PRESETS[self.devices] if self.devices else (0.0,) * len(SIGMAS)
        values = [getattr(self, name) for name in SIGMAS]
        return tuple(other if value is None else float(value) for value, other in zip(values, preset, strict=True))

    @property
    def median(self) -> Device:
        """A client with the clock's own speeds."""
        return Device(self.macs_per_second, self.uplink_mebibytes_per_second, self.downlink_mebibytes_per_second)

    def drawn(self, random: np.random.Generator) -> Device:
        """Return a client whose speeds differ from the clock's by the spreads."""
        return Device(
            *(
                float(speed * np.exp(sigma * z))
                for speed, sigma, z in zip(self.median[:3], self.sigmas[:3], random.standard_normal(3), strict=True)
            )
        )

    def jitter(self, random: np.random.Generator) -> float:
        """Return how many times as fast as usual a client is in a round."""
        return float(np.exp(self.sigmas[3] * random.standard_normal()))

    def read_trace(self, num_clients: int, order: Callable[[int], np.ndarray]) -> Callable[[int], Device]:
        """Return the devices of a trace as a function of the client.

        Args:
            num_clients: clients of the federation, N.
            order: returns a random order of a number of rows, by which those of a trace without clients are dealt; called when
                a device is asked for, always with the same result.

        Raises:
            UserError: the trace cannot be read, is malformed or lacks a client.
        """
        table = read_csv("the clock's trace", self.trace or "", TRACE_COLUMNS)
        has_own_speeds = SPEEDS[0] in table.columns
        table.check_positive(*(SPEEDS if has_own_speeds else FEDSCALE))
        require(
            has_own_speeds or self.computation_seconds is None,
            f"the clock's trace {table.path} has the milliseconds of a sample's computation, and computation_seconds is "
            f"{self.computation_seconds}: leave computation_seconds out.",
        )
        rows = None
        if CLIENT in table.columns:
            rows = np.full(num_clients, -1)
            for row, client in enumerate(table.clients(num_clients).tolist()):
                if rows[client] >= 0:
                    table.refuse(row, f"client {client} has a row on line {table.lines[rows[client]]} already.")
                rows[client] = row
            missing = np.flatnonzero(rows < 0)
            require(
                not len(missing),
                f"the clock's trace {table.path} has no row for {len(missing)} of the {num_clients} clients, the first of which "
                f"is {missing[:1].sum()}: add one for each, or leave out the column client.",
            )
        columns = [table.columns[name] for name in (SPEEDS if has_own_speeds else FEDSCALE)]

        def device(client: int) -> Device:
            dealt = order(len(table.lines)) if rows is None else rows
            values = [float(column[dealt[client % len(dealt)]]) for column in columns]
            if has_own_speeds:
                return Device(*values)
            rate = values[1] * KBIT_PER_SECOND
            return Device(float("nan"), rate, rate, values[0] / 1000)

        return device

    def seconds_on(self, device: Device, uplink_bits: int, downlink_bits: int, training: Training) -> float:
        """Return the seconds of one client.

        Args:
            device: speeds of the client.
            uplink_bits: bits that it sends.
            downlink_bits: bits that it receives.
            training: its local training.
        """
        if device.seconds_per_sample is not None:
            computation = 3 * training.samples * device.seconds_per_sample * training.share
        elif self.computation_seconds is None:
            computation = 3 * training.macs * training.samples / device.macs_per_second
        else:
            done = training.samples / training.measured if training.measured else 0.0
            slower = self.macs_per_second / device.macs_per_second
            computation = training.share * self.computation_seconds * done * slower
        sent, received = self.transfer_seconds(device, uplink_bits, downlink_bits)
        return received + computation + sent

    def transfer_seconds(self, device: Device, uplink_bits: int, downlink_bits: int) -> tuple[float, float]:
        """Return the seconds in which a client sends and receives so many bits."""
        return uplink_bits / 8 / MEBIBYTE / device.uplink, downlink_bits / 8 / MEBIBYTE / device.downlink

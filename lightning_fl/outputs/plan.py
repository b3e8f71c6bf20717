"""Costs of a run, estimated before it starts: bytes, steps, time, memory and disk."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from lightning_fl.outputs.units import counted, in_bytes, significant, unit_of

COUNTS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}


@dataclass(frozen=True)
class Plan:
    """Costs of a run that has not been trained; `dataclasses.asdict` makes it plain values for JSON.

    Bytes are those of all clients together, as in metrics.csv; the run's include the set-up before its first round.

    Attributes:
        algorithm: name of the method.
        rounds: rounds of the run, up to the last one that a budget of bytes pays for.
        clients: clients of a round.
        setup_uplink_bytes: bytes from clients to the server before the first round.
        setup_downlink_bytes: bytes from the server to clients before the first round.
        round_uplink_bytes: bytes up in the first round.
        round_downlink_bytes: bytes down in the first round.
        uplink_bytes: bytes up in the run.
        downlink_bytes: bytes down in the run.
        is_fixed: True if the bytes do not depend on what is trained.
        has_fixed_work: True if neither steps nor multiply-accumulates depend on what is trained.
        rehearsed_rounds: rounds that were rehearsed; the others are assumed to cost as much as the last of these.
        round_steps: optimiser steps of the first round, of all clients, and of the server on its own samples.
        steps: optimiser steps of the run.
        macs: multiply-accumulates of the clients' training in the run, three forward passes for a step; None if unknown.
        setup_seconds: estimate of the seconds before the first round.
        round_seconds: estimate of a round's seconds on this machine, without validation.
        seconds: estimate of the run's seconds on this machine, with validation.
        round_simulated_seconds: simulated seconds of the first round, as the trainer's clock has them.
        simulated_seconds: simulated seconds of the run; rounds that were not rehearsed take the mean of those that were.
        memory_bytes: estimate of the memory of this process at the end of the run; None if unknown.
        accelerator_bytes: memory of the accelerator that the first round took; None on a CPU.
        disk_bytes: estimate of the checkpoints' bytes at the end of the run.
        warnings: a sentence about each limit that the run would exceed.
    """

    algorithm: str
    rounds: int
    clients: int
    setup_uplink_bytes: float
    setup_downlink_bytes: float
    round_uplink_bytes: float
    round_downlink_bytes: float
    uplink_bytes: float
    downlink_bytes: float
    is_fixed: bool
    has_fixed_work: bool
    rehearsed_rounds: int
    round_steps: int
    steps: int
    macs: float | None
    setup_seconds: float
    round_seconds: float
    seconds: float
    round_simulated_seconds: float
    simulated_seconds: float
    memory_bytes: int | None
    accelerator_bytes: int | None
    disk_bytes: int
    warnings: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        """True if the bytes of the run are exact; those of the first round are if they are fixed."""
        return self.is_fixed and self.rehearsed_rounds == self.rounds

    def __str__(self) -> str:
        first, about = "" if self.is_fixed else "about ", "" if self.is_exact else "about "
        first_work = "" if self.has_fixed_work else "about "
        work = first_work if self.rehearsed_rounds == self.rounds else "about "
        rows = [
            ("", "first round", "run"),
            ("uplink", first + in_bytes(self.round_uplink_bytes), about + in_bytes(self.uplink_bytes)),
            ("downlink", first + in_bytes(self.round_downlink_bytes), about + in_bytes(self.downlink_bytes)),
            ("steps", f"{first_work}{self.round_steps:,}", f"{work}{self.steps:,}"),
            *([] if self.macs is None else [("MACs", "", work + _count(self.macs))]),
            ("time", f"about {duration(self.round_seconds)}", f"about {duration(self.seconds)}"),
            (
                "simulated time",
                f"about {duration(self.round_simulated_seconds)}",
                f"about {duration(self.simulated_seconds)}",
            ),
            *_if_known("memory", self.memory_bytes),
            *_if_known("accelerator", self.accelerator_bytes),
            ("disk", "", f"about {in_bytes(self.disk_bytes)}" if self.disk_bytes else "0 B"),
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        table = [f"{name:<{widths[0]}}  {one:>{widths[1]}}  {whole:>{widths[2]}}".rstrip() for name, one, whole in rows]
        size = f"{counted(self.rounds, 'round')} of {counted(self.clients, 'client')}"
        head = f"{self.algorithm}: {size}; nothing was trained."
        return "\n".join([head, *table, *self._notes(), *self.warnings])

    def _notes(self) -> list[str]:
        setup = {"up": self.setup_uplink_bytes, "down": self.setup_downlink_bytes}
        before = ", ".join(f"{in_bytes(count)} {way}" for way, count in setup.items() if count)
        notes = [f"The run's bytes include {before} before its first round."] if before else []
        if self.rehearsed_rounds < self.rounds:
            notes.append(
                f"{counted(self.rehearsed_rounds, 'round')} rehearsed; the others are assumed to be like the last of these."
            )
        if not self.is_fixed:
            notes.append("The bytes depend on the training.")
        return notes


def duration(seconds: float) -> str:
    """Return a duration in two units at most, or one that is beyond all calendars in seconds.

    >>> [duration(seconds) for seconds in (0.0123, 4.56, 59.9, 75, 3 * 3600 + 300, 200_000, 1e30)]
    ['12 ms', '4.6 s', '60 s', '1 min 15 s', '3 h 5 min', '2 d 7 h', '1e+30 s']
    """
    if not seconds < timedelta.max.total_seconds():  # also not a number
        return f"{seconds:.3g} s"
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    whole = timedelta(seconds=round(seconds))
    parts = {"d": whole.days, "h": whole.seconds // 3600, "min": whole.seconds // 60 % 60, "s": whole.seconds % 60}
    first = next(position for position, count in enumerate(parts.values()) if count)
    return " ".join(f"{count} {unit}" for unit, count in [*parts.items()][first : first + 2] if count)


def _if_known(name: str, count: int | None) -> list[tuple[str, str, str]]:
    return [] if count is None else [(name, "", f"about {in_bytes(count)}")]


def _count(value: float) -> str:
    """Return a number with the prefix of its power of ten.

    >>> _count(1.23e13), _count(650)
    ('12.3 T', '650')
    """
    unit = unit_of(value, COUNTS)
    return f"{significant(value / COUNTS[unit])} {unit}" if unit else f"{value:,.0f}"

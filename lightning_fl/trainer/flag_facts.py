"""Facts about each flag of the trainer, from its annotation.

`--help` and the reference show a flag under its group; checkpoints keep the flags that a resumed run may or must not change, and
reports compare runs by those that decide results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Literal, get_args, get_type_hints

ROUNDS = "Rounds and local training"
METRIC = "Metric, validation, log and checkpoints"
FAILING = "Clients that fail"
CLOCK = "Simulated network and computation behind time/simulated_seconds"
LATE = "Late and unavailable clients, by a clock of clients"
GUARD = "Guard against a loss that explodes; off if not given"
PRIVACY = "Differential privacy of clients"
SEEN = "Secure aggregation: limits to what the server sees"
RUNNER = "Training of several clients"
DEVICES = "Devices, as in Lightning"
CALLBACKS = "Callbacks, loggers and the folder of the run"
SHORT = "Short runs"
GRADIENTS = "Gradients"
OUTPUT = "Output"
MODES = "Modes of PyTorch, and profiling"


@dataclass(frozen=True)
class Flag:
    """Facts about a flag.

    Attributes:
        group: heading above the flag in `--help`.
        resume: for a flag that checkpoints keep: `may change` when the run is resumed, with a message, or `must stay`; None
            for other flags.
        decides: `results`, or `execution`: where and how a run computes, and what else it measures and writes.
    """

    group: str
    resume: Literal["may change", "must stay"] | None = "may change"
    decides: Literal["results", "execution"] = "results"


def execution(group: str) -> Flag:
    """Return the facts about a flag that no result depends on, and that a checkpoint does not keep."""
    return Flag(group, None, "execution")


@cache
def flags_of(trainer: type) -> Mapping[str, Flag]:
    """Return the facts about each flag of a class of trainers, in the order of its constructor."""
    hints = get_type_hints(trainer.__init__, include_extras=True)  # type: ignore[misc]
    facts = {name: fact for name, hint in hints.items() for fact in get_args(hint) if isinstance(fact, Flag)}
    return MappingProxyType(facts)

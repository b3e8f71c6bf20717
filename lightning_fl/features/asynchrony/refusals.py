"""Checks that nothing needs rounds that wait for their clients, with a method that has none."""

from __future__ import annotations

from typing import Any, Protocol

from lightning_fl.algorithms import Algorithm
from lightning_fl.algorithms.compatibility import prunes
from lightning_fl.errors import require


class Flags(Protocol):
    """Attributes of a trainer that decide whether its rounds may go on without waiting."""

    algorithm: Algorithm
    callbacks: Any

    @property
    def runner(self) -> str: ...

    @property
    def world_size(self) -> int: ...

    @property
    def max_steps(self) -> int: ...


def check_pace(trainer: Flags) -> None:
    """Raise `UserError` if a flag or a callback needs synchronous rounds, and the method is asynchronous."""
    name = trainer.algorithm.name
    require(
        trainer.world_size == 1,
        f"{name} trains clients one after the other in one process, and trainer.devices × trainer.num_nodes are "
        f"{trainer.world_size}: use one.",
    )
    require(
        trainer.runner != "stacked",
        f"{name} trains clients on different versions of the model, one after the other: use runner 'auto' or 'serial'.",
    )
    require(
        trainer.max_steps == -1,
        f"{name} trains clients beside each other on different versions of the model, so that no round's steps can be limited; "
        "leave out trainer.max_steps, and use max_rounds.",
    )
    for flag, why in (
        ("over_selection", "fills every place that becomes idle"),
        ("deadline", "has no round that could close: max_staleness rejects late uploads"),
        ("if_too_few", "goes on with the clients that are there"),
    ):
        require(getattr(trainer, flag) is None, f"{name} {why}; leave out trainer.{flag}.")
    for callback in trainer.callbacks:
        if prunes(callback):
            trainer.algorithm.check_pruning(type(callback).__name__)

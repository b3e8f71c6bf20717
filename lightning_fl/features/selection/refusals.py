"""Checks that a selection fits the method, the data and the flags of a run."""

from __future__ import annotations

from typing import Any, Protocol

from lightning_fl.algorithms import Algorithm
from lightning_fl.algorithms.compatibility import name_of
from lightning_fl.errors import require
from lightning_fl.features.selection.selection import ClientSelection, Reads
from lightning_fl.slots.part import to_declare


class Flags(Protocol):
    """Attributes of a trainer that decide whether a selection fits."""

    algorithm: Algorithm
    adversary: Any
    availability: Any
    clock: Any

    @property
    def active_module(self) -> Any: ...


def check_selection(
    trainer: Flags, selection: ClientSelection, num_clients: int, num_eligible: int, reads_own_loaders: bool
) -> None:
    """Raise `UserError` if a selection does not fit a run.

    Args:
        trainer: trainer with its flags, method and module.
        selection: the selection.
        num_clients: clients to select, K; more with over_selection.
        num_eligible: clients with samples, N.
        reads_own_loaders: True if clients read loaders of their own.
    """
    method, name = trainer.algorithm, type(selection).__name__
    require(
        method.trains_in_rounds and not method.pools_clients,
        f"trainer.selection {name} selects clients for rounds, and {method.name} "
        f"{'has all samples in one place' if method.pools_clients else 'has no rounds with clients'}: leave it out.",
    )
    require(
        method.pace is None,
        f"{method.name} draws a client whenever a place becomes idle, and has no rounds for which {name} could select clients: "
        "leave out trainer.selection.",
    )
    selection.check(num_clients, num_eligible)
    require(
        trainer.availability is None or not selection.needs_everyone,
        f"trainer.selection {name} needs all clients to be there, and with trainer.availability some may be away: leave one of "
        "them out.",
    )
    require(
        Reads.SECONDS not in selection.reads or trainer.clock.is_of_clients,
        f"trainer.selection {name} needs a clock that knows each client's time: give devices, trace or a …_sigma of "
        "trainer.clock, such as --trainer.clock.devices phones, or in Python clock=ClientClock().",
    )
    if Reads.LOSSES in selection.reads:
        _check_asking(trainer, name, reads_own_loaders)
    require(
        Reads.NORMS not in selection.reads or not (selection.repeats or selection.counts_alike),
        f"trainer.selection {name} reads norms, by which uploads count, so that draws cannot count besides: leave repeats and "
        "counts_alike False in its class.",
    )
    if selection.reweighs:
        _check_weights(trainer, name)


def _check_asking(trainer: Flags, name: str, reads_own_loaders: bool) -> None:
    """Raise `UserError` if clients cannot say how large their loss at the model is."""
    method, asks = (
        trainer.algorithm,
        f"trainer.selection {name} asks clients for the loss of the model on their samples, and",
    )
    require(method.exchange.uses_link, f"{asks} those of {method.name} send nothing: leave it out.")
    require(
        not method.exchange.cuts,
        f"{asks} those of {method.name} have smaller networks, whose losses cannot be compared: use another selection.",
    )
    require(
        not trainer.active_module.is_manual,
        f"{asks} training_step of {type(trainer.active_module.module).__name__} makes optimiser steps itself "
        "(automatic_optimization is False): use another selection.",
    )
    require(
        not reads_own_loaders,
        f"{asks} these read loaders of their own, which are for training alone: use another selection.",
    )


def _check_weights(trainer: Flags, name: str) -> None:
    """Raise `UserError` if a part needs the usual weights of the uploads, or not every client's whole upload comes."""
    method, weighs = trainer.algorithm, f"trainer.selection {name} weighs uploads anew, and"
    aggregator, exchange = method.aggregator, method.exchange
    require(
        aggregator.is_mean,
        f"{weighs} {name_of(aggregator)} needs more than weights: use WeightedMean{to_declare(aggregator, 'is_mean = True')}.",
    )
    require(
        exchange.one_message and exchange.sends_whole and not method.rule.omits,
        f"{weighs} clients of {method.name} do not send their whole update once in a round: use the exchange OneShot"
        f"{to_declare(exchange, 'one_message = sends_whole = True')}.",
    )
    for step in method.chain:
        require(
            not step.needs_equal_weights,
            f"{weighs} {name_of(step)} needs the mean with equal weights of all clients that train: use another method.",
        )
    require(
        trainer.adversary is None,
        f"{weighs} trainer.adversary knows weights by numbers of samples alone: leave one of them out.",
    )

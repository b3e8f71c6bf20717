"""Refusals of a private run, whose guarantee would not hold: parts that read single clients, or act on their logged values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from lightning.pytorch import Callback

from lightning_fl.algorithms import Algorithm
from lightning_fl.algorithms.compatibility import asks_clients, name_of, prunes, sets_mask
from lightning_fl.callbacks import CommunicationMeter, TargetReached
from lightning_fl.errors import nearest, require
from lightning_fl.features.privacy.client_privacy import ClientPrivacy
from lightning_fl.features.privacy.local_privacy import LocalPrivacy
from lightning_fl.features.privacy.mechanism import Privacy
from lightning_fl.features.privacy.side_channels import (
    HOOKS_OF_CLIENTS,
    is_of_clients,
    is_of_server,
    may_tell_of_clients,
    told_by,
)
from lightning_fl.flat_module.smaller_network import statistics_of
from lightning_fl.outputs.metric import ACCURACY
from lightning_fl.slots import MEAN_GRADIENT, Exchange, Traits, kind_of
from lightning_fl.slots.part import to_declare

VECTORS = ("model", "moments")
"""Kinds of an upload's entries that are vectors of the model."""


class Run(Protocol):
    """Attributes of a trainer that a private run reads."""

    privacy: Privacy | None
    callbacks: list[Callback]
    by_lightning: bool
    loss_guard: Any
    metric: str | None
    over_selection: float | None
    deadline: float | None
    availability: Any
    max_steps: int
    min_steps: int | None
    clock: Any
    secure_aggregation: Any
    selection: Any
    given_metric: Any

    @property
    def lightning_module(self) -> Any: ...


def check_privacy(
    trainer: Run,
    algorithm: Algorithm,
    schedulers: Iterable[Any],
    buffers: Iterable[str],
    has_server_samples: bool,
    owns: bool,
    hold_out: bool,
) -> None:
    """Raise `UserError` with all reasons why the guarantee of a private run would not hold.

    Args:
        trainer: trainer with its flags and callbacks.
        algorithm: the federated method.
        schedulers: configurations of the module's learning-rate schedulers.
        buffers: names of the float buffers that clients send.
        has_server_samples: True if the server has samples of its own.
        owns: True if clients own parts of the model, or models of their own, so that they measure what validation logs.
        hold_out: True if validation is measured on samples that clients hold out.
    """
    if trainer.privacy is None:
        return
    buffers = list(buffers)
    _check_scales(trainer.privacy, algorithm, has_buffers=bool(buffers))
    problems = [
        *_asking(trainer.privacy, trainer, algorithm, has_server_samples),
        *_watching(trainer, algorithm, schedulers, owns, hold_out),
        *_buffers(trainer.privacy, buffers),
    ]
    if isinstance(trainer.privacy, ClientPrivacy):
        problems += [
            *_central(trainer.privacy, algorithm),
            *_tree(trainer.privacy, trainer, algorithm),
            *_choosing(trainer, algorithm, by_chance=True),
            *_ending(trainer.privacy, trainer),
            *_hiding(trainer.privacy, trainer, algorithm, hold_out),
        ]
    if isinstance(trainer.privacy, LocalPrivacy) and trainer.privacy.noise_multiplier:
        problems += [*_choosing(trainer, algorithm, by_chance=False), *_ending(trainer.privacy, trainer)]
    _refuse(trainer.privacy, algorithm, problems)


def check_watched_of_clients(
    trainer: Run,
    algorithm: Algorithm,
    callbacks: Iterable[Callback],
    schedulers: Iterable[Any],
    of_clients: Mapping[str, str],
) -> None:
    """Raise `UserError` if something acts on a value about clients, under any name.

    Args:
        trainer: trainer with its flags, and the run's metric once it is known.
        algorithm: the federated method.
        callbacks: callbacks of the run.
        schedulers: configurations of the module's learning-rate schedulers.
        of_clients: by name, the reason why a value reveals clients.
    """
    if trainer.privacy is not None:
        problems = [
            f"{name} acts on {watched}, which {of_clients[watched]}, without noise: let it watch val/accuracy"
            for name, watched in _watching_what(callbacks, schedulers, trainer.metric)
            if watched in of_clients
        ]
        _refuse(trainer.privacy, algorithm, problems)


def _refuse(privacy: Privacy, algorithm: Algorithm, problems: Iterable[str]) -> None:
    """Raise `UserError` if there are reasons why the claim would be false."""
    reasons = "; ".join(dict.fromkeys(problems))
    require(not reasons, f"{type(privacy).__name__} does not hold for {algorithm.name} here: {reasons}.")


def _check_scales(privacy: Privacy, algorithm: Algorithm, has_buffers: bool) -> None:
    """Raise `UserError` if a vector that has a scale is none that clients send."""
    sent = {"model", *algorithm.rule.provides}
    if has_buffers and getattr(privacy, "buffers", None) != "keep":
        sent.add("buffers")
    for name in getattr(privacy, "scales", None) or ():
        require(
            name in sent,
            f"privacy.scales has {name!r}, which clients of {algorithm.name} do not send; {nearest(name, sent)}.",
        )


def _asking(privacy: Privacy, trainer: Run, algorithm: Algorithm, has_server_samples: bool) -> Iterator[str]:
    """Yield what learns from clients besides their uploads."""
    if algorithm.pools_clients:
        yield f"{algorithm.name} has all samples in one place, so no client is there to protect"
    if algorithm.setup_reads_clients:
        yield f"clients of {algorithm.name} send something before the first round, without noise"
    if algorithm.pace is not None:
        yield f"{algorithm.name} does not wait for the clients of a round, so that one may send several uploads to it"
    sender = algorithm.exchange.sender
    if MEAN_GRADIENT in algorithm.exchange.provides:
        yield f"clients of {type(algorithm.rule).__name__} send their gradient on all samples before the round's upload"
    elif type(sender).before_training is not Exchange.before_training and not sender.one_message:
        hint = to_declare(sender, "one_message = True")
        yield f"clients of {name_of(sender)} may answer before the round's upload{hint}"
    if algorithm.exchange.cuts and not has_server_samples and statistics_of(trainer.lightning_module):
        yield (
            f"statistics of batch normalisation are computed from the samples of {algorithm.name}'s clients, without noise: give "
            "the server samples (data.server_fraction), or use a network with GroupNorm"
        )
    if scalars := sorted(name for name in algorithm.rule.provides if kind_of(name) not in VECTORS):
        yield f"clients of {name_of(algorithm.rule)} send {', '.join(map(repr, scalars))}, no vector of the model"
    if algorithm.rule.needs_whole_upload:
        yield f"clients of {name_of(algorithm.rule)} keep a copy of what they sent, which was clipped since"
    if Traits.INCREMENTS in algorithm.uplink.traits:
        yield f"{name_of(algorithm.uplink)} builds each message on those before, which were clipped since they were sent"
    for step in (step for step in algorithm.chain if step.asks_clients):
        hint = to_declare(step, "asks_clients = False")
        yield f"{name_of(step)} asks clients before the first round, who answer without noise{hint}"
    for step in (step for step in algorithm.chain if step.weighs_samples and privacy.cap is None):
        yield (
            f"{name_of(step)} weighs the server's samples against the clients': use privacy.weights samples, with a cap"
        )
    for callback in trainer.callbacks:
        if asks_clients(callback, has_server_samples):
            yield f"{type(callback).__name__} asks clients, who answer without noise"
    if trainer.loss_guard.clients is not None:
        yield "loss_guard.clients compares clients' losses: use loss_guard.rounds"


def _watching(
    trainer: Run, algorithm: Algorithm, schedulers: Iterable[Any], owns: bool, hold_out: bool
) -> Iterator[str]:
    """Yield what acts on values that are measured on clients' samples, or with what clients own."""
    told = told_by(trainer.callbacks)
    for name, watched in _watching_what(trainer.callbacks, schedulers, trainer.given_metric[0] or ACCURACY):
        if is_of_clients(watched, told):
            yield f"{name} acts on {watched}, which tells of clients without noise: let it watch val/accuracy"
        elif watched.startswith(_costs(trainer.privacy)):
            remedy = f"let it watch val/accuracy{_or_drop(trainer.privacy)}"
            yield f"{name} acts on {watched}, which depends on clients without noise: {remedy}"
        elif owns and watched.startswith("val") and not is_of_server(watched):
            yield (
                f"{name} acts on {watched}, which {algorithm.name} measures with what clients own, without noise: let it watch a "
                "value under …_server, or none"
            )
        elif hold_out and watched.startswith("val"):
            yield (
                f"{name} acts on {watched}, which is measured on samples that clients hold out, without noise: set "
                "data.val_fraction to 0, or let it watch none"
            )


def _costs(privacy: Privacy | None) -> tuple[str, ...]:
    """Return the prefixes of costs that depend on the clients that come, or on their samples, and are no expected values."""
    if isinstance(privacy, ClientPrivacy):
        return () if privacy.side_channels == "drop" else ("comm/", "time/")
    return ("time/",)  # bits are those of noisy uploads


def _or_drop(privacy: Privacy | None) -> str:
    """Return the remedy that only a trusted server has."""
    return ", or set privacy.side_channels to drop" if isinstance(privacy, ClientPrivacy) else ""


def _watching_what(
    callbacks: Iterable[Callback], schedulers: Iterable[Any], metric: str | None
) -> Iterator[tuple[str, str]]:
    """Yield the class of whatever acts on a value, with the name of the value."""
    watching = [(type(callback).__name__, _watched(callback, metric)) for callback in callbacks]
    watching += [(type(config.scheduler).__name__, config.monitor) for config in schedulers]
    yield from ((name, watched) for name, watched in watching if isinstance(watched, str))


def _watched(callback: Callback, metric: str | None) -> Any:
    """Return the name that a callback acts on, None without one; of `TargetReached` without a monitor it is the run's metric."""
    monitor = getattr(callback, "monitor", None)
    if isinstance(callback, TargetReached):
        return monitor or metric
    return getattr(callback, "watched", None) or monitor


def _central(privacy: ClientPrivacy, algorithm: Algorithm) -> Iterator[str]:
    """Yield the slots that need more of a round than the sum of its uploads."""
    aggregator, exchange = algorithm.aggregator, algorithm.exchange
    sent = ("model", "buffers", *algorithm.rule.provides)
    if not aggregator.is_mean:
        hint = to_declare(aggregator, "is_mean = True")
        yield f"{name_of(aggregator)} needs more than a sum of uploads: use WeightedMean{hint}"
    elif privacy.weights == "samples" and all(map(aggregator.weighs_equally, sent)):
        yield "its aggregator counts clients alike, and privacy.weights is samples: use uniform"
    if not exchange.uses_link:
        yield f"clients of {algorithm.name} send nothing, so there is no sum to which noise could be added"
    elif not (exchange.sender.one_message and exchange.sender.sends_whole):
        hint = to_declare(exchange.sender, "one_message = sends_whole = True")
        yield f"{name_of(exchange.sender)} chooses what single clients send: use OneShot{hint}"
    if algorithm.rule.omits:
        yield f"{name_of(algorithm.rule)} sends other entries in some rounds than in others"
    for step in algorithm.chain:
        if not (step.sums_suffice or step.asks_clients):
            yield f"{name_of(step)} looks at single clients{to_declare(step, 'sums_suffice = True')}"


def _tree(privacy: ClientPrivacy, trainer: Run, algorithm: Algorithm) -> Iterator[str]:
    """Yield what changes the size of the model, whose noise a tree takes back in a later round."""
    if privacy.mechanism != "tree":
        return
    owners: tuple[Any, ...] = (*trainer.callbacks, *algorithm.chain)
    for owner in filter(prunes, owners):
        yield f"{type(owner).__name__} prunes the model, and privacy.mechanism tree takes back noise of a model of another size"


def _hiding(privacy: ClientPrivacy, trainer: Run, algorithm: Algorithm, hold_out: bool) -> Iterator[str]:
    """Yield costs that depend on who came, and have no expected value here, and values of clients' own samples."""
    if privacy.side_channels == "keep":
        return
    if trainer.by_lightning:
        yield "privacy.side_channels drop sends loggers no single steps, as runner 'lightning' does: use another runner"
    module: Any = trainer.lightning_module
    sees_clients = any(hasattr(module, hook) for hook in HOOKS_OF_CLIENTS)
    for owner in (*trainer.callbacks, module) if sees_clients else trainer.callbacks:
        if getattr(owner, "tells_of_clients", None):
            yield f"privacy.side_channels drop has nothing of single clients, which {type(owner).__name__} reads: leave it out"
        elif may_tell_of_clients(owner):
            yield (
                f"privacy.side_channels drop does not know whether {type(owner).__name__} logs, writes or sends something of "
                "single clients, which no noise covers: leave it out, or declare tells_of_clients = False in its class"
            )
    if hold_out:
        yield "privacy.side_channels drop has no val/… of samples that clients hold out: set data.val_fraction to 0"
    if trainer.clock.is_of_clients:
        yield "privacy.side_channels drop has no expected time with a clock of clients: use the plain one"
    if trainer.secure_aggregation is not None:
        yield "privacy.side_channels drop has no expected bits with secure_aggregation"
    if Traits.CATCHES_UP in algorithm.downlink.traits:
        yield f"privacy.side_channels drop has no expected bits with {name_of(algorithm.downlink)}, which is charged to who comes"
    for owner in (*trainer.callbacks, *algorithm.chain):
        if sets_mask(owner):
            name = type(owner).__name__
            yield f"privacy.side_channels drop has no expected bits with {name}, whose mask goes to clients as they come"


def _choosing(trainer: Run, algorithm: Algorithm, by_chance: bool) -> Iterator[str]:
    """Yield what decides whose upload counts: anything but chance in a central claim, or what tells of samples in a local one."""
    flags = ("over_selection", "deadline", "availability") if by_chance else ("over_selection", "deadline")
    why = "decides who takes part, which the claim takes for chance alone"
    for flag in flags:
        if getattr(trainer, flag) not in (None, 1):
            yield f"trainer.{flag} {why if by_chance else 'lets the time that a client trains tell of its samples'}: leave it out"
    if algorithm.exchange.capacities is not None:
        width = "lets the time that a client trains, and so its width, tell of its samples"
        yield f"the deadline of {algorithm.name} {width}: leave it out"
    if trainer.selection is None:
        return
    name = f"trainer.selection {type(trainer.selection).__name__}"
    if by_chance:
        yield f"{name} draws clients, of which the claim knows those of privacy.sampling alone: leave it out"
    elif facts := trainer.selection.tells_of_samples:
        yield f"{name} reads clients' {facts} without noise: use another selection"
    elif trainer.selection.reads_sizes and getattr(trainer.privacy, "cap", None) is None:
        yield f"{name} reads clients' numbers of samples, which are public only with privacy.weights samples and a cap: use these"


def _ending(privacy: Privacy, trainer: Run) -> Iterator[str]:
    """Yield limits of steps or bytes by which a run ends, as these depend on the clients that come, or on their samples."""
    costs, remedy = _costs(privacy), f"use max_rounds{_or_drop(privacy)}"
    for flag, unset in {"max_steps": -1, "min_steps": None}.items():
        if costs and getattr(trainer, flag) != unset:
            yield f"trainer.{flag} ends the run by clients' numbers of steps, which tell of their samples: {remedy}"
    if "comm/" in costs and any(isinstance(each, CommunicationMeter) and each.max_bytes for each in trainer.callbacks):
        yield f"CommunicationMeter ends the run by the bytes of the clients that come: {remedy}"


def _buffers(privacy: Privacy, buffers: list[str]) -> Iterator[str]:
    """Yield that buffers would cross, unless the user says how."""
    if buffers and getattr(privacy, "buffers", None) == "refuse":
        yield (
            f"clients send buffers such as {buffers[0]}, statistics of their samples: use a network with GroupNorm in place of "
            "BatchNorm, or set privacy.buffers to clip or keep"
        )

"""The server's steps on what the accepted clients sent, and what they propose."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_fl.algorithms import Algorithm
from lightning_fl.federation.loss_guard import LossGuard
from lightning_fl.slots import ServerTurn, State


@dataclass(frozen=True)
class Proposal:
    """The next state of the server.

    Attributes:
        params: the model (d,).
        buffers: its float buffers (d_b,).
        counters: integer buffers by name.
        server: state of each step.
        mask: the parameters that pruning keeps (d,), bools; None for all.
        num_steps: optimiser steps that the server made on samples of its own.
        metrics: what the steps report.
        is_undone: True if the loss guard refuses all of it but the metrics.
    """

    params: Tensor
    buffers: Tensor
    counters: dict[str, Tensor]
    server: dict[str, State]
    mask: Tensor | None
    num_steps: int
    metrics: dict[str, float]
    is_undone: bool


def take_steps(
    algorithm: Algorithm,
    guard: LossGuard,
    turn: ServerTurn,
    states: dict[str, State],
    initial_loss: float | None,
) -> Proposal:
    """Take the algorithm's steps, one after the other, each on the proposal of the one before.

    Args:
        algorithm: gives the steps.
        guard: may undo steps, or all of them.
        turn: what the first step sees.
        states: of the steps, by key; not changed.
        initial_loss: what the guard compares with, None if it is unknown.
    """
    new = {}
    for position, (key, step) in enumerate(zip(algorithm.step_names(), algorithm.steps, strict=True)):
        turn, new[key] = guard.take_step(position, step, turn, states[key])
    params = turn.proposal
    if turn.setting.unpruned is not None:
        params = params.clone().mul_(turn.setting.unpruned.factors)  # whatever a step may have added
    undone = guard.undoes(turn, initial_loss)
    server = turn.server
    return Proposal(
        params, turn.proposed_buffers, server.counters, new, turn.mask, server.num_steps, turn.metrics, undone
    )

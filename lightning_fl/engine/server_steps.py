"""The server's steps of a round, from the merged uploads to the proposal of the next model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_fl.algorithms import Algorithm
from lightning_fl.engine.roles import Roles
from lightning_fl.errors import UserError, require
from lightning_fl.slots import ServerTurn, State, Step, check_tensors, is_finite
from lightning_fl.state.outcome import Proposal


def take_steps(
    algorithm: Algorithm,
    roles: Roles,
    turn: ServerTurn,
    states: dict[str, State],
    untrained: Sequence[slice] = (),
) -> Proposal:
    """Take the algorithm's steps one after the other; each starts from the proposal of the last.

    The proposal is undone if a vector of a step's state becomes infinite or NaN, which would spoil all later rounds.

    Args:
        algorithm: algorithm that has the steps.
        roles: roles of the round, which take each step and look at the result.
        turn: turn that the first step gets.
        states: states of the steps, by key; not changed.
        untrained: parts of the model that no client trains, which stay as they are.
    """
    new = {}
    for position, (key, step) in enumerate(zip(algorithm.step_names(), algorithm.steps, strict=True)):
        try:
            turn, new[key] = roles.take_step(position, step, turn, states[key])
        except KeyError as error:
            missing, present = error.args[0], ", ".join(map(repr, turn.merged)) or "nothing"
            if missing not in step.uses | step.needs or missing in turn.merged:
                raise
            aggregator = type(algorithm.aggregator).__name__
            raise UserError(
                f"{aggregator} must return {missing!r}, which {type(step).__name__} uses, got {present}."
            ) from error
        _check(step, turn, new[key])
    params = turn.proposal
    if turn.context.unpruned is not None:
        params = params.clone().mul_(turn.context.unpruned.factors)  # steps may have changed pruned parameters
    if untrained and params is not turn.params:
        params = params.clone()  # codecs' errors and the server's momentum would move them
        for part in untrained:
            params[part] = turn.params[part]
    server = turn.server
    proposal = Proposal(params, turn.proposed_buffers, server.counters, new, turn.mask, server.num_steps, turn.metrics)
    proposal = roles.conclude(turn, proposal)
    size = turn.params.shape
    spoilt = [key for key in new if not is_finite(_vectors(new[key], size)) and is_finite(_vectors(states[key], size))]
    if spoilt:
        names = " and ".join(key.partition(":")[2] for key in spoilt)
        rank_zero_warn(
            f"Round {turn.round + 1} is undone: the state of {names} would not be finite, most likely because an upload is huge."
        )
    return replace(proposal, is_undone=proposal.is_undone or bool(spoilt))


def _check(step: Step, turn: ServerTurn, state: State) -> None:
    """Raise `UserError` unless a step has returned a state, and proposes a model of the size of the present one."""
    name = type(step).__name__
    check_tensors(state, f"The state that {name} returns")
    for place, proposal, present in (
        ("proposal", turn.proposal, turn.params),
        ("proposed_buffers", turn.proposed_buffers, turn.buffers),
    ):
        found = f"one of shape {tuple(proposal.shape)}" if isinstance(proposal, Tensor) else type(proposal).__name__
        require(
            isinstance(proposal, Tensor) and proposal.shape == present.shape,
            f"{name} must set turn.{place} to a tensor of shape {tuple(present.shape)}, got {found}.",
        )


def _vectors(state: State, size: torch.Size) -> State:
    """Return the vectors of the model's size; a single number may be infinite, such as the least loss so far before the first."""
    return {name: entry for name, entry in state.items() if entry.shape == size}

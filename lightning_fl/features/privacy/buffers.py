"""Float buffers of clients, such as BatchNorm's running statistics of their samples, in a private run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from lightning_fl.engine.roles import Roles
from lightning_fl.slots import Message, Result, ServerTurn
from lightning_fl.state.outcome import Proposal
from lightning_fl.state.run_state import Run
from lightning_fl.vectors.layout import Layout

Buffers = Literal["refuse", "clip", "keep"]
LEAST_VARIANCE = 1e-5
"""Least running variance after noise, that of BatchNorm's ε."""


def without_buffers(result: Result) -> Result:
    """Return a client's result without buffers, which stay the server's."""
    return replace(result, message={name: entry for name, entry in result.message.items() if name != "buffers"})


def above_least_variance(merged: Message, present: Tensor, layout: Layout, buffers: Buffers) -> Message:
    """Return a merged message whose changes of buffers, which may have noise, leave running variances of at least 1e-5.

    Args:
        merged: the mean of the uploads, and the uploads themselves if the aggregator keeps them.
        present: the server's buffers (d_b,).
        layout: position of each in them.
        buffers: treatment of clients' buffers.
    """
    names = _running_variances(layout)
    if buffers != "clip" or not names:
        return merged
    least = layout.views(LEAST_VARIANCE - present)
    changed = {name: merged[name].clone() for name in ("buffers", "uploads/buffers") if name in merged}
    for entry in changed.values():
        views = layout.views(entry)
        for name in names:
            views[name].copy_(torch.maximum(views[name], least[name]))
    return merged | changed


def keeping_counters(turn: ServerTurn, run: Run) -> ServerTurn:
    """Return a turn in which the server's integer buffers stay as they are, because clients' integer buffers have no noise."""
    return replace(turn, server=replace(turn.server, counters=run.counters))  # type: ignore[type-var]


def without_needless_noise(turn: ServerTurn, buffers: Buffers) -> ServerTurn:
    """Return a turn whose uploads have no noise for parameters that nobody trains, and leave variances above 0.

    The server's steps and the loss guard see this turn.
    """
    merged = without_noise(turn.merged, len(turn.params), turn.server.untrained)
    return replace(turn, merged=above_least_variance(merged, turn.buffers, turn.context.buffer_layout, buffers))


def without_noise(message: Message, size: int, untrained: Sequence[slice]) -> Message:
    """Return a message whose entries (…, d), d = `size`, are 0 where they would be only noise."""
    if not untrained:
        return message
    of_model = {name: entry for name, entry in message.items() if not name.endswith("buffers")}
    cleared = {name: entry.clone() for name, entry in of_model.items() if entry.shape[-1:] == (size,)}
    for entry in cleared.values():
        for part in untrained:
            entry[..., part] = 0
    return message | cleared


def keeping_variances(roles: Roles, buffers: Buffers) -> Roles:
    """Return the roles of a round whose proposal has running variances of at least 1e-5, to which noise may have been added."""
    if buffers != "clip":
        return roles

    def conclude(turn: ServerTurn, proposal: Proposal) -> Proposal:
        proposal, layout = roles.conclude(turn, proposal), turn.context.buffer_layout
        names = _running_variances(layout)
        if not names:
            return proposal
        clamped = proposal.buffers.clone()
        views = layout.views(clamped)
        for name in names:
            views[name].clamp_(min=LEAST_VARIANCE)
        return replace(proposal, buffers=clamped)

    return replace(roles, conclude=conclude)


def _running_variances(layout: Layout) -> list[str]:
    return [name for name in layout.names if name.endswith("running_var")]

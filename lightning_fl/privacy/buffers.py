"""Float buffers of clients, such as BatchNorm's running statistics of their samples, in a private run."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from lightning_fl.checks import check_choice
from lightning_fl.slots import Result, RoundContext
from lightning_fl.state.outcome import Proposal

Buffers = Literal["refuse", "clip", "keep"]
LEAST_VARIANCE = 1e-5
"""Least running variance after noise, that of BatchNorm's ε."""


def check_buffers(buffers: str) -> None:
    """Raise `UserError` unless it is one of the three ways."""
    check_choice("privacy.buffers", buffers, ("refuse", "clip", "keep"))


def without_buffers(result: Result) -> Result:
    """Return a client's result without buffers, which stay the server's."""
    return replace(result, message={name: entry for name, entry in result.message.items() if name != "buffers"})


def with_variances(proposal: Proposal, context: RoundContext, buffers: Buffers) -> Proposal:
    """Return the server's proposal with running variances of at least 1e-5, to which noise may have been added."""
    names = [name for name in context.buffer_layout.names if name.endswith("running_var")]
    if buffers != "clip" or not names:
        return proposal
    clamped = proposal.buffers.clone()
    views = context.buffer_layout.views(clamped)
    for name in names:
        views[name].clamp_(min=LEAST_VARIANCE)
    return replace(proposal, buffers=clamped)

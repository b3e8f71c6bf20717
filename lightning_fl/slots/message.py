"""Messages between server and clients: flat vectors by name."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

import torch
from torch import Tensor

from lightning_fl.errors import require
from lightning_fl.vectors.kinds import kind_of

MEAN_GRADIENT = "moments/gradient"
"""Name of the gradient (d,) on all samples of a client at the received model, or of its mean over the clients.

If a rule needs it, clients and server get a turn before the training (`lightning_fl.exchanges.GradientTurn`).
"""
UPLOADS = "uploads/model"
"""Name of the clients' deltas (K, d), which an aggregator keeps for the steps."""
UPLOAD_WEIGHTS = "uploads/weight"
"""Name of the clients' weights (K,) in the mean of their models, not yet divided by their sum; comes with `UPLOADS`."""
SENT = "mask/sent"
"""Name of the masks of the numbers that each client sent (`Upload.sent`); an exchange of parts provides them."""
CHOSEN = "mask/chosen"
"""Name of the one-hot mask (C,), bools, of the model, out of C, that an upload has trained."""
PROPOSAL = "model/proposal"
"""Name of the proposal of the earlier steps (`ServerTurn.proposal`)."""
Message = dict[str, Tensor]
"""Vectors by name, `kind` or `kind/name`: (d,) for `model` and `moments/…`, (d_b,) for `buffers`."""
State = dict[str, Tensor]
"""Tensors that a part keeps from round to round, by any name."""


def several_models(count: int) -> tuple[str, ...]:
    """Return the names of the entries with several models, of which the first is `model`.

    >>> several_models(3)
    ('model', 'model/2', 'model/3')
    """
    return ("model", *(f"model/{number}" for number in range(2, count + 1)))[:count]


def check_tensors(value: object, what: str, axes: int = 0) -> None:
    """Raise `UserError` unless a part has returned a dictionary of tensors by name.

    Args:
        value: what the part has returned.
        what: what it should be, and of which part, for the sentence.
        axes: least number of axes of each tensor.
    """
    found = None if isinstance(value, Mapping) else "None" if value is None else type(value).__name__
    for name, entry in value.items() if isinstance(value, Mapping) else ():
        if not isinstance(entry, Tensor):
            found = f"{name!r} of type {type(entry).__name__}"
        elif entry.dim() < axes:
            way_out = "keep one axis, as in sum(-1, keepdim=True) or torch.ones(1)"
            found = f"{name!r} of shape {tuple(entry.shape)}: {way_out}"
    require(found is None, f"{what} must be a dictionary of {'vectors' if axes else 'tensors'} by name, got {found}.")


def is_finite(*messages: Message) -> bool:
    """True if no number in these messages is NaN or infinite."""
    vectors = list({id(x): x for message in messages for x in message.values()}.values())
    # A finite sum proves it without a copy; an infinite sum may be an overflow. The host waits for an accelerator only once.
    away = [x for x in vectors if x.device.type != "cpu"]
    if len(away) > 1 and torch.stack([x.sum().double() for x in away]).isfinite().all():
        vectors = [x for x in vectors if x.device.type == "cpu"]
    return all(isfinite(float(x.sum())) or bool(torch.isfinite(x).all()) for x in vectors)


def compressible(name: str) -> bool:
    """True if a lossy codec may change a message entry: only vectors (d,) of the model and its moments.

    >>> [compressible(name) for name in ("model", "moments/first", "buffers", "scalars/steps")]
    [True, True, False, False]
    """
    return kind_of(name) in ("model", "moments")

"""What crosses between server and clients: flat vectors under names."""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor

from lightning_fl.outputs.units import KINDS

MEAN_GRADIENT = "moments/gradient"
"""Gradient on all samples of a client at the received model, or the mean of these gradients over the clients."""
Message = dict[str, Tensor]
State = dict[str, Tensor]


def kind_of(name: str) -> str:
    """The ledger's kind of a message entry.

    >>> kind_of("moments/control")
    'moments'
    """
    kind = name.partition("/")[0]
    if kind not in KINDS:
        raise ValueError(f"a message entry is named after its kind ({', '.join(KINDS)}); got {name!r}")
    return kind


def is_finite(*messages: Message) -> bool:
    """Whether no number of some messages is NaN or infinite; a finite sum says so at once."""
    vectors = {id(x): x for message in messages for x in message.values()}.values()
    return all(isfinite(float(x.sum())) or bool(torch.isfinite(x).all()) for x in vectors)


def compressible(name: str) -> bool:
    """Whether a lossy codec may touch a message entry: vectors (d,) of the model and its moments, nothing else.

    >>> [compressible(name) for name in ("model", "moments/first", "buffers", "scalars/steps")]
    [True, True, False, False]
    """
    return kind_of(name) in ("model", "moments")

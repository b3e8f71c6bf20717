"""Parameters and buffers that clients own: they change with the rest of the network, are kept between rounds and never sent.

A client has its own values from the first round in which it takes part, and the module's initial values before. They are
entries of the client's state next to the rule's: the parameters one vector (g,) under `PERSONAL`, the float buffers another
under `PERSONAL_BUFFERS`, and each integer buffer under `counter_entry` of its name. Rule, codecs and server see only the other
parameters and buffers, the vectors (d,) and (d_b,).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fl.errors import nearest, require

PERSONAL = "personal"
"""Entry of a client's state that holds its own parameters."""
PERSONAL_BUFFERS = "personal/buffers"
"""Entry of a client's state that holds its own float buffers."""


def counter_entry(name: str) -> str:
    """Return the name of the entry of a client's state that holds one of its own integer buffers."""
    return f"personal/counters/{name}"


def initially_owned(run_state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return what a client owns before it takes part, as entries of its state, from the saved state of a run."""
    # Checkpoints of 0.1 lack the parameters and those of 0.2.0 the buffers, which were all shared.
    return {PERSONAL: run_state.get("personal", torch.zeros(0)), **run_state.get("personal_buffers", {})}


def personal_names(module: nn.Module, asked: Sequence[str]) -> list[str]:
    """Return the names of the trainable parameters that `asked` selects, in the module's order.

    Args:
        module: module that holds the parameters.
        asked: names of parameters, or of parts of the module, such as `network.fc`; or of buffers, see `personal_buffer_names`.

    Raises:
        UserError: no trainable parameter or part, and no buffer, has such a name.

    >>> personal_names(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), ["1"])
    ['1.weight', '1.bias']
    """
    trainable = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    found = set()
    for wanted in asked:
        own = [name for name in trainable if name == wanted or name.startswith(f"{wanted}.")]
        parts = {name.rpartition(".")[0] for name in trainable} | set(trainable)
        require(
            bool(own) or bool(_buffers(module, wanted)),
            f"personal names {wanted!r}, but {type(module).__name__} trains no such part; {nearest(wanted, parts)}.",
        )
        found.update(own)
    return [name for name in trainable if name in found]


def personal_buffer_names(module: nn.Module, asked: Sequence[str]) -> list[str]:
    """Return the names of the buffers that `asked` selects: those named, and all of a named part that trains nothing.

    >>> personal_buffer_names(nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2, affine=False)), ["0", "1"])
    ['1.running_mean', '1.running_var', '1.num_batches_tracked']
    """
    return [name for name, _ in module.named_buffers() if any(name in _buffers(module, wanted) for wanted in asked)]


def _buffers(module: nn.Module, wanted: str) -> list[str]:
    """Return the buffer of this name, or those of the part of this name unless it trains a parameter."""
    inside = f"{wanted}."
    trains = any(name.startswith(inside) for name, parameter in module.named_parameters() if parameter.requires_grad)
    names = [name for name, _ in module.named_buffers()]
    return [name for name in names if name == wanted or (not trains and name.startswith(inside))]

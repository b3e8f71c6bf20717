"""Parameters and buffers that clients own: they change with the rest of the network, are kept between rounds and never sent.

A client has its own values from the first round in which it takes part, and the module's initial values before. They are
entries of the client's state next to the rule's: the parameters one vector (g,) under `PERSONAL`, the float buffers another
under `PERSONAL_BUFFERS`, and each integer buffer under `counter_entry` of its name. Rule, codecs and server see only the other
parameters and buffers, the vectors (d,) and (d_b,).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

PERSONAL = "personal"
"""Entry of a client's state that holds its own parameters."""
PERSONAL_BUFFERS = "personal/buffers"
"""Entry of a client's state that holds its own float buffers."""
OWN = "own/"
"""Beginning of the names of the entries of a client's state that hold a whole model of its own."""


def counter_entry(name: str) -> str:
    """Return the name of the entry of a client's state that holds one of its own integer buffers."""
    return f"personal/counters/{name}"


def initially_owned(run_state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return what a client owns before it takes part, as entries of its state, from the saved state of a run."""
    return {PERSONAL: run_state["personal"], **run_state["personal_buffers"]}

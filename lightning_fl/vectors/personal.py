"""Parameters that clients own: trained with the rest of the network, kept between rounds, never sent.

A client has values of its own from the first round in which it takes part; until then it has those that the module began with,
as all do. They are one vector (g,) under `PERSONAL` in the client's state, beside what the rule keeps. Rule, codecs and server
see the other parameters only, the vector (d,).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lightning_fl.errors import nearest, require

PERSONAL = "personal"
"""The entry of a client's state that holds its own parameters."""


def personal_names(module: nn.Module, asked: Sequence[str]) -> list[str]:
    """Names of the trainable parameters that are asked for, in the order in which the module has them.

    Args:
        module: whose parameters they are.
        asked: names of parameters, or of parts of the module, such as `network.fc`.

    Raises:
        UserError: nothing that trains has such a name.

    >>> personal_names(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), ["1"])
    ['1.weight', '1.bias']
    """
    trainable = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    found = set()
    for wanted in asked:
        own = [name for name in trainable if name == wanted or name.startswith(f"{wanted}.")]
        parts = {name.rpartition(".")[0] for name in trainable} | set(trainable)
        require(
            bool(own),
            f"personal names {wanted!r}, where {type(module).__name__} trains nothing; {nearest(wanted, parts)}.",
        )
        found.update(own)
    return [name for name in trainable if name in found]

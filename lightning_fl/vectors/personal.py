"""Parameters that clients own: trained with the rest of the network, kept between rounds, never sent.

A client has its own values from the first round in which it takes part, and the module's initial values before. They are one
vector (g,) under `PERSONAL` in the client's state, next to the rule's entries. Rule, codecs and server see only the other
parameters, the vector (d,).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lightning_fl.errors import nearest, require

PERSONAL = "personal"
"""Entry of a client's state that holds its own parameters."""


def personal_names(module: nn.Module, asked: Sequence[str]) -> list[str]:
    """Return the names of the trainable parameters that `asked` selects, in the module's order.

    Args:
        module: module that holds the parameters.
        asked: names of parameters, or of parts of the module, such as `network.fc`.

    Raises:
        UserError: no trainable parameter or part has such a name.

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
            f"personal names {wanted!r}, but {type(module).__name__} trains no such part; {nearest(wanted, parts)}.",
        )
        found.update(own)
    return [name for name in trainable if name in found]

"""Parameters that clients own: trained with the rest of the network, kept between rounds, never sent.

A client has values of its own from the first round in which it takes part; until then it has those that the module began with,
as all do. They are one vector (g,) under `PERSONAL` in the client's state, beside what the rule keeps. Rule, codecs and server
see the other parameters only, the vector (d,).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import copy

from torch import Tensor, nn
from torch.optim import Optimizer

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


class PersonalOptimizer:
    """Steps what clients own as the module's optimiser would, at its learning rates, but without weight decay.

    An optimiser of the same class and options with a state of its own, empty when a client starts.
    """

    def __init__(self, source: Optimizer, names: Sequence[Sequence[str]]) -> None:
        """Make the twin.

        Args:
            source: the module's optimiser.
            names: of the personal parameters in each of its groups.
        """
        self._source, self._names = source, names
        self._twin = copy(source)
        self._twin.state = defaultdict(dict)
        self._twin.param_groups = [{**group, "params": []} for group in source.param_groups]

    def bind(self, leaves: Mapping[str, Tensor]) -> None:
        """Step these tensors, which carry their gradients, from now on, with an empty state."""
        self._twin.state.clear()
        for group, names in zip(self._twin.param_groups, self._names, strict=True):
            group["params"] = [leaves[name] for name in names]

    def narrow(self, leaves: Mapping[str, Tensor], num_clients: int) -> None:
        """Go on with the first clients of a stack, whose tensors these are."""
        earlier = dict(self._twin.state)
        old = [group["params"] for group in self._twin.param_groups]
        self.bind(leaves)
        for group, before in zip(self._twin.param_groups, old, strict=True):
            for leaf, whole in zip(group["params"], before, strict=True):
                self._twin.state[leaf] = {
                    key: x[:num_clients] if isinstance(x, Tensor) and x.shape == whole.shape else x
                    for key, x in earlier.get(whole, {}).items()
                }

    def step(self) -> None:
        """One step of all that has a gradient."""
        for own, group in zip(self._twin.param_groups, self._source.param_groups, strict=True):
            own.update({key: value for key, value in group.items() if key not in ("params", "weight_decay")})
            if "weight_decay" in own:
                own["weight_decay"] = 0.0
        self._twin.step()

"""The optimiser of personal parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import copy

from torch import Tensor
from torch.optim import Optimizer


class PersonalOptimizer:
    """Step personal parameters as the module's optimiser would, at its learning rates, but without weight decay.

    It is an optimiser of the same class and options with its own state, which is empty when a client starts.
    """

    def __init__(self, source: Optimizer, names: Sequence[Sequence[str]]) -> None:
        """Create the optimiser.

        Args:
            source: the module's optimiser.
            names: names of the personal parameters in each of its groups.
        """
        self._source, self._names = source, names
        self._twin = copy(source)
        # torch copies no attributes of users' classes. A `step` from a scheduler, or an optimiser inside, would step the source.
        copied = {"step", *vars(self._twin)}
        own = {name: x for name, x in vars(source).items() if name not in copied and not isinstance(x, Optimizer)}
        vars(self._twin).update(own)
        self._twin.state = defaultdict(dict)
        self._twin.param_groups = [{**group, "params": []} for group in source.param_groups]

    def bind(self, leaves: Mapping[str, Tensor]) -> None:
        """Step these tensors, which carry their gradients, from now on, with an empty state."""
        self._twin.state.clear()
        for group, names in zip(self._twin.param_groups, self._names, strict=True):
            group["params"] = [leaves[name] for name in names]

    def narrow(self, leaves: Mapping[str, Tensor], num_clients: int) -> None:
        """Keep only the first clients of a stack, whose tensors are `leaves`."""
        earlier = dict(self._twin.state)
        old = [group["params"] for group in self._twin.param_groups]
        self.bind(leaves)
        for group, before in zip(self._twin.param_groups, old, strict=True):
            for leaf, whole in zip(group["params"], before, strict=True):
                self._twin.state[leaf] = {
                    key: x[:num_clients] if isinstance(x, Tensor) and x.shape == whole.shape else x
                    for key, x in earlier.get(whole, {}).items()
                }

    def drop_gradients(self) -> None:
        """Let the next step change nothing."""
        self._twin.zero_grad(set_to_none=True)

    def step(self) -> None:
        """Make one step of all tensors that have a gradient."""
        for twin_group, group in zip(self._twin.param_groups, self._source.param_groups, strict=True):
            twin_group.update({key: value for key, value in group.items() if key not in ("params", "weight_decay")})
            if "weight_decay" in twin_group:
                twin_group["weight_decay"] = 0.0
        self._twin.step()

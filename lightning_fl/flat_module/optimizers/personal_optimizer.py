"""The optimiser of personal parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import copy, deepcopy

from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_fl.errors import require
from lightning_fl.flat_module.optimizers.fresh_state import FreshState, copied_attributes, own_attributes, with_inner


class PersonalOptimizer:
    """Step personal parameters as the module's optimiser would, at its learning rates, but without weight decay.

    It is an optimiser of the same class and options with its own state, which is empty when a client starts.
    """

    def __init__(self, source: Optimizer, names: Sequence[Sequence[str]]) -> None:
        """Create the optimiser.

        Args:
            source: the module's optimiser.
            names: names of the personal parameters in each of its groups.

        Raises:
            UserError: the module's optimiser wraps another, which would step the shared parameters as well.
        """
        self._source, self._names = source, names
        self._twin: Optimizer = _twin(source) if any(names) else SGD([{"params": []} for _ in names], lr=0.0)
        self._fresh_state = FreshState([self._twin])

    def bind(self, leaves: Mapping[str, Tensor]) -> None:
        """Step these tensors, which carry their gradients, from now on, with an empty state."""
        self._fresh_state.end()
        self._fresh_state.begin()
        self._give(leaves)

    def narrow(self, leaves: Mapping[str, Tensor], num_clients: int) -> None:
        """Keep only the first clients of a stack, whose tensors are `leaves`."""
        earlier = dict(self._twin.state)
        old = [group["params"] for group in self._twin.param_groups]
        self._twin.state.clear()
        self._give(leaves)
        for group, before in zip(self._twin.param_groups, old, strict=True):
            for leaf, whole in zip(group["params"], before, strict=True):
                self._twin.state[leaf] = {
                    key: x[:num_clients] if isinstance(x, Tensor) and x.shape == whole.shape else x
                    for key, x in earlier.get(whole, {}).items()
                }

    def _give(self, leaves: Mapping[str, Tensor]) -> None:
        for group, names in zip(self._twin.param_groups, self._names, strict=True):
            group["params"] = [leaves[name] for name in names]

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


def _twin(source: Optimizer) -> Optimizer:
    """Return an optimiser like `source`, with groups that have its options but no parameters."""
    inner = [type(one).__name__ for one in with_inner(source)][1:]
    require(
        not inner,
        f"{type(source).__name__} wraps {' and '.join(inner)}, and cannot step personal parameters apart from the others: let "
        "configure_optimizers return an optimizer that wraps no other.",
    )
    twin = copy(source)
    # torch copies no attributes of users' classes. A `step` from a scheduler would step the source.
    own = {name: value for name, value in vars(source).items() if name not in {"step", *vars(twin)}}
    vars(twin).update(own | copied_attributes(own_attributes(source)))
    twin.state = defaultdict(dict, {key: deepcopy(x) for key, x in source.state.items() if not isinstance(key, Tensor)})
    twin.param_groups = [{**group, "params": []} for group in source.param_groups]
    return twin

"""Any torch optimiser on the server (FedOpt: Reddi et al., Adaptive Federated Optimization, ICLR 2021)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fl.checks import check_positive, needs_closure, parameters_of
from lightning_fl.errors import UserError, require
from lightning_fl.slots import PROPOSAL, ServerTurn, State, Step
from lightning_fl.vectors.layout import Layout

SCALARS = "scalars/"


class OptimizerMaker:
    """Function that makes a torch optimiser of the parameters it is given, tried once on a matrix and a vector.

    Attributes:
        name: class of the optimiser.
        options: its options by name; a list if there are several groups of parameters.
        is_factored: True if it keeps numbers for rows or columns, which a pruning cannot cut.
    """

    changeable = frozenset({"betas", "eps", "lr", "weight_decay"})

    def __init__(self, make: Callable[[Iterable[Tensor]], Optimizer]) -> None:
        """Make an optimiser, and let it take a step.

        Raises:
            UserError: it fails, needs a closure or has no learning rate, leaves parameters out, or keeps numbers elsewhere than
                in tensors of its state.
        """
        self._make = make
        leaves = [torch.zeros(2, 3), torch.zeros(3)]
        try:
            optimizer = self(leaves)
        except Exception as error:
            raise UserError(
                "a server optimiser is a function from parameters to a torch optimiser, such as partial(torch.optim.Adam, "
                f"lr=0.01); this one fails ({type(error).__name__}: {error})."
            ) from error
        self.name = type(optimizer).__name__
        require(isinstance(optimizer, Optimizer), f"a server optimiser must be a torch optimiser, got {self.name}.")
        require(
            {id(leaf) for leaf in leaves} == {id(leaf) for group in optimizer.param_groups for leaf in group["params"]},
            f"a server optimiser must step all parameters that it is given, and no others, but this {self.name} does not.",
        )
        groups = _options(optimizer)
        for options in groups:
            rate = options.get("lr")
            check_positive(f"lr of {self.name} on the server", float(rate) if isinstance(rate, Tensor) else rate)
        names = sorted({name for options in groups for name, value in options.items() if value is not None})
        values = {name: [options.get(name) for options in groups] for name in names}
        self.options = {name: each[0] if len(each) == 1 else each for name, each in values.items()}
        defaults = {name: parameter.default for name, parameter in parameters_of(type(optimizer)).items()}
        self._given = {name: value for name, value in self.options.items() if value != defaults.get(name)}
        self.is_factored = self._try_step(optimizer, leaves)

    def _try_step(self, optimizer: Optimizer, leaves: Iterable[Tensor]) -> bool:
        """Return True if the state after a step is factored."""
        require(
            not needs_closure(optimizer),
            f"the server cannot use {self.name}, which needs the loss several times in a step (a closure): use SGD, Adam or "
            "another that needs no closure.",
        )
        for leaf in leaves:
            leaf.grad = torch.zeros_like(leaf)
        before = repr(_options(optimizer))
        try:
            optimizer.step()
        except Exception as error:
            raise UserError(f"the server cannot use {self.name} ({type(error).__name__}: {error}).") from error
        kept_values = [
            (leaf, value) for leaf in leaves for value in optimizer.state[leaf].values() if value is not None
        ]
        require(
            repr(_options(optimizer)) == before and all(isinstance(value, Tensor) for _, value in kept_values),
            f"the server cannot use {self.name}, which keeps numbers elsewhere than in tensors of its state.",
        )
        return any(value.numel() > 1 and value.shape != leaf.shape for leaf, value in kept_values)

    def __call__(self, params: Iterable[Tensor]) -> Optimizer:
        """Return an optimiser of these parameters."""
        return self._make(list(params))

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self._given.items())})"


@dataclass(frozen=True)
class ServerOptimizer(Step):
    """G = proposal − w;  w ← one step of a torch optimiser from w with the gradient −G, for each tensor of the model.

    Weight decay acts on w, as in torch, but not on parameters that the module's optimiser lacks, which stay as they are.
    Buffers are left as proposed. The optimiser is made anew in every round. State with the shape of every parameter is kept as
    a vector (d,) under its own name; other state, such as the number of steps, is kept under `scalars/PARAMETER/NAME`.

    Attributes:
        optimizer: function from parameters to a torch optimiser, in YAML its class_path and init_args. It needs a learning rate
            and must not need a closure.
    """

    sums_suffice = True
    needs = uses = frozenset({PROPOSAL})
    changes_model = False
    optimizer: Callable[[Iterable[Tensor]], Optimizer]

    def __post_init__(self) -> None:
        if not isinstance(self.optimizer, OptimizerMaker):
            object.__setattr__(self, "optimizer", OptimizerMaker(self.optimizer))

    @property
    def follows_pruning(self) -> bool:
        """True unless the optimiser keeps numbers for rows or columns."""
        assert isinstance(self.optimizer, OptimizerMaker)
        return not self.optimizer.is_factored

    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Replace the proposal by the optimiser's."""
        layout, proposal = turn.context.layout, turn.params.clone()
        leaves, gradients = _leaves(layout, proposal), _leaves(layout, turn.params - turn.proposal)
        for name, leaf in leaves.items():
            leaf.grad = gradients[name]
        optimizer = self.optimizer(leaves.values())
        _load(optimizer, layout, leaves, state)
        optimizer.step()
        for part in turn.server.untrained:
            proposal[part] = turn.params[part]
        turn.proposal = proposal
        return _read(optimizer, layout, leaves)


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of each group of parameters."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def _leaves(layout: Layout, vector: Tensor) -> dict[str, Tensor]:
    """Return views of a vector, one number as (1,), so that it differs in shape from a number of steps, ()."""
    return {name: torch.atleast_1d(view) for name, view in layout.views(vector).items()}


def _load(optimizer: Optimizer, layout: Layout, leaves: Mapping[str, Tensor], state: State) -> None:
    """Give an optimiser a copy of a state; an entry that it made itself, as Adagrad does, is replaced."""
    for key, entry in state.items():
        if key.startswith(SCALARS):
            name, _, inner = key.removeprefix(SCALARS).rpartition("/")
            optimizer.state[leaves[name]][inner] = entry.clone()
        else:
            for name, view in _leaves(layout, entry.clone()).items():
                optimizer.state[leaves[name]][key] = view


def _read(optimizer: Optimizer, layout: Layout, leaves: Mapping[str, Tensor]) -> State:
    """Return the state of an optimiser."""
    of = {
        name: {key: entry for key, entry in optimizer.state[leaf].items() if entry is not None}
        for name, leaf in leaves.items()
    }
    keys = {key for entries in of.values() for key in entries}
    whole = {
        key for key in keys if all(key in of[name] and of[name][key].shape == leaves[name].shape for name in leaves)
    }
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    state = {key: layout.flatten({name: of[name][key].view(shapes[name]) for name in of}) for key in sorted(whole)}
    for name, entries in of.items():
        state |= {f"{SCALARS}{name}/{key}": entry for key, entry in entries.items() if key not in whole}
    return state

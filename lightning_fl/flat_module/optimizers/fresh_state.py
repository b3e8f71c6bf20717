"""The state with which each client's optimiser begins, also where it wraps another optimiser or counts steps in attributes."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from copy import copy, deepcopy
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fl.pruning import Plan

PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
ARRAYS = (np.ndarray, np.generic, random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
"""Arrays, and generators of random numbers, which are copied as well."""
MODEL = object()
"""Stands for the values of a parameter when a client begins."""


class FreshState:
    """Lets each client begin with optimisers as they were made, and leaves no trace of its training in them.

    Some optimisers wrap another, with a state of its own, such as Lookahead and SAM, and some keep counters, arrays or tensors in
    attributes. `Schedules` restores the hyper-parameters in groups.

    Attributes:
        states: what the `state` of each optimiser holds before the first step, a mapping by parameter; `MODEL` where it holds the
            parameter's values, as the slow weights of Lookahead do.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._parts = list({id(part): part for one in optimizers for part in with_inner(one)}.values())
        self.states = [_first_states(part) for part in self._parts]
        self._attributes: list[dict[str, Any]] | None = None
        """Attributes with which the client has begun; None between clients."""

    def begin(self) -> None:
        """Set the states of a client that begins."""
        for part in self._parts:
            part.state.clear()
        for part, states in zip(self._parts, self.states, strict=True):
            part.state.update({parameter: _state_of(parameter, state) for parameter, state in states.items()})
        self._attributes = [copied_attributes(own_attributes(part)) for part in self._parts]

    def end(self) -> None:
        """Empty the states and undo what the client's steps have changed in attributes, so that only changes between rounds last.

        A hook between rounds that mixes the state into the parameters, such as `optimizer.eval()` of schedule-free optimisers,
        would mix the last client's into the server's model.
        """
        if self._attributes is None:
            return
        for part, attributes in zip(self._parts, self._attributes, strict=True):
            for name in own_attributes(part).keys() - attributes.keys():
                delattr(part, name)
            vars(part).update(attributes)
            part.state.clear()
        self._attributes = None

    def follow(self, plans: Iterable[Plan], names: Mapping[Any, str]) -> None:
        """Cut the states of parameters, whose `names` are given, as prunings have cut these."""
        for parameter, state in (entry for states in self.states for entry in states.items()):
            for key, value in state.items() if isinstance(parameter, Tensor) else ():
                if isinstance(value, Tensor) and value.dim() == parameter.dim():
                    for plan in plans:
                        value = plan.cut(names[parameter], value)
                    state[key] = value

    def copied(self) -> FreshState:
        """Return the same with mappings of its own, for a module that is a smaller network for a while."""
        same = copy(self)
        same.states = [{key: copy(state) for key, state in states.items()} for states in self.states]
        return same


def with_inner(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield an optimiser and those in its attributes."""
    yield optimizer
    for name, value in vars(optimizer).items():
        if name not in _names_of_torch():
            for inner in _leaves(value):
                if isinstance(inner, Optimizer):
                    yield from with_inner(inner)


def _first_states(optimizer: Optimizer) -> dict[Any, Any]:
    """Return the states that an optimiser has when it is made: mappings of parameters, or anything under other keys."""
    of_parameters = {key: state for key, state in optimizer.state.items() if isinstance(key, Tensor)}
    of_model = set()
    for name in {name for state in of_parameters.values() for name in state}:
        pairs = [(parameter, state[name]) for parameter, state in of_parameters.items() if name in state]
        # Zeros are no sign of a copy: a parameter may be zero at first, and so may a sum.
        if all(_holds(value, parameter) for parameter, value in pairs) and any(value.any() for _, value in pairs):
            of_model.add(name)
    others = {key: deepcopy(state) for key, state in optimizer.state.items() if key not in of_parameters}
    return others | {
        parameter: {name: MODEL if name in of_model else deepcopy(value) for name, value in state.items()}
        for parameter, state in of_parameters.items()
    }


def _holds(value: Any, parameter: Tensor) -> bool:
    """True if a value is a tensor like the parameter, with the same numbers."""
    if not isinstance(value, Tensor) or (value.dtype, value.device) != (parameter.dtype, parameter.device):
        return False
    return torch.equal(value, parameter)


def _state_of(parameter: Any, state: Any) -> Any:
    """Return the state with which a client begins."""
    if not isinstance(parameter, Tensor):
        return deepcopy(state)
    return {name: parameter.detach().clone() if value is MODEL else deepcopy(value) for name, value in state.items()}


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimiser that steps may change: numbers, texts, arrays, and containers of them."""
    if type(optimizer).__module__.startswith("torch.optim."):
        return {}
    own = {name: value for name, value in vars(optimizer).items() if name not in _names_of_torch()}
    return {name: value for name, value in own.items() if all(map(_is_data, _leaves(value)))}


def copied_attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of attributes in which parameters stay the same objects."""
    parameters = [leaf for leaf in _leaves(attributes) if isinstance(leaf, nn.Parameter)]
    return deepcopy(attributes, {id(parameter): parameter for parameter in parameters})


def _leaves(value: Any) -> Iterator[Any]:
    """Yield what containers hold, also as keys."""
    if isinstance(value, Mapping):
        yield from _leaves([*value.keys(), *value.values()])
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        for element in value:
            yield from _leaves(element)
    else:
        yield value


def _is_data(leaf: Any) -> bool:
    """True if a value can be copied: unlike modules, functions, and tensors with a graph."""
    return isinstance(leaf, (*PLAIN, *ARRAYS)) or (isinstance(leaf, Tensor) and leaf.is_leaf)


@cache
def _names_of_torch() -> frozenset[str]:
    """Return the names of the attributes that every optimiser has."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=1.0)))

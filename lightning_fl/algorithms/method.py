"""Base classes of methods with names, and of methods over a base method; their users fill the slots that are left."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from inspect import signature
from typing import Any

from lightning_fl.algorithms.algorithm import Algorithm
from lightning_fl.algorithms.given_parts import made_steps
from lightning_fl.checks import parameters_of
from lightning_fl.errors import require
from lightning_fl.slots import Aggregator, Codec, Exchange, Rule, Step
from lightning_fl.steps import Apply

SLOTS = tuple(parameters_of(Algorithm))


class Method(Algorithm):
    """An algorithm with a name, which fills some slots; its users fill the others: `FedProx(mu=0.1, uplink=TopK(0.1))`.

    A method's constructor has the paper's hyper-parameters, takes `**slots` besides, and hands them to this one. What it hands on
    by name are the slots that it fills itself; its own steps are the first argument, and those of its users follow.
    """

    @classmethod
    def _refuse(cls, given: Iterable[str]) -> None:
        known = parameters_of(cls)
        filled = [name for name in SLOTS if name in given and name not in known]
        require(
            not filled,
            f"{cls.__name__} fills the slot {', '.join(filled)} itself, and takes "
            f"{', '.join(name for name in SLOTS if name in known) or 'no other'}; Algorithm takes every slot.",
        )

    def __init__(
        self,
        own: Sequence[Step] = (Apply(),),
        /,
        *,
        rule: Rule | None = None,
        uplink: Codec | None = None,
        downlink: Codec | None = None,
        exchange: Exchange | None = None,
        aggregator: Aggregator | None = None,
        steps: Sequence[Step] | None = None,
        personal: Sequence[str] | None = None,
    ) -> None:
        """Fill the slots; those that neither the method nor its user fills are FedAvg's.

        Args:
            own: The method's own steps of the server.
            rule: Optimiser steps of a client, and its upload; the module's own optimiser if not given.
            uplink: Codec of the clients' uploads; Dense if not given.
            downlink: Codec of the server's broadcast; Dense if not given.
            exchange: Turns of a round, and the parts that clients upload; one upload of all if not given.
            aggregator: Merges the uploads; their mean by samples if not given.
            steps: Further steps of the server, after the method's own.
            personal: Names of the module's parameters and buffers, or of its parts, that every client keeps for itself; of a part
                that trains parameters these alone.
        """
        given = {"rule": rule, "uplink": uplink, "downlink": downlink, "exchange": exchange, "aggregator": aggregator}
        further = () if steps is None else made_steps(steps)
        super().__init__(
            **{name: part for name, part in given.items() if part is not None},  # type: ignore[arg-type]
            steps=(*own, *further),
            personal=() if personal is None else personal,
        )


class Wrapper(Method):
    """A method over a base method, whose slots it takes over.

    Attributes:
        base: the base method, with the same slots.
    """

    def __init__(self, base: Algorithm, **slots: Any) -> None:
        """Take over the slots of the base method, and fill those that it leaves.

        Raises:
            UserError: the base method fills one of the slots that are given.
        """
        self.base = base = copy(base)
        _take_over(slots, base)
        super().__init__(base.steps, **slots)
        vars(base).update({name: getattr(self, name) for name in SLOTS})


def _take_over(slots: dict[str, Any], base: Algorithm) -> None:
    """Add the parts of a base method to slots; raise `UserError` if it fills one of them."""
    for name in SLOTS:
        part = base._slots.sender if name == "exchange" else getattr(base, name)
        is_free = name == "steps" or part == signature(Algorithm).parameters[name].default
        require(
            is_free or slots.get(name) is None,
            f"the base method {base!r} fills the slot {name} itself, got {name}={slots.get(name)!r} besides.",
        )
        if name != "steps" and slots.get(name) is None:
            slots[name] = part

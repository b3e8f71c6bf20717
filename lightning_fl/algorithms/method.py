"""Base classes of named methods, and of methods over a base method. Users fill the remaining slots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from inspect import signature
from typing import Any

from lightning.pytorch import Callback

from lightning_fl.algorithms.algorithm import Algorithm
from lightning_fl.algorithms.given_parts import made_personal, made_steps
from lightning_fl.checks import parameters_of
from lightning_fl.data import FederatedDataModule
from lightning_fl.errors import require
from lightning_fl.slots import (
    Aggregator,
    Codec,
    Exchange,
    Pace,
    Personal,
    PruningTurn,
    RoundContext,
    Rule,
    Server,
    SetupTurn,
    Step,
    Validation,
    model_keeper,
)
from lightning_fl.steps import Apply

SLOTS = tuple(parameters_of(Algorithm))


class Method(Algorithm):
    """A named algorithm that fills some slots; users fill the others: `FedProx(mu=0.1, uplink=TopK(0.1))`.

    A method's constructor takes the paper's hyper-parameters and `**slots`, and passes `**slots` to this constructor. The
    slots that the method fills are passed by name; its own steps are the first argument, and steps of users follow.
    """

    @classmethod
    def _refuse(cls, names: Iterable[str]) -> None:
        parameters = parameters_of(cls)
        filled = [name for name in SLOTS if name in names and name not in parameters]
        require(
            not filled,
            f"{cls.__name__} fills the slot {', '.join(filled)} itself, and takes "
            f"{', '.join(name for name in SLOTS if name in parameters) or 'no other'}; Algorithm takes every slot.",
        )

    def __init__(
        self,
        method_steps: Sequence[Step] = (Apply(),),
        /,
        *,
        rule: Rule | None = None,
        uplink: Codec | None = None,
        downlink: Codec | None = None,
        exchange: Exchange | None = None,
        aggregator: Aggregator | None = None,
        steps: Sequence[Step] | None = None,
        personal: Sequence[Personal | str] | None = None,
    ) -> None:
        """Fill the slots; those that neither the method nor its user fills are FedAvg's.

        Args:
            method_steps: The method's own steps of the server.
            rule: Optimiser steps of a client, and its upload; the module's own optimiser if not given.
            uplink: Codec of the clients' uploads; Dense if not given.
            downlink: Codec of the server's broadcast; Dense if not given.
            exchange: Turns of a round, and the parts that clients upload; one upload of all if not given.
            aggregator: Merges the uploads; their mean by samples if not given.
            steps: Further steps of the server, after the method's own.
            personal: Values that every client keeps for itself: parts, or, in place of PersonalLayers(names), the names of
                parameters, buffers or submodules.
        """
        parts = {"rule": rule, "uplink": uplink, "downlink": downlink, "exchange": exchange, "aggregator": aggregator}
        further = () if steps is None else made_steps(steps)
        super().__init__(
            **{name: part for name, part in parts.items() if part is not None},  # type: ignore[arg-type]
            steps=(*method_steps, *further),
            personal=() if personal is None else personal,
        )


class Wrapper(Method):
    """A method over a base method: it has the base's slots with further personal parts, and delegates all else to the base.

    Attributes:
        base: the base method, with the same slots.
    """

    def __init__(
        self,
        base: Algorithm | None,
        method_personal: Sequence[Personal] = (),
        /,
        personal: Sequence[Personal | str] | None = None,
        **slots: Any,
    ) -> None:
        """Take over the slots of the base method, FedAvg if not given, and fill those that it leaves.

        Args:
            base: The base method.
            method_personal: Values that the method lets every client keep, in addition to those of the base method.
            personal: Further values that every client keeps for itself: parts, or, in place of PersonalLayers(names),
                the names of parameters, buffers or submodules.

        Raises:
            UserError: the base method does not train clients in rounds, is of the same class, or fills one of the slots that are
                given.
        """
        base = Algorithm() if base is None else base
        keeper = model_keeper(method_personal)
        is_itself = isinstance(base, Algorithm) and _is_or_wraps(base, type(self))
        fits = isinstance(base, Algorithm) and not is_itself and base.trains_in_rounds and base.exchange.uses_link
        require(
            fits and (keeper is None or base.model_keeper is None),
            f"base must be a method that trains {'clients' if keeper is None else 'one model of each client'} in rounds, such as "
            f"FedAvg(), FedProx() or SCAFFOLD(), got {f'{self.name} itself' if is_itself else repr(base)}.",
        )
        for name in SLOTS:
            if name not in ("steps", "personal"):
                slots[name] = _of_base(name, base, slots.get(name))
        further = () if personal is None else made_personal(personal)
        super().__init__(base.steps, personal=(*base.personal, *method_personal, *further), **slots)
        self.base = _with_slots(base, {name: getattr(self, name) for name in SLOTS})
        self.validation_clients = base.validation_clients

    @property
    def trains_in_rounds(self) -> bool:  # type: ignore[override]
        """True, as of the base method."""
        return self.base.trains_in_rounds

    @property
    def pace(self) -> Pace | None:  # type: ignore[override]
        """The pace of the base method."""
        return self.base.pace

    @property
    def setup_reads_clients(self) -> bool:  # type: ignore[override]
        """True if clients of the base method send something before the first round."""
        return self.base.setup_reads_clients

    def arrange_data(self, data: FederatedDataModule) -> FederatedDataModule:
        """Arrange the data as the base method does."""
        return self.base.arrange_data(data)

    def check(self, context: RoundContext, server: Server, cohort_size: int) -> None:
        """Check as the base method does."""
        self.base.check(context, server, cohort_size)

    def prepare(self, turn: SetupTurn) -> None:
        """Take the turn before the first round as the base method does."""
        self.base.prepare(turn)

    def broadcast_pruning(self, turn: PruningTurn) -> None:
        """Announce a pruning as the base method does."""
        self.base.broadcast_pruning(turn)

    def validate(self, validation: Validation) -> dict[str, float]:
        """Return the values of the base method, whose clients keep the same."""
        return self.base.validate(validation)

    def configure_callbacks(self) -> list[Callback]:
        """Return the callbacks of the base method, whose clients keep the same."""
        return self.base.configure_callbacks()


def _is_or_wraps(method: Algorithm, kind: type[Algorithm]) -> bool:
    """True if a method is of this class, or has one that is as its base."""
    return isinstance(method, kind) or (isinstance(method, Wrapper) and _is_or_wraps(method.base, kind))


def _with_slots(method: Algorithm, slots: dict[str, Any]) -> Algorithm:
    """Return a copy of a method with other slots, and copies of the methods inside it."""
    method = copy(method)
    vars(method).update(slots)
    if isinstance(method, Wrapper):
        method.base = _with_slots(method.base, slots)
    return method


def _of_base(name: str, base: Algorithm, value: Any) -> Any:
    """Return the part of a base method for a slot, or the given one if the base leaves it; raise `UserError` if it does not."""
    part = base.exchange.sender if name == "exchange" else getattr(base, name)
    require(
        value is None or part == signature(Algorithm).parameters[name].default,
        f"the base method {base!r} fills the slot {name} itself, got {name}={value!r} besides.",
    )
    return part if value is None else value

"""Base class of methods over any base method, whose clients also train a model of their own."""

from __future__ import annotations

from typing import Any

from lightning_fl.algorithms.algorithm import Algorithm, of_server
from lightning_fl.algorithms.method import Wrapper
from lightning_fl.errors import require
from lightning_fl.slots import Rule, Server, Setting, Validation, forwards


@forwards("base")
class WithCompanion(Wrapper):
    """Any method that trains one model of each client in rounds, with a rule for a second one, which the client keeps.

    Args:
        base: Method that trains the server's model: FedAvg, FedProx, SCAFFOLD …; FedAvg if not given.
    """

    num_models, keeps_models = Algorithm.num_models, Algorithm.keeps_models
    companion: Rule | None = None

    def __init__(self, base: Algorithm | None, companion: Rule, **slots: Any) -> None:
        self.companion = companion
        given = f"{self.name} itself" if type(base) is type(self) else repr(base)
        alone = isinstance(base, Algorithm) and not base.keeps_models and base.trains_in_rounds
        require(
            base is None or alone,
            f"base must be a method that trains one model of each client in rounds, such as FedAvg() or SCAFFOLD(), got {given}.",
        )
        super().__init__(base=Algorithm() if base is None else base, **slots)

    def rules(self) -> list[Rule]:
        """Return the rules of the base method, and that of the clients' own models."""
        return [*self.base.rules(), *([] if self.companion is None else [self.companion])]

    def check(self, setting: Setting, server: Server, cohort_size: int) -> None:
        """Raise `UserError` unless the run fits the base method and the rule of the clients' own models."""
        if self.companion is not None:
            self.companion.check(setting)
        self.base.check(setting, server, cohort_size)

    def validate(self, validation: Validation) -> dict[str, float]:
        """Return the values of the base method, and under `…_server` those of the server's model."""
        return {**self.base.validate(validation), **of_server(validation)}

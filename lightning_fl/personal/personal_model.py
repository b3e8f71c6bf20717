"""A second model of each client, trained after the first: Ditto (Li et al., ICML 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_fl.errors import require
from lightning_fl.slots import OwnTraining, Personal, Rule


@dataclass(frozen=True)
class PersonalModel(Personal):
    """Train a personal model on the same minibatches as the first model, and predict with it.

    It begins where the client left it, or at the received model the first time.

    Attributes:
        rule: rule of this training, which sees the received model as its own start; its upload is never sent.
    """

    keeps_model = True
    num_models = 2
    rule: Rule

    def __post_init__(self) -> None:
        require(
            isinstance(self.rule, Rule), f"PersonalModel trains by a rule, such as Pulled(), got rule={self.rule!r}."
        )
        name, repeats = type(self.rule).__name__, self.rule.repeats
        require(
            repeats == 1,
            f"PersonalModel steps once on each minibatch, and {name} takes {repeats} steps on each: make it the rule of the "
            "method, with KeptModel in place of PersonalModel, or choose another, such as Pulled().",
        )

    def rules(self) -> Sequence[Rule]:
        """Return the rule."""
        return (self.rule,)

    def finish(self, training: OwnTraining) -> None:
        """Train the client's own model."""
        training.own = training.train(self.rule)

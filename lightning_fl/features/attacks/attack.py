"""Interface of attacks: changes of an attacker's samples, and of its upload."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from lightning_fl.checks import Checked
from lightning_fl.slots import Draw, Message, kind_of

FORGED = ("model", "moments", "buffers")
"""Kinds of the float vectors that attackers replace; numbers of steps, masks and labels stay."""


@dataclass(frozen=True)
class Honest:
    """Honest clients' float vectors of a round, as colluding attackers know them.

    Attributes:
        count: number of honest uploads, h.
        mean: elementwise mean μ of each vector, in float64, over the clients that send the number; 0 if none does.
        std: elementwise standard deviation σ with the divisor h − 1; 0 for one upload.
        rows: the vectors themselves (h, ·) in the order of the clients, in float64; {} unless the attack knows all `uploads`.
    """

    count: int
    mean: Message
    std: Message
    rows: Message = field(default_factory=dict)

    def measured(self) -> Tensor:
        """Return the vectors by which uploads are compared (h, ·): those of the model, or the first if there is no model."""
        return self.rows["model"] if "model" in self.rows else self.rows[min(self.rows)]


@dataclass(frozen=True)
class AttackContext:
    """Knowledge of an attacker when it sends.

    Attributes:
        draw: source of its random draws.
        received: model and buffers that it received in this round.
        earlier: model and buffers of the previous round, if the attack `remembers` them; {} in the first round.
        replacement: for each name the factor by which attackers' uploads are to be multiplied to outweigh the others in the mean,
            of the whole vector, or of each number if clients send parts of the model.
        num_uploads: uploads of the round, n.
        num_attackers: uploads of attackers, m.
        honest: the other uploads; None if the attack does not know them, or if there are none.
    """

    draw: Draw
    received: Message = field(default_factory=dict)
    earlier: Message = field(default_factory=dict)
    replacement: Mapping[str, float | Tensor] = field(default_factory=dict)
    num_uploads: int = 1
    num_attackers: int = 1
    honest: Honest | None = None


class Attack(Checked, ABC):
    """Attack or fault of clients; a subclass is a frozen dataclass.

    Attackers train like other clients, on their own samples after `poisoned`, and send the result after `forged`.
    """

    knows: Literal["nothing", "moments", "uploads"] = "nothing"
    """Knowledge of the round's honest uploads: their moments, which are summed up, or all of them, which are kept."""

    poisons = False
    """True if `poisoned` changes samples."""

    @property
    def replaces(self) -> bool:
        """True if it multiplies uploads by the `replacement` of the context."""
        return False

    @property
    def remembers(self) -> bool:
        """True if attackers compare what they receive with what they received in the round before."""
        return False

    @property
    def needs_rounds(self) -> bool:
        """True if the attack needs synchronous rounds."""
        return self.remembers or self.knows != "nothing"

    def check(self, num_uploads: int, num_attackers: int) -> None:
        """Warn, or raise `UserError`, if the attack has no effect with these numbers of uploads and attackers in a round."""

    def poisoned(self, batch: Any, num_classes: int) -> Any:
        """Return the batch that an attacker trains on, given a batch of its samples, which may be changed in place.

        Args:
            batch: batch as the module reads it.
            num_classes: classes of the data.

        Raises:
            UserError: the attack does not support this form of batch.
        """
        return batch

    @abstractmethod
    def forged(self, message: Message, context: AttackContext) -> Message:
        """Return what an attacker sends.

        Args:
            message: float vectors of its result, by name.
            context: further knowledge of the attacker.

        Returns:
            Vectors of the same names and lengths, in any floating dtype.
        """


def is_forged(name: str) -> bool:
    """True if attackers replace an entry of an upload.

    >>> [is_forged(name) for name in ("model", "moments/control", "buffers", "scalars/steps")]
    [True, True, True, False]
    """
    return kind_of(name) in FORGED

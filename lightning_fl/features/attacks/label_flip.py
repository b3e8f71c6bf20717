"""Training on false labels (Biggio et al., ICML 2012; in federations Tolpegin et al., ESORICS 2020, arXiv:2007.08432).

y ← C − 1 − y,  or  y ← target where y = source
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from annotated_types import Ge

from lightning_fl.errors import require
from lightning_fl.features.attacks.attack import Attack, AttackContext
from lightning_fl.features.attacks.batches import labelled, with_parts
from lightning_fl.slots import Message


@dataclass(frozen=True)
class LabelFlip(Attack):
    """Train on false labels: C − 1 − y of C classes, or `target` for the samples of the class `source`.

    Attributes:
        source: class whose samples get a false label; null for all, each its opposite.
        target: the false label; null for the opposite.
    """

    poisons = True
    source: Annotated[int, Ge(0)] | None = None
    target: Annotated[int, Ge(0)] | None = None

    def __post_init__(self) -> None:
        require(
            (self.source is None) == (self.target is None),
            f"LabelFlip takes source and target, or neither, got source {self.source} and target {self.target}.",
        )
        if self.source is not None:
            require(self.source != self.target, f"source and target are both {self.source}: give two classes.")

    def poisoned(self, batch: Any, num_classes: int) -> Any:
        """Return the batch with false labels."""
        _, labels = labelled(batch, "LabelFlip")
        for name in ("source", "target"):
            label = getattr(self, name)
            require(
                label is None or label < num_classes,
                f"{name} is {label}, but the last of {num_classes} classes is {num_classes - 1}.",
            )
        if self.source is None or self.target is None:
            return with_parts(batch, {1: num_classes - 1 - labels})
        return with_parts(batch, {1: torch.where(labels == self.source, self.target, labels)})

    def forged(self, message: Message, context: AttackContext) -> Message:
        """Return the result of the training on false labels, unchanged."""
        return message

"""A trigger that makes the model predict the attackers' class (BadNets: Gu et al., 2017, arXiv:1708.06733), and the
replacement of the model by the attackers' model (Bagdasaryan et al., How To Backdoor Federated Learning, AISTATS 2020,
arXiv:1807.00459).

    a share of each batch gets a trigger and the label target;   the upload is λΔ_k
    replace: λ = Σ_j u_j / Σ_{attackers} u_j for weights u of the clients that send a number, so that without other changes the
    mean is that of the attackers
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Annotated, Any

from annotated_types import Ge, Gt, Interval

from lightning_fl.checks import is_real
from lightning_fl.data.trigger import stamped
from lightning_fl.errors import require
from lightning_fl.features.attacks.attack import Attack, AttackContext
from lightning_fl.features.attacks.batches import labelled, with_parts
from lightning_fl.slots import Message


@dataclass(frozen=True)
class Backdoor(Attack):
    """Train on images with a trigger, a white square of 3×3 pixels in the lower right corner, labelled as class `target`.

    `lightning_fl.callbacks.BackdoorProbe` measures its success.

    Attributes:
        share: share of the samples of each batch that get the trigger, in (0, 1], rounded up to whole samples.
        target: their label.
        scale: λ > 0, a factor of the upload.
        replace: instead of `scale`, scale the upload so that the attackers' models replace the mean, if the others do not
            change theirs.
        value: value of the trigger's pixels as the module reads them; None: 1, white in images of [0, 1].
    """

    poisons = True
    share: Annotated[float, Interval(gt=0, le=1)] = 0.5
    target: Annotated[int, Ge(0)] = 0
    scale: Annotated[float, Gt(0)] = 1.0
    replace: bool = False
    value: float | None = None

    def __post_init__(self) -> None:
        require(
            self.value is None or is_real(self.value),
            f"value, of the trigger's pixels, must be a number, got {self.value!r}.",
        )
        require(
            not self.replace or self.scale == 1,
            f"replace sets the factor of the upload, and scale is {self.scale}: give one of them.",
        )

    @property
    def replaces(self) -> bool:
        """True with `replace`."""
        return self.replace

    def poisoned(self, batch: Any, num_classes: int) -> Any:
        """Return the batch with triggers in its first samples, which are random ones in a shuffled pass."""
        images, labels = labelled(batch, "Backdoor", with_images=True)
        require(
            self.target < num_classes,
            f"target is {self.target}, but the last of {num_classes} classes is {num_classes - 1}.",
        )
        count = ceil(self.share * len(images) - 1e-9)
        images, labels = images.clone(), labels.clone()
        images[:count] = stamped(images[:count], self.value)
        labels[:count] = self.target
        return with_parts(batch, {0: images, 1: labels})

    def forged(self, message: Message, context: AttackContext) -> Message:
        """Return λx."""
        factors = context.replacement if self.replace else dict.fromkeys(message, self.scale)
        return {name: factors[name] * vector for name, vector in message.items()}

"""Adam on the clients, as in section III-A (eq. 3-5) of FedAdam-SSM: no bias correction, ε inside the root.

m ← β₁m + (1 − β₁)g;  v ← β₂v + (1 − β₂)g²;  y ← y − η m / √(v + ε)

`torch.optim.Adam` corrects the bias and adds ε outside the root, so the three lines are written out here. The rules differ in
the source of m and v and in their upload.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from annotated_types import Gt, Interval
from torch import Tensor

from lightning_fl.checks import Called, Rounds
from lightning_fl.slots import LocalTraining, Message, Rule, State
from lightning_fl.vectors.pieces import difference, empty_like, pieces, zeros_like

FIRST, SECOND, MOMENTUM = "moments/first", "moments/second", "moments/momentum"
RATE = "scalars/learning_rate"


@dataclass(frozen=True)
class Adam(Rule, ABC):
    """Base class of the rules.

    Attributes:
        beta1: decay β₁ of the first moment, in [0, 1).
        beta2: decay β₂ of the second moment, in [0, 1).
        epsilon: ε > 0, added to the second moment inside the root.
    """

    changeable = frozenset({"beta1", "beta2", "epsilon"})
    own_step = True
    _called = "Adam's {}"
    beta1: Annotated[float, Interval(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Interval(ge=0, lt=1)] = 0.999
    epsilon: Annotated[float, Gt(0)] = 1e-6

    @abstractmethod
    def start(self, local: LocalTraining) -> None:
        """Set (m, v) by `begin`."""

    def begin(self, local: LocalTraining, first: Tensor, second: Tensor) -> None:
        """Set (m, v) to copies (…, d) with the shape, dtype and device of the parameters."""
        for name, vector in {"first": first, "second": second}.items():
            local.memory[name] = empty_like(local.params).copy_(vector)

    def step(self, local: LocalTraining) -> None:
        """Take one step of Adam."""
        moments = local.memory["first"], local.memory["second"]
        for params, gradient, first, second, rate in pieces(
            local.params, local.gradient, *moments, local.learning_rate
        ):
            first.mul_(self.beta1).add_(gradient, alpha=1 - self.beta1)
            second.mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
            params.sub_((second + self.epsilon).rsqrt_().mul_(first).mul_(rate))

    def changes(self, local: LocalTraining) -> Message:
        """Return the changes of w, m and v, the last two in the memory of m and v."""
        return {
            "model": difference(local.params, local.received["model"]),
            FIRST: local.memory.pop("first").sub_(local.received[FIRST]),
            SECOND: local.memory.pop("second").sub_(local.received[SECOND]),
        }


@dataclass(frozen=True)
class SharedAdam(Adam):
    """Start from the server's moments, and send the changes of the moments and of the model (FedAdam)."""

    needs = provides = frozenset({FIRST, SECOND})

    def start(self, local: LocalTraining) -> None:
        """Set (m, v) to the server's moments."""
        self.begin(local, local.received[FIRST], local.received[SECOND])

    def finish(self, local: LocalTraining) -> Message:
        """Return the changes of w, m and v."""
        return self.changes(local)


@dataclass(frozen=True)
class LocalAdam(Adam):
    """Keep the moments on the client from round to round, and send the model alone (Efficient-Adam)."""

    def init(self, params: Tensor) -> State:
        """Return (m, v) = 0 for a client that takes part for the first time."""
        return {"first": torch.zeros_like(params), "second": torch.zeros_like(params)}

    def start(self, local: LocalTraining) -> None:
        """Set (m, v) to those of the client's last round."""
        self.begin(local, local.state["first"], local.state["second"])

    def finish(self, local: LocalTraining) -> Message:
        """Return the change of w; (m, v) stay on the client."""
        local.state = {name: local.memory[name] for name in ("first", "second")}
        return super().finish(local)


@dataclass(frozen=True)
class WarmedUpAdam(Adam):
    """Run FedAdam for the warm-up rounds, then momentum scaled by the second moment V of their end (1-bit Adam).

    After the warm-up, with V fixed:  m ← β₁m + (1 − β₁)g;  y ← y − η m / √(V + ε), starting from the server's momentum. The
    upload is the mean momentum of the round, u = √(V + ε)(w − y) / Σ η = Σ η m / Σ η, which is m after a single step.

    Attributes:
        warmup: T_w, the rounds of FedAdam: a count, or a fraction of the run's rounds.
        momentum_mask: leave coordinates unchanged whose second moment is zero, that is, which had no gradient in the warm-up.
            One bit cannot encode zero, and such a coordinate would be divided by √ε only.
    """

    needs = frozenset({FIRST, SECOND})
    provides = frozenset({FIRST, SECOND, MOMENTUM, RATE})
    omits = provides | {"model"}  # the two phases have no entry in common
    warmup: Annotated[int | float, Rounds(), Called("warmup, without which there is no second moment to scale by,")] = (
        0.2
    )
    momentum_mask: bool = True

    @property
    def in_common(self) -> Mapping[str, Any]:
        """Return the hyper-parameters that the rule and the server's step must have in common."""
        return {"warmup": self.warmup, "epsilon": self.epsilon, "momentum_mask": self.momentum_mask}

    def start(self, local: LocalTraining) -> None:
        """Set (m, v) to the server's; after the warm-up also set the scale 1 / √(V + ε) and Σ η m = 0."""
        name = MOMENTUM if MOMENTUM in local.received else FIRST
        self.begin(local, local.received[name], local.received[SECOND])
        if self._is_warm(local):
            second = local.memory["second"]
            scale = (second + self.epsilon).rsqrt_()
            if self.momentum_mask:
                scale *= second > 0
            local.memory["scale"] = scale
            local.memory["path"] = zeros_like(local.params)

    def step(self, local: LocalTraining) -> None:
        """Take one step of Adam, or of momentum with the fixed scale."""
        if "scale" not in local.memory:
            super().step(local)
            return
        vectors = [local.gradient, *(local.memory[name] for name in ("first", "path", "scale"))]
        for params, gradient, first, path, scale, rate in pieces(local.params, *vectors, local.learning_rate):
            moved = first.mul_(self.beta1).add_(gradient, alpha=1 - self.beta1) * rate
            path += moved
            params.sub_(moved * scale)

    def finish(self, local: LocalTraining) -> Message:
        """Return the changes of w, m and v; after the warm-up the mean momentum, and Σ η, which both sides know."""
        if "scale" not in local.memory:
            return self.changes(local)
        total = torch.as_tensor(local.sum_learning_rate, dtype=local.params.dtype, device=local.params.device)
        total = total.expand(*local.params.shape[:-1], total.shape[-1] if total.dim() else 1)
        mean = torch.where(total > 0, local.memory["path"] / total, 0.0)
        if self.momentum_mask:
            mean *= local.memory["scale"] > 0
        return {MOMENTUM: mean, RATE: total}

    def _is_warm(self, local: LocalTraining) -> bool:
        """True after the warm-up; compression that has begun continues in a run that is resumed with more rounds."""
        return MOMENTUM in local.received or local.context.round >= local.context.num_rounds_of(self.warmup)

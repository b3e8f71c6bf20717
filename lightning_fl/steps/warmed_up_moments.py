"""Server of 1-bit Adam (Tang et al., ICML 2021): FedAdam, then momentum through a codec with a fixed second moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from annotated_types import Gt
from torch import Tensor

from lightning_fl.checks import Called, Rounds
from lightning_fl.slots import Codec, Message, ServerTurn, State, Step, check_inner, through

MOMENTUM, BITS = "moments/momentum", "scalars/bits"


@dataclass(frozen=True)
class WarmedUpMoments(Step):
    """Replace `Apply` and `Moments`: FedAdam in the warm-up, then momentum through a codec.

    In the first T_w rounds  w ← w + Δw;  M ← M + ΔM;  V ← max(V + ΔV, 0), and M and V go down with the model.
    Then  y = Σ p u + e;  M ← C(y);  e ← y − C(y);  w ← w − H M / √(V + ε), where u is a client's mean momentum in the round and H
    the sum of its learning rates. M goes down, and clients that hold w and V compute the model from it.

    Attributes:
        codec: C.
        epsilon: ε > 0, the same as the rule's.
        warmup: T_w, the same as the rule's.
        momentum_mask: leave coordinates unchanged whose second moment is zero, as the rule does.
    """

    sums_suffice = True
    provides = frozenset({"moments/first", "moments/second"})
    needs = frozenset({"moments/first", "moments/second", MOMENTUM, "scalars/learning_rate"})
    uses = needs | {"model"}
    codec: Codec
    epsilon: Annotated[float, Gt(0)] = 1e-6
    warmup: Annotated[int | float, Rounds(), Called("warmup, without which there is no second moment to scale by,")] = (
        0.2
    )
    momentum_mask: bool = True

    def __post_init__(self) -> None:
        check_inner(self, "codec", Codec, "OneBit()")

    @property
    def in_common(self) -> Mapping[str, Any]:
        """Return the hyper-parameters that the rule and the server's step must have in common."""
        return {"warmup": self.warmup, "epsilon": self.epsilon, "momentum_mask": self.momentum_mask}

    def change_entry(self) -> tuple[str, Codec]:
        """Return the name of the server's momentum, and its codec."""
        return MOMENTUM, self.codec

    def init(self, params: Tensor) -> State:
        """Return M = V = 0."""
        return {"first": torch.zeros_like(params), "second": torch.zeros_like(params)}

    def share(self, state: State) -> Message:
        """Return M and V; an M from the codec has another name, because it is sent through the codec."""
        name = MOMENTUM if "error" in state else "moments/first"
        return {name: state["first"], "moments/second": state["second"]}

    def encoded(self, state: State) -> dict[str, Tensor]:
        """Return the bits of an M from the codec."""
        return {MOMENTUM: state[BITS]} if BITS in state else {}

    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Take the step of the warm-up, or of the phase after it."""
        if "buffers" in turn.merged:
            turn.proposed_buffers = turn.buffers + turn.merged["buffers"]
        if "error" not in state and turn.round < turn.context.num_rounds_of(self.warmup):
            turn.proposal = turn.params + turn.merged["model"]
            second = state["second"] + turn.merged["moments/second"]
            return {"first": state["first"] + turn.merged["moments/first"], "second": second.clamp_(min=0.0)}
        wanted = turn.merged[MOMENTUM]
        if "error" in state:
            wanted = wanted + state["error"]
        arrived, bits = through(self.codec, {MOMENTUM: wanted}, turn.context)
        first = arrived[MOMENTUM]
        second = state["second"]
        scale = (second + self.epsilon).rsqrt()
        if self.momentum_mask:
            scale *= second > 0
        turn.proposal = turn.params - turn.merged["scalars/learning_rate"] * first * scale
        return {"first": first, "second": second, "error": wanted - first, BITS: bits}

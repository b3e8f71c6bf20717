"""The server of 1-bit Adam (Tang et al., ICML 2021): FedAdam's, then momentum through a codec with the second moment fixed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fl.slots import Codec, Message, ServerTurn, State, Step, through

MOMENTUM = "moments/momentum"


@dataclass(frozen=True)
class WarmedUpMoments(Step):
    """Takes the place of `Apply` and `Moments`.

    In the first T_w rounds  w ← w + Δw;  M ← M + ΔM;  V ← max(V + ΔV, 0), and M and V go down with the model.
    Then  y = Σ p u + e;  M ← C(y);  e ← y − C(y);  w ← w − H M / √(V + ε), where u is a client's mean momentum in the round and H
    the sum of its learning rates; M goes down, from which clients that know w and V work out the model.

    Attributes:
        codec: C.
        epsilon: ε > 0, as the rule's.
        warmup: T_w, as the rule's.
        momentum_mask: leave a coordinate alone whose second moment is zero, as the rule does.
    """

    shares = frozenset({"moments/first", "moments/second"})
    consumes = frozenset({"moments/first", "moments/second", MOMENTUM, "scalars/learning_rate"})
    codec: Codec
    epsilon: float = 1e-6
    warmup: int | float = 0.2
    momentum_mask: bool = True

    def change_entry(self) -> tuple[str, Codec]:
        """The server's momentum."""
        return MOMENTUM, self.codec

    def init(self, params: Tensor) -> State:
        """M = V = 0."""
        return {"first": torch.zeros_like(params), "second": torch.zeros_like(params)}

    def share(self, state: State) -> Message:
        """M and V; the M that a codec has made goes by another name, because the codec says how it is sent."""
        name = MOMENTUM if "error" in state else "moments/first"
        return {name: state["first"], "moments/second": state["second"]}

    def __call__(self, turn: ServerTurn, state: State) -> State:
        """One of the two phases."""
        if "buffers" in turn.merged:
            turn.proposed_buffers = turn.buffers + turn.merged["buffers"]
        if "error" not in state and turn.round < turn.setting.num_rounds_of(self.warmup):
            turn.proposal = turn.params + turn.merged["model"]
            second = state["second"] + turn.merged["moments/second"]
            return {"first": state["first"] + turn.merged["moments/first"], "second": second.clamp_(min=0.0)}
        wanted = turn.merged[MOMENTUM]
        if "error" in state:
            wanted = wanted + state["error"]
        first = through(self.codec, {MOMENTUM: wanted}, turn.setting)[MOMENTUM]
        second = state["second"]
        scale = (second + self.epsilon).rsqrt()
        if self.momentum_mask:
            scale *= second > 0
        turn.proposal = turn.params - turn.merged["scalars/learning_rate"] * first * scale
        return {"first": first, "second": second, "error": wanted - first}

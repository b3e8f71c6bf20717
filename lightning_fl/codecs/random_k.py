"""Send k coordinates that are drawn at random, and the seed of the draw instead of their positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_fl.checks import check_between, check_choice
from lightning_fl.slots import Codec, Message, Packed, Payload, Setting, State, compressible
from lightning_fl.vectors.top_k import num_kept

SEEDS = "scalars/seed/"


@dataclass(frozen=True)
class RandomK(Codec):
    """Send k = max(1, ⌊alpha · d⌋) numbers of a vector (d,), drawn at random; the others arrive as zero.

    A vector takes 32k bits and those of the seed; 32d with alpha = 1. Own coordinates of K clients: the error of their mean falls
    as 1/K. Common ones: it does not, but only k numbers change.

    Attributes:
        alpha: share of the coordinates that are sent, in (0, 1].
        scale: `unbiased` sends (d/k) · x, whose mean over the draws is x, with an error of (d/k − 1) ‖x‖²; `none` sends x, which
            is a contraction, for error feedback.
        common: True if all clients of a round send the same coordinates.
        seed_bits: 64, or 0 if both sides derive the seed from the seed of the run, which they then must share.
    """

    alpha: float = 0.05
    scale: Literal["unbiased", "none"] = "unbiased"
    common: bool = False
    seed_bits: int = 64

    def __post_init__(self) -> None:
        check_between("alpha, the share of numbers that are sent,", self.alpha, 0, 1, "(]")
        check_choice("scale", self.scale, ("unbiased", "none"))
        check_choice("seed_bits", self.seed_bits, (0, 64))

    @property
    def deltas_only(self) -> bool:
        """True unless everything is sent."""
        return self.alpha < 1

    @property
    def is_unbiased(self) -> bool:
        """True if the numbers are scaled, or all are sent."""
        return self.scale == "unbiased" or self.alpha == 1

    @property
    def contracts(self) -> bool:
        """True if the numbers are not scaled, or all are sent."""
        return self.scale == "none" or self.alpha == 1

    @property
    def is_idempotent(self) -> bool:
        """True if the numbers are not scaled, or all are sent; of the same draw."""
        return self.contracts

    def is_lossy_for(self, name: str) -> bool:
        """True for the model and its moments, unless everything is sent."""
        return self.alpha < 1 and compressible(name)

    def positions(self, name: str, payload: Payload, setting: Setting) -> Tensor | None:
        """Return the positions of a vector's numbers, in ascending order."""
        if f"{SEEDS}{name}" not in payload:
            return None
        return self._drawn(self._seed(name, payload, setting), setting.layout.numel, payload[name].content.device)

    def encode(self, message: Message, memory: State, setting: Setting) -> tuple[Payload, State]:
        """Encode values (k,) under the vector's name, and the seed under `scalars/seed/name`."""
        payload = {}
        for name, vector in message.items():
            if not self.is_lossy_for(name):
                payload[name] = Packed.whole(vector)
                continue
            seed = setting.draw.seed(name, self.common)
            values = vector[self._drawn(seed, len(vector), vector.device)]
            if self.scale == "unbiased":
                values = values * (len(vector) / len(values))
            payload[name] = Packed.whole(values)
            sent = torch.tensor([seed] if self.seed_bits else [], dtype=torch.int64)
            payload[f"{SEEDS}{name}"] = Packed(sent, self.seed_bits)
        return payload, {}

    def decode(self, payload: Payload, setting: Setting) -> Message:
        """Decode; numbers that were not sent are zero."""
        message = {}
        for name, packed in payload.items():
            positions = self.positions(name, payload, setting)
            if positions is not None:
                message[name] = packed.content.new_zeros(setting.layout.numel).index_copy_(0, positions, packed.content)
            elif not name.startswith(SEEDS):
                message[name] = packed.content
        return message

    def _seed(self, name: str, payload: Payload, setting: Setting) -> int:
        sent = payload[f"{SEEDS}{name}"].content
        return int(sent[0]) if self.seed_bits else setting.draw.seed(name, self.common)

    def _drawn(self, seed: int, count: int, device: torch.device) -> Tensor:
        """Return k of `count` positions, drawn on the CPU, so that all devices draw the same."""
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        return order[: num_kept(self.alpha, count)].sort().values.to(device)

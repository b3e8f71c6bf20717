"""Low-rank compression of matrices (the compressor of PowerSGD: Vogels, Karimireddy, Jaggi, NeurIPS 2019).

    P = M Q;   P̂ = orthonormal columns of P;   Q' = Mᵀ P̂;   C(M) = P̂ Q'ᵀ;   Q ← Q' for the next message

So ‖M − C(M)‖² = ‖M‖² − ‖P̂ᵀ M‖², up to the rounding of P̂. PowerSGD averages P over the workers before it makes the columns
orthonormal, and then averages Q', so the result has rank r. Here each client encodes alone, in one turn, so the mean of K
uploads has a rank of up to K r.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor

from lightning_fl.checks import Called
from lightning_fl.coding.low_rank import check_rank, left_size, matrices, orthonormal, product, split
from lightning_fl.slots import Codec, Message, Packed, Payload, RoundContext, State, Traits, compressible
from lightning_fl.vectors.magnitudes import power_of_two


@dataclass(frozen=True)
class LowRank(Codec):
    """Send each tensor with two axes or more as the product of an n × R and an R × m matrix, and all other tensors whole.

    A tensor of shape (n, …) is a matrix M of n rows and m columns. It has R = min(rank, n, m), and is sent whole unless
    R(n + m) < nm. A vector takes 32(Σ R(n + m) + numbers of the whole tensors) bits in float32. A rank that leaves every tensor
    whole is refused. The exchange `TwoTurns` gives the mean the rank R, as PowerSGD does.

    Each sender begins with the Q' of its last message (`data/q/…` in its memory), or with normal numbers if it has no Q' of
    this shape. The step `Compress` has no such memory, and draws Q in every round. A pruning mask is refused, because a masked
    layer is no matrix.

    Attributes:
        rank: r, at least 1; the authors use 1, 2 and 4.
    """

    traits = Traits.DELTAS_ONLY | Traits.NEEDS_ERROR_FEEDBACK | Traits.CONTRACTS | Traits.NEEDS_SHAPES
    rank: Annotated[int, Ge(1), Called("rank, the columns of each factor,")] = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", int(self.rank))  # arithmetic with a NumPy integer may overflow

    def bits_by_tensor(self, name: str, payload: Payload, context: RoundContext) -> dict[str, int] | None:
        """Return the bits of each tensor's factors, or of its numbers."""
        if not compressible(name):
            return None
        width = 8 * payload[name].content.element_size()
        return {tensor: width * (r * (n + m) or n * m) for tensor, n, m, r in matrices(context.layout, self.rank)}

    def check(self, context: RoundContext) -> None:
        """Raise `UserError` if no tensor would be factored, because then every message would be sent whole."""
        check_rank("LowRank", self.rank, context.layout, "leave it out")

    def encode(self, message: Message, memory: State, context: RoundContext) -> tuple[Payload, State]:
        """Encode all P̂ (n, R), then all Q' (m, R) and the whole tensors; the new memory is each Q'."""
        payload: Payload = {}
        new_memory = dict(memory)  # tensors that are not sent this time stay
        for name, vector in message.items():
            if not compressible(name):
                payload[name] = Packed.whole(vector)
                continue
            lefts, rest = [vector.new_zeros(0)], [vector.new_zeros(0)]
            for tensor, matrix, r in split(vector, context.layout, self.rank):
                if r == 0:
                    rest.append(matrix.flatten())
                    continue
                key, form = f"data/q/{name}/{tensor}", (matrix.shape[1], r)
                start = new_memory.get(key)
                if start is None or start.shape != form:
                    start = torch.randn(form, generator=context.draw.generator(key))
                left, right = _factors(matrix, start.to(vector.device, non_blocking=True))
                lefts.append(left.flatten())
                rest.append(right.flatten())
                # M = 0 says nothing about the next M
                new_memory[key] = torch.where(right.any(), right, start.to(right))
            payload[name] = Packed.whole(torch.cat(lefts + rest))
        return payload, new_memory

    def decode(self, payload: Payload, context: RoundContext) -> Message:
        """Return P̂ Q'ᵀ, and the tensors that were sent whole."""
        message, size = {}, left_size(context.layout, self.rank)
        for name, packed in payload.items():
            content = packed.content
            if compressible(name):
                content = product(content[:size], content[size:], context.layout, self.rank)
            message[name] = content
        return message


def _factors(matrix: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Return P̂ (n, R) and Q' (m, R) of a matrix (n, m), in its dtype, computed in float64 from the rounded P̂."""
    precise = matrix.double()
    power = power_of_two(precise.flatten())
    left = orthonormal((precise if power == 1 else precise * power) @ start.double()).to(matrix.dtype)
    return left, (precise.T @ left.double()).to(matrix.dtype)

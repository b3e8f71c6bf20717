"""Sparse ternary compression, STC (Sattler et al., Robust and Communication-Efficient Federated Learning From Non-i.i.d. Data,
IEEE TNNLS 2020).

    T = the k numbers of z largest in magnitude, without zeros;   μ = mean of |z_i| over T;   C(z) = μ · sgn(z) on T, 0 elsewhere

The residual e ← z − C(z) of their algorithm is that of `ErrorFeedback`, on the clients, and that of the step `Compress`, on the
server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Interval
from torch import Tensor

from lightning_fl.checks import Called
from lightning_fl.coding.bit_packing import bit_width, pack, unpack
from lightning_fl.coding.golomb import pack_gaps, rice_width, unpack_gaps
from lightning_fl.coding.top_k import num_kept, top_k
from lightning_fl.slots import Packed, Payload, RoundContext, Traits, VectorCodec
from lightning_fl.vectors.magnitudes import by_largest, scale_dtype

SCALE, COUNT, POSITIONS = "scalars/scale/", "mask/count/", "mask/"


@dataclass(frozen=True)
class STC(VectorCodec):
    """Send the signs of the k largest numbers of a vector (d,), one scale for all of them, and their positions.

    k = max(1, ⌊alpha · d⌋). Signs, μ in float32 and the number of signs, k' ≤ k, take k' + 32 + ⌈log2(k + 1)⌉ bits; μ takes 64 in
    a float64 model. The positions take k'(b + 1) + Σ⌊(g − 1) / 2^b⌋ bits for the gaps g between them in Golomb-Rice codes, at
    most k'(b + 1) + ⌊(d − k') / 2^b⌋; d bits as a mask if that is above d; none if k' = d. b depends on alpha (`rice_width`).

    For compression both ways, as in the paper, use the uplink `ErrorFeedback(STC(…))`, the steps `Apply()` and
    `Compress(STC(…))`, and the downlink `Followed(STC(…), catch_up=True)`. A client that was away then downloads the sum of
    the changes that it has missed, or the whole model if that is smaller. Without `catch_up` every client downloads every
    broadcast.

    Attributes:
        alpha: share of the numbers that are sent, in (0, 1].
    """

    beside = (SCALE, POSITIONS)
    size_depends_on_values = True
    alpha: Annotated[float, Interval(gt=0, le=1), Called("alpha, the share of numbers that are sent,")] = 0.05

    @property
    def traits(self) -> Traits:
        """An idempotent contraction; sparse if less than half of the numbers are sent."""
        few = Traits.SENDS_FEW.only_if(self.alpha < 0.5)
        return Traits.DELTAS_ONLY | Traits.NEEDS_ERROR_FEEDBACK | Traits.CONTRACTS | Traits.IDEMPOTENT | few

    def positions(self, name: str, payload: Payload, context: RoundContext) -> Tensor | None:
        """Return the positions of the signs of a vector."""
        d = context.layout.numel
        if f"{POSITIONS}{name}" not in payload:
            return None
        k = num_kept(self.alpha, d)
        num_signs = int(unpack(payload[f"{COUNT}{name}"].content, 1, bit_width(k + 1)))
        return unpack_gaps(payload[f"{POSITIONS}{name}"].content, num_signs, d, rice_width(k, d))

    def symbols(self, name: str, payload: Payload, context: RoundContext) -> tuple[Tensor, int] | None:
        """Return the signs of a vector."""
        positions = self.positions(name, payload, context)
        return None if positions is None else (unpack(payload[name].content, len(positions), 1), 2)

    def encode_vector(self, name: str, vector: Tensor, context: RoundContext) -> Payload:
        """Encode signs (k',) under the vector's name, μ under `scalars/scale/name`, k' and positions under `mask/…`."""
        d = len(vector)
        k = num_kept(self.alpha, d)
        positions = top_k(vector, k)
        values = vector[positions]
        positions, values = positions[values != 0], values[values != 0]
        signs = Packed(pack(values > 0, 1), len(values))
        if d == 0:
            return {name: signs}
        shares, largest = by_largest(values)
        scale = shares.double().abs().mean() * largest[0] if len(values) else values.new_zeros(())
        width = bit_width(k + 1)
        count = torch.full((1,), len(values), device=vector.device)
        return {
            name: signs,
            f"{SCALE}{name}": Packed.whole(scale.to(scale_dtype(vector.dtype))),
            f"{COUNT}{name}": Packed(pack(count, width), width),
            f"{POSITIONS}{name}": Packed(*pack_gaps(positions, d, rice_width(k, d))),
        }

    def decode_vector(self, name: str, payload: Payload, context: RoundContext) -> Tensor:
        """Return μ · sgn(z) at the positions that were sent, and 0 elsewhere, in the model's dtype."""
        vector = torch.zeros(context.layout.numel, dtype=context.dtype, device=payload[name].content.device)
        positions = self.positions(name, payload, context)
        if positions is not None:
            scale = payload[f"{SCALE}{name}"].content.to(context.dtype)
            signs = unpack(payload[name].content, len(positions), 1).bool()
            vector[positions] = torch.where(signs, scale, -scale)
        return vector

"""Low-rank uploads in two turns (PowerSGD: Vogels, Karimireddy, Jaggi, NeurIPS 2019).

turn 1    client k:  z_k = Δ_k + e_k;  P_k = z_k Q              up: 32 Σ R n bits
          server:    P̂ = orthonormal columns of Σ p_k P_k       down: 32 Σ R n bits to each client
turn 2    client k:  Q'_k = z_kᵀ P̂;  e_k ← z_k − P̂ Q'_kᵀ        up: 32 Σ R m bits, and the whole tensors
          server:    M̂ = P̂ (Σ p_k Q'_k)ᵀ = P̂ P̂ᵀ Σ p_k z_k

So M̂ has rank R, and equals `LowRank` of the mean of the z_k. The mean of uploads that clients encode alone has a rank of up
to K R. The authors' e_k is z_k − M̂, for which a client must receive M̂; here it needs only P̂. The mean of the e_k, Σ p_k z_k
− M̂, is the same, and so is the model if all clients take part in each round. Otherwise, e_k lacks a client's differences from
the other clients of an earlier round.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor

from lightning_fl.checks import Called
from lightning_fl.coding.low_rank import all_orthonormal, check_rank, matrices, product, project, sketch
from lightning_fl.slots import (
    Channel,
    Codec,
    Exchange,
    Message,
    Packed,
    Payload,
    Result,
    RoundContext,
    State,
    Upload,
    compressible,
    is_finite,
)

RESIDUAL, LEFT = "residual/", "/left"


@dataclass(frozen=True)
class TwoTurns(Exchange):
    """Send each tensor with two axes or more as a matrix of rank R of the mean, and all other tensors whole, in two turns.

    A tensor of shape (n, …) is a matrix of n rows and m columns. It has R = min(rank, n, m), and is sent whole unless
    R(n + m) < nm. All clients of a round draw the same normal Q (m, R), anew in each round: to begin with the last Q', as the
    authors do, would cost 32 Σ R m bits more for each client of a round. Each client keeps its error e_k.

    The deltas of the round's clients are kept until all P_k are known: K·d numbers. A client whose delta is not finite takes no
    part in the second turn; one that the loss guard rejects then has taken part in the choice of P̂, but not in the mean of the
    Q'_k. The uplink must lose nothing, the aggregator must be a mean, and a pruning mask, which leaves no matrices, is refused.

    Attributes:
        rank: r, at least 1; the authors use 1, 2 and 4.
    """

    needs = frozenset({"model"})
    compresses = needs_shapes = True
    rank: Annotated[int, Ge(1), Called("rank, the columns of each factor,")] = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", int(self.rank))  # arithmetic with a NumPy integer may overflow

    def check(self, context: RoundContext, cohort_size: int) -> None:
        """Raise `UserError` if every tensor would be sent whole."""
        check_rank("TwoTurns", self.rank, context.layout, "use OneShot")

    def collect(self, results: Iterable[Result], channel: Channel) -> Iterator[Upload]:
        """Run the two turns."""
        context, waiting, going_on = channel.context, dict[int, tuple[Result, Message]](), set[int]()
        layout, starts = context.layout, cache(partial(_starts, context, self.rank))

        def first_turn() -> Iterator[Upload]:
            for result in results:
                wanted = _wanted(result.message, channel.memory(result.client, result.message))
                sketches = {
                    f"{name}{LEFT}": sketch(z, layout, self.rank, starts(name, z.device)).to(z.dtype)
                    for name, z in wanted.items()
                }
                seen = channel.send_up(result.client, sketches, codec=Projection(self.rank))
                waiting[result.client] = result, seen
                if is_finite(seen, result.message, result.owned):
                    going_on.add(result.client)
                    yield Upload(result, {name: seen[f"{name}{LEFT}"] for name in wanted})  # names decide on weights

        means = channel.mean(first_turn())
        lefts = {name: all_orthonormal(mean, layout, self.rank).to(context.dtype) for name, mean in means.items()}
        channel.send_to_all(sorted(going_on), {f"{name}{LEFT}": left for name, left in lefts.items()})
        codec = Projection(self.rank, lefts)
        for client in list(waiting):
            result, seen = waiting.pop(client)
            if client in going_on:
                seen = channel.send_up(client, result.message, codec=codec)
            yield Upload(result, seen)


@dataclass(frozen=True)
class Projection(Codec):
    """P̂ P̂ᵀ z, for which only Q' = zᵀ P̂ and the whole tensors are sent; anything else, such as the first turn's P, crosses whole.

    Attributes:
        rank: r.
        lefts: all P̂ (n, R), one after the other, of each vector.
    """

    rank: int
    lefts: Mapping[str, Tensor] = field(default_factory=dict)

    def is_lossy_for(self, name: str) -> bool:
        """False for P, whose size is not the model's."""
        return super().is_lossy_for(name) and not name.endswith(LEFT)

    def bits_by_tensor(self, name: str, payload: Payload, context: RoundContext) -> dict[str, int] | None:
        """Return the bits of each tensor's P, or of its Q' or numbers."""
        if not compressible(name):
            return None
        width, is_first = 8 * payload[name].content.element_size(), name.endswith(LEFT)
        shapes = matrices(context.layout, self.rank)
        return {tensor: width * (n * r if is_first else m * (r or n)) for tensor, n, m, r in shapes}

    def encode(self, message: Message, memory: State, context: RoundContext) -> tuple[Payload, State]:
        """Encode all Q' (m, R) and the whole tensors, in the order of the layout; the new memory is e."""
        payload, next_memory = {name: Packed.whole(entry) for name, entry in message.items()}, dict(memory)
        for name, z in _wanted({name: message[name] for name in self.lefts}, memory).items():
            payload[name] = Packed.whole(project(z, self.lefts[name], context.layout, self.rank).to(z.dtype))
            next_memory[RESIDUAL + name] = z - self.decode({name: payload[name]}, context)[name]
        return payload, next_memory

    def decode(self, payload: Payload, context: RoundContext) -> Message:
        """Return P̂ Q'ᵀ, and the tensors that were sent whole."""
        message = {name: packed.content for name, packed in payload.items()}
        return message | {
            name: product(self.lefts[name], message[name], context.layout, self.rank)
            for name in message
            if name in self.lefts
        }


def _wanted(message: Message, memory: State) -> Message:
    """Return z = Δ + e of each vector of the model and its moments."""
    return {
        name: entry + memory[RESIDUAL + name] if RESIDUAL + name in memory else entry
        for name, entry in message.items()
        if compressible(name)
    }


def _starts(context: RoundContext, rank: int, name: str, device: torch.device) -> dict[str, Tensor]:
    """Draw Q (m, R) of each matrix of a vector, the same for all clients."""
    return {
        tensor: torch.randn(m, r, generator=context.draw.generator(f"{name}/right/{tensor}")).to(
            device, non_blocking=True
        )
        for tensor, _, m, r in matrices(context.layout, rank)
        if r
    }

"""Sparse codecs: send the k largest of d numbers, and drop the others unless `ErrorFeedback` around it sends them later.

TopK        the k largest of each vector                            FedAdam-Top, in FedAdam-SSM's comparison
SharedTopK  all vectors where one of them is largest                FedAdam-SSM
FairTopK    all vectors where any of them is largest                Fairness-Top

With one mask for all vectors, three vectors take 96k + min(d, k⌈log2 d⌉) bits. Three separate masks would take up to 2d bits
more.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Interval
from torch import Tensor

from lightning_fl.checks import Called
from lightning_fl.coding.top_k import (
    IndexBits,
    num_kept,
    pack_positions,
    positions_bits,
    top_k,
    top_k_in_turns,
    top_k_of_max,
    unpack_positions,
)
from lightning_fl.slots import Codec, Message, Packed, Payload, RoundContext, State, Traits, compressible
from lightning_fl.slots.sparse_codec import VALUES, SparseCodec


@dataclass(frozen=True)
class Sparse(Codec):
    """Send k = max(1, ⌊alpha · d⌋) coordinates of a vector (d,); the others arrive as zero.

    Attributes:
        alpha: share of the coordinates that are sent, in (0, 1]. Default of the paper: 0.05.
        index_bits: count ⌈log2 d⌉ bits per index, as encoded (`ceil`), or log2 d, as in the paper (`exact`).
    """

    any_size = False
    alpha: Annotated[float, Interval(gt=0, le=1), Called("alpha, the share of numbers that are sent,")] = 0.05
    index_bits: IndexBits = field(default="ceil", kw_only=True)

    @property
    def traits(self) -> Traits:
        """For deltas only unless everything is sent; sparse if less than half of the numbers are sent."""
        return Traits.DELTAS_ONLY.only_if(self.alpha < 1) | Traits.SENDS_FEW.only_if(self.alpha < 0.5)

    def is_lossy_for(self, name: str) -> bool:
        """True for the model and its moments, unless everything is sent."""
        return self.alpha < 1 and compressible(name)

    def pack_mask(self, positions: Tensor, count: int) -> Packed:
        """Encode ascending positions (k,) among `count`, as a mask or a list of indices, whichever is shorter."""
        return Packed(pack_positions(positions, count), positions_bits(len(positions), count, self.index_bits))

    def unpack_mask(self, name: str, payload: Payload, context: RoundContext) -> Tensor | None:
        """Return the positions (k,) in an entry; None if the payload has no such entry."""
        if name not in payload:
            return None
        count = context.layout.numel
        return unpack_positions(payload[name].content, num_kept(self.alpha, count), count)


@dataclass(frozen=True)
class TopK(SparseCodec, Sparse):
    """Send the k largest numbers of each vector and their positions, as a mask or a list of indices, whichever is shorter.

    k = max(1, ⌊alpha · d⌋) over the whole vector (d,), of equal magnitudes the lower index first. A vector takes
    32k + min(d, k⌈log2 d⌉) bits, 32d with alpha = 1. The rest is dropped, unless `ErrorFeedback` around it sends it later.

    Attributes:
        values: codec of the k numbers, such as `Blockwise`, which sees a model of k parameters; its bits replace 32k.
    """

    mark = "mask/"
    values: Codec | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self.check_values()

    @property
    def traits(self) -> Traits:
        """Traits of the choice of numbers, with those of the codec of the values that carry over to the whole vector."""
        if self.values is None:
            return super().traits | Traits.CONTRACTS | Traits.IDEMPOTENT
        values = self.values.traits
        grows = Traits.ERROR_MAY_GROW.only_if(not values.fit_error_feedback)
        return super().traits | values & (Traits.DELTAS_ONLY | Traits.CONTRACTS) | grows

    def is_lossy_for(self, name: str) -> bool:
        """True for the model and its moments, unless everything is sent as it is."""
        return super().is_lossy_for(name) or (self.values is not None and self.values.is_lossy_for(name))

    def chosen(self, vector: str, payload: Payload, context: RoundContext) -> Tensor | None:
        """Return the positions in `mask/VECTOR`."""
        return self.unpack_mask(f"mask/{vector}", payload, context)

    def choice(self, name: str, payload: Payload, context: RoundContext) -> tuple[int, int] | None:
        """Return d and k for the positions of a vector, and the choices of the codec of the values."""
        if VALUES in name:
            return super().choice(name, payload, context)
        is_mask = name in payload and self.vector_told_of(name)
        return (context.layout.numel, num_kept(self.alpha, context.layout.numel)) if is_mask else None

    def encode(self, message: Message, memory: State, context: RoundContext) -> tuple[Payload, State]:
        """Encode values (k,) under the vector's name, and their positions under `mask/name`."""
        payload: Payload = {}
        for name, vector in message.items():
            if compressible(name):
                positions = top_k(vector, num_kept(self.alpha, len(vector)))
                payload |= self.pack_values(name, vector[positions], positions, context)
                payload[f"mask/{name}"] = self.pack_mask(positions, len(vector))
            else:
                payload[name] = Packed.whole(vector)
        return payload, {}


@dataclass(frozen=True)
class OneMask(Sparse):
    """Send the same k = max(1, ⌊alpha · d⌋) coordinates of all vectors; the others arrive as zero."""

    traits = Sparse.traits

    @abstractmethod
    def choose(self, vectors: Message, k: int) -> Tensor:
        """Return the ascending positions (k,) to send of these vectors (d,)."""

    def positions(self, name: str, payload: Payload, context: RoundContext) -> Tensor | None:
        """Return the positions of the numbers of all vectors."""
        return self.unpack_mask("mask", payload, context)

    def encode(self, message: Message, memory: State, context: RoundContext) -> tuple[Payload, State]:
        """Encode values (k,) under each vector's name, and their positions under `mask`."""
        vectors = {name: x for name, x in message.items() if compressible(name)}
        payload = {name: Packed.whole(x) for name, x in message.items() if name not in vectors}
        if vectors:  # a client sends only buffers if an exchange chose none of its layers
            count = context.layout.numel
            positions = self.choose(vectors, num_kept(self.alpha, count))
            payload |= {name: Packed.whole(x[positions]) for name, x in vectors.items()}
            payload["mask"] = self.pack_mask(positions, count)
        return payload, {}

    def decode(self, payload: Payload, context: RoundContext) -> Message:
        """Decode; numbers that were not sent are zero."""
        message = {name: packed.content for name, packed in payload.items() if name != "mask"}
        positions = self.positions("mask", payload, context)
        if positions is not None:
            message |= {
                name: values.new_zeros(context.layout.numel).index_copy_(0, positions, values)
                for name, values in message.items()
                if compressible(name)
            }
        return message


@dataclass(frozen=True)
class SharedTopK(OneMask):
    """Send all vectors at the coordinates where one of them, the leader, is largest.

    n vectors take 32nk + min(d, k⌈log2 d⌉) bits, k = max(1, ⌊alpha · d⌋).

    Attributes:
        leader: name of the vector whose k largest numbers define the mask.
    """

    leader: str = "model"

    @property
    def traits(self) -> Traits:
        """Idempotent: the leader's largest numbers are the same again."""
        return super().traits | Traits.IDEMPOTENT

    @property
    def needs(self) -> frozenset[str]:
        """The leader's name."""
        return frozenset({self.leader})

    def choose(self, vectors: Message, k: int) -> Tensor:
        """Return the positions where the leader is largest."""
        return top_k(vectors[self.leader], k)


@dataclass(frozen=True)
class FairTopK(OneMask):
    """Send all vectors at coordinates that are chosen from all of them.

    n vectors take 32nk + min(d, k⌈log2 d⌉) bits, k = max(1, ⌊alpha · d⌋).

    Attributes:
        union: `interleaved` takes the vectors' largest numbers in turns, rank by rank, until k coordinates are distinct
            (FAB-top-k, applied to vectors instead of clients); `max` takes the k largest of max(|x|, |y|, …).
    """

    union: Literal["interleaved", "max"] = "interleaved"

    def choose(self, vectors: Message, k: int) -> Tensor:
        """Return the positions of the largest numbers of all vectors, by `union`."""
        return (top_k_in_turns if self.union == "interleaved" else top_k_of_max)([*vectors.values()], k)

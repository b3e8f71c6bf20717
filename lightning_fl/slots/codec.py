"""The codec slot: turning a message into bits and back."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Flag, auto
from typing import Any

import torch
from torch import Tensor

from lightning_fl.coding.bit_packing import bit_width, pack
from lightning_fl.errors import require
from lightning_fl.slots.message import Message, State, compressible
from lightning_fl.slots.part import Part, parts_in
from lightning_fl.slots.round_context import RoundContext
from lightning_fl.vectors.kinds import KINDS, kind_of


@dataclass(frozen=True)
class Packed:
    """One encoded entry of a message.

    Attributes:
        content: the encoded tensor; only its codec knows the format.
        bits: size that the ledger counts for one transfer, in bits.
    """

    content: Tensor
    bits: int

    @classmethod
    def whole(cls, content: Tensor) -> Packed:
        """Pack a tensor unchanged; each number costs the width of its dtype, in bits, and a bool one bit."""
        width = 1 if content.dtype == torch.bool else 8 * content.element_size()
        return cls(content, content.numel() * width)


Payload = dict[str, Packed]
"""Encoded message: packed entries by name, `kind` or `kind/name`."""


class Traits(Flag):
    """Promises and needs of a codec.

    A wrapper takes the traits of the codec inside and adds its own: `self.codec.traits | Traits.ERROR_FEEDBACK`.
    """

    NONE = 0
    UNBIASED = auto()
    """E C(x) = x over its random draws, for every x without numbers beyond the `largest`."""
    NEARLY_UNBIASED = auto()
    """E C(x) is about x for most x, so that no error feedback is needed; for other x it may be far from x."""
    CONTRACTS = auto()
    """E‖C(x) − x‖² ≤ (1 − δ)‖x‖² with δ > 0, so that the memory of error feedback stays bounded.

    It need not hold beyond the `largest` number, nor for numbers too small for the codec, which arrive as 0.
    """
    IDEMPOTENT = auto()
    """C(C(x)) = C(x), bit for bit."""
    LOSSLESS = auto()
    """C(x) = x, bit for bit."""
    SUMS_SUFFICE = auto()
    """Uploads can be added up as they are sent, without positions or scales of each client."""
    DELTAS_ONLY = auto()
    """It is too coarse for a whole model and fits only deltas."""
    SENDS_FEW = auto()
    """Each client sends less than half of its numbers, which it chooses or draws by itself; the others arrive as 0."""
    NEEDS_SHAPES = auto()
    """It reads the shapes of tensors. A pruning mask destroys them: under it each tensor is one row."""
    ERROR_FEEDBACK = auto()
    """It adds the error of each message to the next one, so that a second error feedback would add it twice."""
    NEEDS_ERROR_FEEDBACK = auto()
    """It needs error feedback around it; without, most of each message would be lost for good."""
    ERROR_MAY_GROW = auto()
    """Error feedback would add up errors that may be larger than the messages.

    This holds for every unbiased or nearly unbiased codec that does not contract; such a codec need not declare it.
    """
    NEEDS_EVERY_CLIENT = auto()
    """A broadcast must reach every client of the federation, because the next one builds on it."""
    CATCHES_UP = auto()
    """A client that missed broadcasts downloads them when it takes part again, so that absent clients download nothing."""
    INCREMENTS = auto()
    """A message is an increment on the sender's earlier ones, so that a step must add up the clients' means."""
    EXACT = UNBIASED | CONTRACTS | IDEMPOTENT | LOSSLESS
    """Traits of a codec that sends numbers unchanged."""

    def only_if(self, holds: bool) -> Traits:
        """Return these traits, or none.

        >>> Traits.CONTRACTS.only_if(True) | Traits.UNBIASED.only_if(False)
        <Traits.CONTRACTS: 4>
        """
        return self if holds else Traits.NONE

    @property
    def keep_means(self) -> bool:
        """True if decoded messages are on average about the message, so that no error feedback is needed."""
        return bool(self & (Traits.UNBIASED | Traits.NEARLY_UNBIASED))

    @property
    def fit_error_feedback(self) -> bool:
        """True unless error feedback would add up errors that may be larger than the messages."""
        return Traits.ERROR_MAY_GROW not in self and (Traits.CONTRACTS in self or not self.keep_means)


UNDECLARED = Traits.DELTAS_ONLY | Traits.NEEDS_SHAPES | Traits.ERROR_MAY_GROW
"""Traits of a codec that declares none."""
FORMER = re.compile(
    "sums_suffice|needs_every_client|catches_up|(has|needs)_error_feedback|error_may_grow|is_(nearly_)?unbiased|contracts|"
    "is_idempotent|deltas_only|sends_few|needs_shapes"
)
"""Attributes that declared the traits in version 0.3."""


class Codec(Part, ABC):
    """Encodes and decodes messages. The other side of the link sees `decode(encode(message))`.

    An algorithm has one codec for the uplink and one for the downlink. The link calls them. If only a submodel
    is sent, as under a pruning mask, the codec gets vectors and layouts (`context`) of the submodel.
    A message must contain the entries that a codec `needs`, which may include `model`.
    """

    any_size = True
    """False if it encodes only vectors of the model's size d."""
    _promises, _kept_by = frozenset({"traits"}), frozenset({"encode", "decode", "encode_vector", "decode_vector"})

    @property
    def traits(self) -> Traits:
        """Promises and needs of the codec. A class declares them, as in `traits = Traits.UNBIASED | Traits.DELTAS_ONLY`.

        A codec that declares none promises nothing and has the traits `UNDECLARED`, the worst case.
        """
        return UNDECLARED

    @property
    def largest(self) -> float | None:
        """Largest magnitude that the codec sends. Larger finite numbers are clipped to it. None for no limit."""
        return None

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Raise `UserError` if a codec declares a trait by an attribute of version 0.3, which nothing reads any more."""
        super().__init_subclass__(**arguments)
        former = sorted(filter(FORMER.fullmatch, vars(cls)))
        traits = [f"Traits.{re.sub('^(is|has)_', '', name).upper()}" for name in former]
        require(
            not former,
            f"{cls.__name__} sets {', '.join(former)} as in version 0.3: declare {', '.join(traits)} in `traits` where it holds.",
        )

    def relative_variance(self, numel: int) -> float | None:
        """Return ω with E‖C(x) − x‖² ≤ ω‖x‖² for all x (d,), d = `numel`; None if the codec is biased, or no ω is known."""
        return None

    def check(self, context: RoundContext) -> None:
        """Raise `UserError` if the codec does not fit the run; called before the first round.

        Args:
            context: facts about the run.
        """

    def change_entry(self) -> tuple[str, Codec] | None:
        """Return the name and the codec of the entry to send, if a broadcast sends only the server's change; None otherwise."""
        return None

    def applies_to(self, name: str) -> bool:
        """True if it encodes entries of that name; the others, by default scalars and masks, cross unchanged."""
        return kind_of(name) not in ("scalars", "mask")

    def is_lossy_for(self, name: str) -> bool:
        """True if decoding may change an entry of that name: the model and its moments, unless the codec is `LOSSLESS`."""
        return compressible(name) and Traits.LOSSLESS not in self.traits

    def positions(self, name: str, payload: Payload, context: RoundContext) -> Tensor | None:
        """Return the ascending positions (k,) of the numbers of a vector that a payload contains; None if it contains all."""
        return None

    def choice(self, name: str, payload: Payload, context: RoundContext) -> tuple[int, int] | None:
        """Return d and k for an entry that only tells which k of d positions a payload contains; None for other entries.

        By default these are the entries `mask` and `mask/VECTOR` of a vector that has `positions`.
        """
        if kind_of(name) != "mask":
            return None
        vectors = [vector for vector in payload if compressible(vector) and name in ("mask", f"mask/{vector}")]
        positions = self.positions(vectors[0], payload, context) if vectors else None
        return None if positions is None else (context.layout.numel, len(positions))

    def symbols(self, name: str, payload: Payload, context: RoundContext) -> tuple[Tensor, int] | None:
        """Return an entry's whole numbers in [0, A), and A, if it contains nothing else; None for other entries."""
        return None

    def from_symbols(self, name: str, symbols: Tensor, num_values: int) -> Tensor:
        """Return the content of an entry with these whole numbers (n,): the inverse of `symbols`. By default they are packed."""
        return pack(symbols, bit_width(num_values))

    def bits_by_tensor(self, name: str, payload: Payload, context: RoundContext) -> dict[str, int] | None:
        """Return the bits of an entry for each tensor; {} if they belong to none, None if every number costs the same."""
        return None

    @abstractmethod
    def encode(self, message: Message, memory: State, context: RoundContext) -> tuple[Payload, State]:
        """Encode a message.

        Args:
            message: entries to which the codec applies; vectors (d,) or (d_b,).
            memory: memory that this sender's last `encode` returned, {} at first; not to be changed. Each client has one for
                its uplink, and the server has one for the broadcast.
            context: facts about the run.

        Returns:
            The payload and the sender's new memory. A client's new memory is kept only if the server accepts the upload. The
            server rejects an upload if it or the memory contains a number that is not finite.
        """

    @abstractmethod
    def decode(self, payload: Payload, context: RoundContext) -> Message:
        """Return the message in a payload, with the names and shapes that were encoded."""

    def decode_incremental(self, payload: Payload, memory: State, context: RoundContext) -> Message:
        """Return the message of a broadcast for clients that received all earlier broadcasts.

        The link calls it for every broadcast, and `decode` for all other messages.

        Args:
            payload: the encoded broadcast.
            memory: memory that `encode` received.
            context: facts about the run.
        """
        return self.decode(payload, context)


def undeclared(codec: Codec, remedy: Traits = Traits.CONTRACTS) -> str:
    """Return a hint, in brackets, at the traits to declare if a codec, or one inside it, declares none; '' otherwise."""
    silent = [type(part) for part in parts_in(codec) if getattr(type(part), "traits", None) is Codec.traits]
    if not silent:
        return ""
    return (
        f" ({silent[0].__name__} declares no traits, so the worst is assumed: declare the traits that hold in its class, such "
        f"as traits = Traits.{remedy.name})"
    )


def through(codec: Codec, message: Message, context: RoundContext) -> tuple[Message, Tensor]:
    """Encode and decode a message of the server, without codec memory.

    Args:
        codec: usually a lossy one.
        message: vectors (d,) or (d_b,).
        context: facts about the run. Under a pruning mask only the unpruned coordinates are encoded; all others are 0 in the
            result.

    Returns:
        The decoded message, with the shapes of `message`, and the bits of the payload, int64, one number for each of `KINDS`.
    """
    unpruned = context.unpruned
    if unpruned is not None:
        context, message = context.within(unpruned), unpruned.gather(message)
    payload, _ = codec.encode(message, {}, context)
    arrived = codec.decode(payload, context)
    bits = dict.fromkeys(KINDS, 0)
    for name, packed in payload.items():
        bits[kind_of(name)] += packed.bits
    return arrived if unpruned is None else unpruned.scatter(arrived, {}), torch.tensor([*bits.values()])

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
from lightning_fl.slots.part import Part, check_inner, parts_in
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
        """Pack a tensor unchanged; each number costs the width of its dtype, in bits."""
        return cls(content, content.numel() * content.element_size() * 8)


Payload = dict[str, Packed]
"""Encoded message: packed entries by name, `kind` or `kind/name`."""


class Traits(Flag):
    """Promises and needs of a codec.

    A wrapper takes those of the codec inside and adds its own: `self.codec.traits | Traits.ERROR_FEEDBACK`.
    """

    NONE = 0
    UNBIASED = auto()
    """E C(x) = x over its random draws, for each x up to the `largest` number, whatever x is."""
    NEARLY_UNBIASED = auto()
    """E C(x) is about x for most x, which need no error feedback then, though it may be far from other x."""
    CONTRACTS = auto()
    """E‖C(x) − x‖² ≤ (1 − δ)‖x‖² with δ > 0, so that what error feedback keeps stays bounded.

    It need not hold beyond the `largest` number, nor for numbers too small for the codec, which arrive as 0.
    """
    IDEMPOTENT = auto()
    """C(C(x)) = C(x), bit for bit."""
    LOSSLESS = auto()
    """C(x) = x, bit for bit."""
    SUMS_SUFFICE = auto()
    """Uploads can be added up as they are sent, without positions or scales of each client."""
    DELTAS_ONLY = auto()
    """It is too coarse for a whole model, so that it fits deltas only."""
    SENDS_FEW = auto()
    """Each client sends less than half of its numbers, by its own choice or draw, and the others arrive as 0."""
    NEEDS_SHAPES = auto()
    """It reads the shapes of the tensors, which a pruning mask does not leave: it makes each tensor one row."""
    ERROR_FEEDBACK = auto()
    """It adds what it lost to the next message, so that another error feedback would add it twice."""
    NEEDS_ERROR_FEEDBACK = auto()
    """The loss of one message must be added to the next, as most of it would be lost for good."""
    ERROR_MAY_GROW = auto()
    """Error feedback would add up errors that may be larger than the messages.

    So it is with every codec that is unbiased, or nearly, and does not contract; it need not declare this.
    """
    NEEDS_EVERY_CLIENT = auto()
    """A broadcast must reach every client of the federation, because the next one builds on it."""
    CATCHES_UP = auto()
    """A client that missed broadcasts loads them when it is there again, so that those that are not pay nothing."""
    INCREMENTS = auto()
    """A message is an increment on the sender's earlier ones, so that a step must add up the clients' means."""
    EXACT = UNBIASED | CONTRACTS | IDEMPOTENT | LOSSLESS
    """Those of a codec that sends the numbers as they are."""

    def only_if(self, holds: bool) -> Traits:
        """Return these traits, or none.

        >>> Traits.CONTRACTS.only_if(True) | Traits.UNBIASED.only_if(False)
        <Traits.CONTRACTS: 4>
        """
        return self if holds else Traits.NONE

    @property
    def keep_means(self) -> bool:
        """True if the mean of what arrives is about the message, so that nothing needs to be added to the next one."""
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
"""Attributes that had the traits in version 0.3."""


class Codec(Part, ABC):
    """Encodes and decodes messages. The other side of the link sees `decode(encode(message))`.

    An algorithm has one codec for the uplink and one for the downlink. The link calls them. If only a submodel
    is sent, as under a pruning mask, the vectors that the codec gets and the layouts of `context` are those of the submodel.
    A message must contain the entries that a codec `needs`, `model` too.
    """

    _promises, _kept_by = frozenset({"traits"}), frozenset({"encode", "decode", "encode_vector", "decode_vector"})

    @property
    def traits(self) -> Traits:
        """Promises and needs of the codec; a class states them, as in `traits = Traits.UNBIASED | Traits.DELTAS_ONLY`.

        Of a codec that states nothing the worst is assumed: that it promises nothing, and `UNDECLARED`.
        """
        return UNDECLARED

    @property
    def largest(self) -> float | None:
        """Largest magnitude that it sends, to which finite numbers beyond it are cut off; None for no limit."""
        return None

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Raise `UserError` if a codec states a trait as version 0.3 did, as nothing reads that any more."""
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
        """Return the ascending positions (k,) of the numbers of a vector that a payload contains; None: it contains all."""
        return None

    def choice(self, name: str, payload: Payload, context: RoundContext) -> tuple[int, int] | None:
        """Return d and k if an entry says which k of d positions a payload contains, and nothing else; None for other entries.

        By default the entries `mask` and `mask/VECTOR` do, for a vector that has `positions`.
        """
        if kind_of(name) != "mask":
            return None
        vectors = [vector for vector in payload if compressible(vector) and name in ("mask", f"mask/{vector}")]
        positions = self.positions(vectors[0], payload, context) if vectors else None
        return None if positions is None else (context.layout.numel, len(positions))

    def symbols(self, name: str, payload: Payload, context: RoundContext) -> tuple[Tensor, int] | None:
        """Return an entry's whole numbers in [0, A), and A, if they alone are its content; None for entries of other content."""
        return None

    def from_symbols(self, name: str, symbols: Tensor, num_values: int) -> Tensor:
        """Return the content of an entry with these whole numbers (n,), the inverse of `symbols`: by default, packed numbers."""
        return pack(symbols, bit_width(num_values))

    def bits_by_tensor(self, name: str, payload: Payload, context: RoundContext) -> dict[str, int] | None:
        """Return the bits of an entry that belong to each tensor, {} for none; None: to its numbers, as many to each."""
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
            The payload and the sender's new memory. A client's new memory is kept only if the server accepts the upload, which it
            does not if a number of either is not finite.
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
    """Return what to declare, in brackets, if the worst is assumed of a codec or of one inside it; else nothing."""
    silent = [type(part) for part in parts_in(codec) if getattr(type(part), "traits", None) is Codec.traits]
    if not silent:
        return ""
    return (
        f" ({silent[0].__name__} declares no traits, so the worst is assumed: declare in its class those that hold, such as "
        f"traits = Traits.{remedy.name})"
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


VALUES = "/values/"


def check_values(outer: Codec, values: Codec | None) -> None:
    """Raise `UserError` if a codec cannot encode values that are others each time, and a row of numbers."""
    if values is not None:
        check_inner(outer, "values", Codec, "EDEN()")
    name, inner = type(outer).__name__, type(values).__name__
    traits = Traits.NONE if values is None else values.traits
    require(
        not traits & (Traits.ERROR_FEEDBACK | Traits.NEEDS_EVERY_CLIENT),
        f"{name}'s values are other numbers each time, but {inner} builds on the message before: give it the codec inside, or "
        f"ErrorFeedback({name}(values=…)) if that codec contracts.",
    )
    require(
        values is None or Traits.NEEDS_SHAPES not in traits,
        f"{name}'s values are a row of numbers, which {inner} would send as they are: leave it out"
        f"{undeclared(values) if values is not None else ''}.",
    )
    leaders = ", ".join(sorted(values.needs)) if values is not None else ""
    require(
        not leaders,
        f"{name}'s values are those of one vector, but {inner} chooses by {leaders}: give it a codec that reads each vector "
        "alone, such as TopK.",
    )


def pack_values(codec: Codec | None, name: str, values: Tensor, positions: Tensor, context: RoundContext) -> Payload:
    """Encode the values (k,) at some positions (k,) of a vector as a model of k parameters, as they are without a codec.

    The names of the entries are `kind/values/VECTOR:NAME`, or the vector's as they are.
    """
    if codec is None or not len(values):
        return {name: Packed.whole(values)}
    payload, _ = codec.encode({name: values}, {}, context.at(positions))
    return {f"{kind_of(key)}{VALUES}{name}:{key}": packed for key, packed in payload.items()}


def unpack_values(codec: Codec | None, name: str, payload: Payload, positions: Tensor, context: RoundContext) -> Tensor:
    """Return the values (k,) of a vector."""
    if codec is None or not len(positions):
        return payload[name].content
    return codec.decode(_nested(name, payload), context.at(positions))[name]


def inside_values(name: str, payload: Payload) -> tuple[str, Payload]:
    """Return the name of an entry, and the payload around it, as the codec of the values made them."""
    vector, _, key = name.partition(VALUES)[2].partition(":")
    return key, _nested(vector, payload)


def _nested(vector: str, payload: Payload) -> Payload:
    prefix = f"{VALUES}{vector}:"
    return {key.partition(prefix)[2]: packed for key, packed in payload.items() if prefix in key}

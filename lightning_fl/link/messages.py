"""Messages that have crossed the link, as callbacks see them: size of an upload by layer, and least size of any content."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, lgamma, log
from typing import Protocol

import torch

from lightning_fl.codecs.error_feedback import RESIDUAL
from lightning_fl.slots import Codec, Message, Payload, RoundContext, State, compressible
from lightning_fl.vectors.layer_groups import Group

SHARED = "shared"
"""Name of the bits that belong to no single layer."""


def _ignored(client: int, position: int, total: int) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class RoundObserver:
    """Functions that are called as a round goes on; for a message whose function is None nothing is computed.

    Attributes:
        on_upload: called after each upload with the client, its position from 1 and the number of uploads of this process.
        on_prepared: called with the same arguments after each client's work before the first round.
        on_client_message: called with each message of a client of this process that has crossed the uplink.
        on_server_message: called with each message that the downlink's codec has encoded.
    """

    on_upload: Callable[[int, int, int], None] = _ignored
    on_prepared: Callable[[int, int, int], None] = _ignored
    on_client_message: Callable[[UplinkMessage], None] | None = None
    on_server_message: Callable[[DownlinkMessage], None] | None = None


class OnlySum(Protocol):
    """Sum over some clients of a round, where the server sees no message of a single one."""

    @property
    def codec(self) -> Codec:
        """Codec of a client's summand."""

    @property
    def agreement_bits(self) -> tuple[int, int]:
        """Bits up and down of each client before the sum, by which they agree on it."""

    @property
    def number_bits(self) -> int:
        """Bits of each number of a summand."""

    def among(self, num_clients: int) -> OnlySum:
        """Return a further sum, over so many clients."""

    def is_lost(self, num_answers: int) -> bool:
        """True if so few of its clients answer that the server cannot read it."""


@dataclass(frozen=True)
class DownlinkMessage:
    """Message of the server through its codec.

    Attributes:
        client: index of the client that receives it; None for a broadcast, which every process sees.
        num_charged: clients to which its bits are charged; 0 if clients load what they have missed (`Traits.CATCHES_UP`).
        codec: codec of the downlink.
        payload: what it has made.
        context: context that it was given, of the submodel if only that was sent.
    """

    client: int | None
    num_charged: int
    codec: Codec
    payload: Payload
    context: RoundContext

    @property
    def bits(self) -> int:
        """Bits of one copy."""
        return sum(packed.bits for packed in self.payload.values())

    @property
    def entropy_bits(self) -> int:
        """Bits that an ideal code of one copy would take, with its model; see `UplinkMessage.entropy_bits`."""
        return sum(_entropy(self.codec, name, self.payload, self.context) for name in self.payload)


@dataclass(frozen=True)
class UplinkMessage:
    """Message of a client that has crossed the uplink.

    Attributes:
        client: index of the client.
        sent: vectors that it sent, of full length, 0 where it sent nothing.
        decoded: what the server sees of them.
        memory: codec memory of the client after the message.
        parts: codecs and the payloads that they made.
        context: context that they were given, of the submodel if only that was sent.
        groups: layers of the network.
    """

    client: int
    sent: Message
    decoded: Message
    memory: State
    parts: Sequence[tuple[Codec, Payload]]
    context: RoundContext
    groups: Sequence[Group]

    @property
    def bits(self) -> int:
        """Bits of the message."""
        return sum(packed.bits for _, payload in self.parts for packed in payload.values())

    @property
    def entropy_bits(self) -> int:
        """Bits that an ideal code of the same content would take, with its model.

        n symbols out of A values, n_v of them equal to v, take ⌈log2 C(n+A−1, A−1)⌉ bits for the counts and ⌈log2(n! / Π n_v!)⌉
        for their order, which an enumerative code attains; k of d positions take ⌈log2 C(d, k)⌉. All else counts in full, as does
        an entry that is shorter as it is sent.
        """
        return sum(_entropy(codec, name, payload, self.context) for codec, payload in self.parts for name in payload)

    @property
    def num_saturated(self) -> int | None:
        """Number of values that the codec has cut off at the largest that it sends; None if it has no limit."""
        limits = [codec.largest for codec, _ in self.parts if codec.largest is not None]
        if not limits:
            return None
        count = 0
        for name, sent in self.sent.items():
            at_limit = self.decoded[name].abs() == limits[0]
            encoded = sent[at_limit].double()
            if RESIDUAL + name in self.memory:  # x + e before the message is C(x + e) + e after it
                encoded = (self.decoded[name].double() + self.memory[RESIDUAL + name].double())[at_limit]
            count += int(((encoded.abs() > limits[0]) & encoded.isfinite()).sum())
        return count

    def bits_by_layer(self) -> dict[str, int]:
        """Return the bits of each layer, and under `shared` those that belong to none, such as positions; together `bits`."""
        bits_by_group = dict.fromkeys([*(group.name for group in self.groups), SHARED], 0)
        home = {name: group.name for group in self.groups for name in group.parameters}
        for codec, payload in self.parts:
            for name, packed in payload.items():
                shares = codec.bits_by_tensor(name, payload, self.context)
                if shares is None and compressible(name):
                    shares = self._by_numbers(codec, name, payload)
                for tensor, bits in (shares or {}).items():
                    bits_by_group[home.get(tensor, SHARED)] += bits
                bits_by_group[SHARED] += packed.bits - sum((shares or {}).values())
        return bits_by_group

    def _by_numbers(self, codec: Codec, name: str, payload: Payload) -> dict[str, int]:
        """Return the bits of each tensor's numbers in a vector; {} unless all have as many."""
        layout, positions = self.context.layout, codec.positions(name, payload, self.context)
        counts = list(layout.sizes)
        if positions is not None:
            tensors = torch.bucketize(positions.cpu(), torch.tensor(layout.sizes).cumsum(0), right=True)
            counts = torch.bincount(tensors, minlength=len(counts)).tolist()
        width, rest = divmod(payload[name].bits, max(1, sum(counts)))
        return {} if rest else {tensor: width * count for tensor, count in zip(layout.names, counts, strict=True)}


def _entropy(codec: Codec, name: str, payload: Payload, context: RoundContext) -> int:
    """Return the ideal bits of an entry, never more than it takes."""
    sent = payload[name].bits
    if (coded := codec.symbols(name, payload, context)) is not None:
        symbols, num_values = coded
        counts = torch.bincount(symbols.flatten().long(), minlength=num_values).tolist()
        n = sum(counts)
        order_bits = log2_factorial(n) - sum(map(log2_factorial, counts))
        return min(sent, _whole(log2_choices(n + num_values - 1, num_values - 1)) + _whole(order_bits))
    if (choice := codec.choice(name, payload, context)) is not None:
        return min(sent, _whole(log2_choices(*choice)))
    return sent


def log2_factorial(n: int) -> float:
    """Return log2 n!.

    >>> round(log2_factorial(4), 9) == round(log(24) / log(2), 9)
    True
    """
    return lgamma(n + 1) / log(2)


def log2_choices(n: int, k: int) -> float:
    """Return log2 of the number of choices of k among n."""
    return log2_factorial(n) - log2_factorial(k) - log2_factorial(n - k)


def _whole(bits: float) -> int:
    """Return whole bits, whatever the rounding error of a logarithm that is whole."""
    return max(0, ceil(bits - 1e-6))

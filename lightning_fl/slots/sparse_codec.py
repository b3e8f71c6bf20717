"""Codecs that send some numbers of each vector, if asked through a codec of their own."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from lightning_fl.errors import require
from lightning_fl.slots.codec import Codec, Packed, Payload, Traits, undeclared
from lightning_fl.slots.message import Message, compressible
from lightning_fl.slots.part import check_inner
from lightning_fl.slots.round_context import RoundContext
from lightning_fl.vectors.kinds import KINDS, kind_of

VALUES = "/values/"


class SparseCodec(Codec):
    """Sends the numbers (k,) at some positions of each vector; `values` encodes them like a model of k parameters.

    The entries of `values` are named `kind/values/VECTOR:NAME`. Without it the numbers are sent unchanged, under the name of the
    vector.

    Attributes:
        values: codec of the k numbers; None for none.
        mark: prefix of the name of a vector's entry that tells the positions.
    """

    any_size = False
    values: Codec | None
    mark: str

    @abstractmethod
    def chosen(self, vector: str, payload: Payload, context: RoundContext) -> Tensor | None:
        """Return the ascending positions (k,) of the numbers of a vector; None for one that is sent whole."""

    def context_inside(self, context: RoundContext) -> RoundContext:
        """Return the context from which that of `values` is made."""
        return context

    def check_values(self) -> None:
        """Raise `UserError` if `values` cannot encode a row of numbers, whose positions change."""
        if self.values is None:
            return
        check_inner(self, "values", Codec, "EDEN()")
        name, inner, traits = type(self).__name__, type(self.values).__name__, self.values.traits
        require(
            not traits & (Traits.ERROR_FEEDBACK | Traits.NEEDS_EVERY_CLIENT),
            f"{name}'s values have other positions in every message, but {inner} builds on the previous message: use the codec "
            f"inside {inner}, or ErrorFeedback({name}(values=…)) if that codec contracts.",
        )
        require(
            Traits.NEEDS_SHAPES not in traits,
            f"{name}'s values are a row of numbers, which {inner} would send unchanged: leave it out{undeclared(self.values)}.",
        )
        leaders = ", ".join(sorted(self.values.needs))
        require(
            not leaders,
            f"{name}'s values come from one vector, but {inner} chooses positions by {leaders}: use a codec that reads each "
            "vector alone, such as TopK.",
        )

    @property
    def largest(self) -> float | None:
        """Largest magnitude that the codec of the values sends."""
        return None if self.values is None else self.values.largest

    def positions(self, name: str, payload: Payload, context: RoundContext) -> Tensor | None:
        """Return the positions of a vector's numbers, in ascending order."""
        vector, key = _parts(name)
        chosen = self.chosen(vector, payload, context)
        if self.values is None or not key or chosen is None:
            return chosen
        among = self.values.positions(key, _of_values(vector, payload), self._at(chosen, context))
        return chosen if among is None else chosen[among]

    def choice(self, name: str, payload: Payload, context: RoundContext) -> tuple[int, int] | None:
        """Return the choice of the codec of the values."""
        asked = self._asked(name, payload, context)
        return None if asked is None else asked[0].choice(*asked[1:])

    def bits_by_tensor(self, name: str, payload: Payload, context: RoundContext) -> dict[str, int] | None:
        """Return the bits of the codec of the values."""
        asked = self._asked(name, payload, context)
        return None if asked is None else asked[0].bits_by_tensor(*asked[1:])

    def symbols(self, name: str, payload: Payload, context: RoundContext) -> tuple[Tensor, int] | None:
        """Return the whole numbers that the codec of the values sends."""
        asked = self._asked(name, payload, context)
        return None if asked is None else asked[0].symbols(*asked[1:])

    def from_symbols(self, name: str, symbols: Tensor, num_values: int) -> Tensor:
        """Return what the codec of the values sends."""
        if self.values is None:
            return super().from_symbols(name, symbols, num_values)
        return self.values.from_symbols(_parts(name)[1], symbols, num_values)

    def vector_told_of(self, name: str) -> str:
        """Return the vector whose positions an entry tells; '' for other entries, also for a method's own masks."""
        vector = name.removeprefix(self.mark)
        is_vector = vector != name and vector.partition("/")[0] in KINDS and compressible(vector)
        return vector if is_vector else ""

    def pack_values(self, name: str, values: Tensor, positions: Tensor, context: RoundContext) -> Payload:
        """Return the entries of a vector's numbers (k,) at some positions (k,)."""
        if self.values is None or not len(values):
            return {name: Packed.whole(values)}
        payload, _ = self.values.encode({name: values}, {}, self._at(positions, context))
        return {f"{kind_of(key)}{VALUES}{name}:{key}": packed for key, packed in payload.items()}

    def decode(self, payload: Payload, context: RoundContext) -> Message:
        """Decode; numbers that were not sent are zero."""
        message = {}
        for name, packed in payload.items():
            vector = self.vector_told_of(name)
            if VALUES in name or f"{self.mark}{name}" in payload:
                continue
            if not vector:
                message[name] = packed.content
                continue
            chosen = self.chosen(vector, payload, context)
            assert chosen is not None
            values = self._unpacked(vector, payload, chosen, context)
            message[vector] = values.new_zeros(context.layout.numel).index_copy_(0, chosen, values)
        return message

    def _unpacked(self, vector: str, payload: Payload, chosen: Tensor, context: RoundContext) -> Tensor:
        """Return the numbers (k,) of a vector that `pack_values` encoded."""
        if self.values is None or not len(chosen):
            return payload[vector].content
        return self.values.decode(_of_values(vector, payload), self._at(chosen, context))[vector]

    def _asked(
        self, name: str, payload: Payload, context: RoundContext
    ) -> tuple[Codec, str, Payload, RoundContext] | None:
        """Return the codec of the values, and what it is to be told of one of its entries; None for an entry of another kind."""
        vector, key = _parts(name)
        chosen = self.chosen(vector, payload, context) if key else None
        if self.values is None or chosen is None:
            return None
        return self.values, key, _of_values(vector, payload), self._at(chosen, context)

    def _at(self, positions: Tensor, context: RoundContext) -> RoundContext:
        return self.context_inside(context).at(positions)


def _parts(name: str) -> tuple[str, str]:
    """Return the vector of an entry, and the name that the codec of the values gave to the entry; '' if it is another's."""
    if VALUES not in name:
        return name, ""
    vector, _, key = name.partition(VALUES)[2].partition(":")
    return vector, key


def _of_values(vector: str, payload: Payload) -> Payload:
    """Return the payload that the codec of a vector's values made."""
    prefix = f"{VALUES}{vector}:"
    return {key.partition(prefix)[2]: packed for key, packed in payload.items() if prefix in key}

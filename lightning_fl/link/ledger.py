"""Ledger of the bits that cross the link, by direction and kind."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_fl.link.catch_up import CatchUp
from lightning_fl.slots import KINDS, Payload, kind_of

Direction = Literal["up", "down"]
Bits = dict[str, dict[str, int]]
"""Numbers of bits by direction and kind."""


def _zero_bits() -> Bits:
    return {direction: dict.fromkeys(KINDS, 0) for direction in ("up", "down")}


@dataclass
class Ledger:
    """Numbers of bits sent, as exact integers, by direction and kind (`lightning_fl.slots.KINDS`).

    Attributes:
        round_bits: bits of the present round, all clients together.
        total_bits: bits of the whole run: set-up, all rounds, and `coming_bits`.
        setup_bits: bits of the set-up before the first round.
        coming_bits: bits booked in advance for the next round.
        catch_up: updates that clients have loaded, if the downlink charges them when clients are there again; else nothing.
    """

    round_bits: Bits = field(default_factory=_zero_bits)
    total_bits: Bits = field(default_factory=_zero_bits)
    setup_bits: Bits = field(default_factory=_zero_bits)
    coming_bits: Bits = field(default_factory=_zero_bits)
    catch_up: CatchUp = field(default_factory=CatchUp)

    def book(self, direction: Direction, payload: Payload, recipients: int = 1) -> None:
        """Add a payload's bits, once for each recipient."""
        for name, packed in payload.items():
            self.add({direction: {kind_of(name): packed.bits * recipients}})

    def since(self, earlier: Bits) -> Bits:
        """Return the bits booked in this round since `round_bits` was `earlier`."""
        return {
            direction: {kind: bits - earlier[direction][kind] for kind, bits in kinds.items()}
            for direction, kinds in self.round_bits.items()
        }

    def add(self, bits: Bits, ahead: bool = False) -> None:
        """Add bits to the total and to the present round, or with `ahead` to the next one."""
        to = self.coming_bits if ahead else self.round_bits
        for direction, kinds in bits.items():
            for kind, count in kinds.items():
                to[direction][kind] += count
                self.total_bits[direction][kind] += count

    def close_setup(self) -> None:
        """Count all bits booked so far as set-up."""
        self.setup_bits, self.round_bits = self.round_bits, _zero_bits()

    def open_round(self, *parts: Bits) -> None:
        """Start a new round with the bits that were booked for it in advance, and add these."""
        self.round_bits, self.coming_bits = self.coming_bits, _zero_bits()
        for bits in parts:
            self.add(bits)

    def bits_of_next(self, direction: Direction, *parts: Bits) -> int:
        """Return the bits in one direction of a round that begins with these, and those that were booked for it in advance."""
        return sum(sum(bits.get(direction, {}).values()) for bits in (self.coming_bits, *parts))

    def bits(self, direction: Direction) -> int:
        """Return the bits of the present round in one direction."""
        return sum(self.round_bits[direction].values())

    def setup(self) -> dict[str, int]:
        """Return the bits of the set-up by direction; {} if nothing was sent."""
        bits = {direction: sum(kinds.values()) for direction, kinds in self.setup_bits.items()}
        return bits if any(bits.values()) else {}

    def total_bytes(self, direction: Direction) -> float:
        """Return the bytes of the whole run in one direction, a fraction if packed bits do not fill the last byte."""
        bits = sum(self.total_bits[direction].values())
        return bits // 8 if bits % 8 == 0 else bits / 8

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the counts, for a checkpoint."""
        counts = {name: deepcopy(value) for name, value in vars(self).items() if name != "catch_up"}
        return {**counts, "catch_up": self.catch_up.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the counts from a checkpoint."""
        for name in ("round_bits", "total_bits", "setup_bits", "coming_bits"):
            setattr(self, name, deepcopy(state[name]))
        self.catch_up.load_state_dict(state["catch_up"])

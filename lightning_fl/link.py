"""The only door between the server and the clients: everything that crosses is encoded, counted and decoded here."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_fl.slots import KINDS, Codec, Message, Payload, Setting, State, kind_of

Direction = Literal["up", "down"]


def _zero_bits() -> dict[str, dict[str, int]]:
    return {direction: dict.fromkeys(KINDS, 0) for direction in ("up", "down")}


@dataclass
class Ledger:
    """Bits that crossed, as exact integers, by direction and kind (`lightning_fl.slots.KINDS`).

    Attributes:
        round_bits: of the round under way, all clients together.
        total_bits: of all rounds and of the set-up before them.
    """

    round_bits: dict[str, dict[str, int]] = field(default_factory=_zero_bits)
    total_bits: dict[str, dict[str, int]] = field(default_factory=_zero_bits)

    def book(self, direction: Direction, payload: Payload, recipients: int = 1) -> None:
        """Add a payload's bits, once for each recipient."""
        for name, packed in payload.items():
            self.add({direction: {kind_of(name): packed.bits * recipients}})

    def since(self, earlier: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
        """Bits booked in this round since `round_bits` was `earlier`."""
        return {
            direction: {kind: bits - earlier[direction][kind] for kind, bits in kinds.items()}
            for direction, kinds in self.round_bits.items()
        }

    def add(self, bits: dict[str, dict[str, int]]) -> None:
        """Add bits to the round and the total, by direction and kind."""
        for direction, kinds in bits.items():
            for kind, count in kinds.items():
                self.round_bits[direction][kind] += count
                self.total_bits[direction][kind] += count

    def open_round(self) -> None:
        """Start counting a new round."""
        self.round_bits = _zero_bits()

    def bits(self, direction: Direction) -> int:
        """Bits of the round under way in one direction."""
        return sum(self.round_bits[direction].values())

    def total_bytes(self, direction: Direction) -> float:
        """Bytes of the whole run in one direction; a fraction where packed bits do not fill the last byte."""
        bits = sum(self.total_bits[direction].values())
        return bits // 8 if bits % 8 == 0 else bits / 8

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"round_bits": deepcopy(self.round_bits), "total_bits": deepcopy(self.total_bits)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From the checkpoint."""
        self.round_bits, self.total_bits = state["round_bits"], state["total_bits"]


class Link:
    """Sends messages through the codecs and books them.

    A client's codec memory (what error feedback keeps) becomes the new one only with `commit`, once the server has accepted
    the upload: a client whose upload is dropped has sent nothing.
    """

    def __init__(
        self,
        setting: Setting,
        uplink: Codec,
        downlink: Codec,
        ledger: Ledger,
        client_memory: dict[int, State],
        server_memory: State,
    ) -> None:
        self.setting = setting
        self.uplink = uplink
        self.downlink = downlink
        self.ledger = ledger
        self.client_memory = client_memory
        self.server_memory = server_memory
        self._pending: dict[int, State] = {}

    def broadcast(self, cohort: Sequence[int], message: Message) -> Message:
        """Send one message to every client of the cohort; returns what each of them receives.

        Where the next broadcast builds on this one, it goes to all clients of the federation and is counted for all.
        """
        before = dict(self.server_memory)
        payload, memory = self.downlink.encode(message, before, self.setting)
        self.server_memory.clear()
        self.server_memory.update(memory)
        recipients = self.setting.num_clients if self.downlink.for_all() else len(cohort)
        self.ledger.book("down", payload, recipients)
        return self.downlink.follow(payload, before, self.setting)

    def down(self, client: int, message: Message) -> Message:
        """Send one client a message of its own, whole."""
        payload, _ = self.downlink.encode(message, {}, self.setting)
        self.ledger.book("down", payload)
        return self.downlink.decode(payload, self.setting)

    def up(self, client: int, message: Message) -> Message:
        """Send a client's message to the server; returns what the server sees."""
        payload, memory = self.uplink.encode(message, self.client_memory.get(client, {}), self.setting)
        if memory:
            self._pending[client] = memory
        self.ledger.book("up", payload)
        return self.uplink.decode(payload, self.setting)

    def commit(self, client: int) -> State:
        """The server accepted this client's upload; returns the codec memory that it now keeps."""
        if client in self._pending:
            self.client_memory[client] = self._pending.pop(client)
        return self.client_memory.get(client, {})

    def close_round(self) -> None:
        """Forget the codec memory of uploads that were not accepted."""
        self._pending.clear()

"""The link between server and clients: it encodes, counts and decodes every message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_fl.codecs import Dense
from lightning_fl.errors import require
from lightning_fl.link.catch_up import CatchUp
from lightning_fl.link.ledger import Direction, Ledger
from lightning_fl.link.messages import DownlinkMessage, OnlySum, RoundObserver, UplinkMessage
from lightning_fl.slots import Codec, Draw, Message, Payload, RoundContext, State, Traits, Upload, is_finite, kind_of
from lightning_fl.vectors.submodel import Submodel

DIRECTIONS: tuple[Direction, Direction] = ("up", "down")
DENSE = Dense()
NO_BITS = (0, 0)
"""Bits of a client that has neither sent nor received any."""


def _alone(mine: dict[int, Any]) -> dict[int, Any]:
    """Return the values of the only process."""
    return mine


def _none(uploads: Iterable[Upload]) -> tuple[Message, int]:
    return {}, 0


class Transfer(NamedTuple):
    """Message that has crossed the link.

    Attributes:
        decoded: what the other end makes of it.
        memory: codec memory of the sender afterwards.
        parts: codecs and the payloads that they made.
        context: context that they were given, of the submodel if only that was sent.
    """

    decoded: Message
    memory: State
    parts: Sequence[tuple[Codec, Payload]]
    context: RoundContext

    @property
    def bits(self) -> int:
        """Bits of one copy."""
        return sum(packed.bits for _, payload in self.parts for packed in payload.values())


class Link:
    """Sends messages through the codecs and counts their bits in a ledger of its own, which `Run.book` adds to the run's.

    `broadcast_bits` and `broadcast_bits_by_client` are what has been sent until the end of the broadcast; `bits_by_client` has
    what comes after it.
    `commit` returns a client's new codec memory, such as the residual of error feedback, which the server takes with its upload.
    After a rejected upload the client's old memory stays. The run stores new memories at the end of the round.
    `senders` are the clients that have sent any bit of a message.
    `only_sum` is the sum of the clients' messages that the server sees in place of them; None if it sees each.
    `stands_for` is the number of clients for which each one of this link stands: 1 but in a dry round.
    `num_lost` is the number of clients whose sum is lost before their uploads are counted: in an earlier turn, after which no
    upload follows, or because one of them alone sends.
    """

    def __init__(
        self,
        context: RoundContext,
        uplink: Codec,
        downlink: Codec,
        ledger: Ledger | None = None,
        client_memory: Mapping[int, State] = MappingProxyType({}),
        server_memory: Mapping[str, Tensor] = MappingProxyType({}),
        gather: Callable[[dict[int, Any]], dict[int, Any]] = _alone,
        random: Callable[[int], np.random.Generator] = np.random.default_rng,
        mean: Callable[[Iterable[Upload]], tuple[Message, int]] = _none,
        observer: RoundObserver = RoundObserver(),  # noqa: B008 -- frozen
        catch_up: CatchUp | None = None,
        timed: Sequence[int] = (),
        is_unchanged: bool = False,
        stands_for: int = 1,
    ) -> None:
        """Open the link.

        Args:
            context: facts about the run.
            uplink: codec of the clients' messages.
            downlink: codec of the server's messages.
            ledger: counts the bits; None for a new one.
            client_memory: codec memory of each client's uplink; not changed.
            server_memory: codec memory of the downlink; not changed. The new memory is `self.server_memory`.
            gather: merges values by client over all processes, in the order of the cohort.
            random: returns the server's random stream for a client in this round.
            mean: merges uploads over all processes, and counts them; {} and 0 if there are none.
            observer: is shown each message.
            catch_up: updates that clients have loaded; not changed. None for none. The new one is `self.update`.
            timed: clients whose bits are counted for each of them, too, in `bits_by_client`.
            is_unchanged: True if nothing has changed the model since the last broadcast.
            stands_for: clients for which each client stands.
        """
        self.context = context
        self.only_sum: OnlySum | None = None
        self.stands_for = stands_for
        self.num_lost = 0
        self.senders: set[int] = set()
        self.uplink = uplink
        self.downlink = downlink
        self._followers_have_it = is_unchanged and downlink.change_entry() is not None
        self.ledger = Ledger() if ledger is None else ledger
        self.client_memory = client_memory
        self.server_memory: State = dict(server_memory)
        self.received: Message = {}
        self.clients_with_mask: list[int] = []
        self.broadcast_bits = deepcopy(self.ledger.round_bits)
        self.gather = gather
        self.random = random
        self._mean = mean
        self.observer = observer
        self.catch_up = CatchUp() if catch_up is None else catch_up
        self.update: tuple[dict[str, int], Sequence[int]] | None = None
        self.bits_by_client = dict.fromkeys(timed, NO_BITS)
        self.broadcast_bits_by_client = dict(self.bits_by_client)
        self._pending: dict[int, State] = {}
        self._num_sent: Counter[tuple[Direction, int]] = Counter()

    @property
    def client_bits(self) -> dict[str, dict[str, int]]:
        """Bits sent after the broadcast, by direction and kind: those of this process's clients."""
        return self.ledger.since(self.broadcast_bits)

    def send_mask(self, clients: Sequence[int], mask: Tensor) -> None:
        """Send a pruning mask (d,) to clients that do not have it. Call it before `broadcast`, so that its bits count with it."""
        self.send_to_all(clients, {"mask/kept": mask})
        self.clients_with_mask = [*clients]

    def show_only(self, only_sum: OnlySum, clients: Sequence[int]) -> None:
        """Let the server see from now on only a sum of the clients' messages, on which these clients agree first."""
        self.only_sum, self.uplink = only_sum, only_sum.codec
        for direction, bits in zip(DIRECTIONS, only_sum.agreement_bits, strict=True):
            self.charge(direction, clients, {"keys": bits})

    def mean(self, uploads: Iterable[Upload]) -> Message:
        """Merge uploads of all processes with the algorithm's aggregator; every process must call it.

        Those that have sent them then agree on a further sum, if it is all that the server sees. {} if there are no uploads, or
        their sum is lost.
        """
        clients: list[int] = []

        def noted() -> Iterator[Upload]:
            for upload in uploads:
                clients.append(upload.result.client)
                yield upload

        merged, count = self._mean(noted())
        if self.only_sum is None:
            return merged
        if self.only_sum.is_lost(count):
            self.num_lost = count
            return {}
        self.show_only(self.only_sum.among(count), clients)
        return merged

    def broadcast(self, recipients: Sequence[int], message: Message, submodel: Submodel | None = None) -> Message:
        """Send one message, or a submodel of it, to every recipient; returns the decoded message.

        If the next broadcast builds on this one (`Traits.NEEDS_EVERY_CLIENT`), it goes to all clients of the federation, and its
        bits count for all, unless those that miss it load it later (`Traits.CATCHES_UP`). If it only has the server's change, and
        there is none since the last broadcast, it counts for nobody.
        """
        recipients = self.charged(recipients)
        num_copies = 0 if Traits.CATCHES_UP in self.downlink.traits or self._followers_have_it else len(recipients)
        memory, unpruned = self.server_memory, self.context.unpruned
        part = unpruned if submodel is None else submodel
        transfer = self._send(self._draw("down"), self.downlink, message, memory, part, num_copies, follow=True)
        self.received, self.server_memory = transfer.decoded, transfer.memory
        self._show(transfer, None, num_copies)
        if not is_finite(self.server_memory):  # which would spoil all later broadcasts
            self.server_memory = {}
            rank_zero_warn(
                f"The state of {type(self.downlink).__name__} after the broadcast of round {self.context.round + 1} is not "
                "finite, so the next broadcast is encoded like the first."
            )
        if Traits.CATCHES_UP in self.downlink.traits:
            self._charge_missed(recipients, [payload for _, payload in transfer.parts])
        elif num_copies:
            self._count("down", recipients, transfer.bits)
        self.broadcast_bits = deepcopy(self.ledger.round_bits)
        for client, (up, down) in self.bits_by_client.items():
            earlier = self.broadcast_bits_by_client[client]
            self.broadcast_bits_by_client[client] = earlier[0] + up, earlier[1] + down
        self.bits_by_client = dict.fromkeys(self.bits_by_client, NO_BITS)
        return self.received

    def charged(self, recipients: Sequence[int]) -> Sequence[int]:
        """Return the clients to which a broadcast to these recipients is charged."""
        traits = self.downlink.traits & (Traits.NEEDS_EVERY_CLIENT | Traits.CATCHES_UP)
        return self.context.everyone if traits == Traits.NEEDS_EVERY_CLIENT else recipients

    def _charge_missed(self, recipients: Sequence[int], payloads: Iterable[Payload]) -> None:
        """Count a broadcast for its recipients with the updates that they have missed; buffers are not updates."""
        update = Counter[str]()
        for name, packed in (entry for payload in payloads for entry in payload.items()):
            update[kind_of(name)] += packed.bits
        buffers = {"buffers": update.pop("buffers", 0) * len(recipients)}
        if self._followers_have_it:
            update.clear()
        whole = (self.context.unpruned or self.context).layout.numel * self.received["model"].element_size() * 8
        self.ledger.add({"down": buffers})
        self.ledger.add({"down": self.catch_up.bits(recipients, update, whole)})
        for client in recipients if self.bits_by_client else ():
            missed = sum(self.catch_up.bits([client], update, whole).values())
            self._count("down", [client], missed + buffers["buffers"] // len(recipients))
        self.update = dict(update), recipients

    def send_down(self, client: int, message: Message) -> Message:
        """Send a message to one client, through the downlink codec; returns what the client receives."""
        transfer = self._send(self._draw("down", client), self.downlink, message, {}, self.context.unpruned)
        self._count("down", [client], transfer.bits)
        self._show(transfer, client, 1)
        return transfer.decoded

    def send_to_all(self, clients: Sequence[int], message: Message) -> None:
        """Send the same message to each of some clients, uncompressed."""
        transfer = self._send(self._draw("down"), DENSE, message, {}, None, len(clients))
        self._count("down", clients, transfer.bits)

    def send_up(
        self, client: int, message: Message, submodel: Submodel | None = None, codec: Codec | None = None
    ) -> Message:
        """Send a client's message, or a submodel of it, to the server; returns what the server sees, 0 where nothing was sent.

        It goes through the uplink, or through `codec` if given. Where the server sees a sum alone, a client looks for numbers
        that are not finite itself, since they would spoil the sum, and then sends nothing.
        """
        if self.only_sum is not None and not is_finite(message):
            return message
        memory, codec, unpruned = self.memory(client, message), codec or self.uplink, self.context.unpruned
        if submodel is not None:
            submodel = submodel.intersect(unpruned, self.context.layout, self.context.buffer_layout)
        submodel = submodel or unpruned
        transfer = self._send(self._draw("up", client), codec, message, memory, submodel)
        self._count("up", [client], transfer.bits)
        if transfer.bits:
            self.senders.add(client)
        if self.observer.on_client_message is not None:
            sent = message if submodel is None else submodel.scatter(submodel.gather(message), {})
            coded = {name: entry for name, entry in sent.items() if codec.applies_to(name)}
            self.observer.on_client_message(
                UplinkMessage(
                    client,
                    coded,
                    transfer.decoded,
                    transfer.memory,
                    transfer.parts,
                    transfer.context,
                    self.context.groups,
                )
            )
        if transfer.memory:
            self._pending[client] = transfer.memory
        return transfer.decoded

    def charge(self, direction: Direction, clients: Sequence[int], bits: dict[str, int]) -> None:
        """Count bits by kind that each of some clients sends or receives beside its messages."""
        self.ledger.add({direction: {kind: count * len(clients) for kind, count in bits.items()}})
        self._count(direction, clients, sum(bits.values()))

    def _count(self, direction: Direction, clients: Sequence[int], bits: int) -> None:
        """Count the bits of a message for those of its clients that are timed."""
        for client in clients if self.bits_by_client else ():
            if client in self.bits_by_client:
                up, down = self.bits_by_client[client]
                self.bits_by_client[client] = (up + bits, down) if direction == "up" else (up, down + bits)

    def _show(self, transfer: Transfer, client: int | None, num_charged: int) -> None:
        """Show the observer what the downlink's codec has made; other codecs send no model."""
        if self.observer.on_server_message is not None:
            for codec, payload in transfer.parts:
                if codec is self.downlink:
                    message = DownlinkMessage(client, num_charged, codec, payload, transfer.context)
                    self.observer.on_server_message(message)

    def memory(self, client: int, message: Message) -> State:
        """Return the codec memory of a client, on the device of its message and not to be changed; {} at first."""
        if client in self._pending:
            return self._pending[client]
        device = next((entry.device for entry in message.values()), None)
        return {name: entry.to(device, non_blocking=True) for name, entry in self.client_memory.get(client, {}).items()}

    def _send(
        self,
        draw: Draw,
        codec: Codec,
        message: Message,
        memory: State,
        submodel: Submodel | None,
        recipients: int = 1,
        follow: bool = False,
    ) -> Transfer:
        """Encode, count and decode a message of the direction and to the party that `draw` has.

        Only the coordinates of the submodel are sent; all others arrive as 0. The memory stays as it is if the codec has
        nothing to encode. With `follow` the recipients must have received the earlier broadcasts.
        """
        direction: Direction = "up" if draw.direction == "up" else "down"
        shorter, receiver_memory, context = message, memory, self.context.drawing(draw)
        if submodel is not None:
            context, shorter, receiver_memory = (
                context.within(submodel),
                submodel.gather(message),
                submodel.gather(memory),
            )
        exact = {name: entry for name, entry in shorter.items() if not codec.applies_to(name)}
        coded = {name: entry for name, entry in shorter.items() if name not in exact}
        length = context.layout.numel
        for name, entry in coded.items():
            require(
                entry.shape == (length,) or codec.any_size or not codec.is_lossy_for(name),
                f"The entry {name!r} of a message has shape {tuple(entry.shape)}, but {type(codec).__name__} encodes vectors of "
                f"the model's size, ({length},): name other numbers scalars/….",
            )
        decoded: Message = {}
        new, parts = receiver_memory, list[tuple[Codec, Payload]]()
        for part, through in ((exact, DENSE), (coded, codec)):
            # A client with nothing to add must still help to remove the masks.
            if part or (self.only_sum is not None and through is self.uplink):
                payload, new = through.encode(part, receiver_memory, context)
                self.ledger.book(direction, payload, recipients)
                parts.append((through, payload))
                decoded |= (
                    through.decode_incremental(payload, receiver_memory, context)
                    if follow
                    else through.decode(payload, context)
                )
        new = new if coded else receiver_memory
        if submodel is not None:
            # A vector without sent coordinates is an expanded 0, which takes no storage.
            unsent = {
                name: entry.new_zeros(1).expand_as(entry) for name, entry in message.items() if name not in decoded
            }
            decoded, new = {**unsent, **submodel.scatter(decoded, {})}, submodel.scatter(new, memory)
        return Transfer(decoded, new, parts, context)

    def _draw(self, direction: Direction, client: int | None = None) -> Draw:
        """Return the source of the random draws of the next message."""
        party = self.context.everyone[-1] + 1 if client is None else client
        turn = self._num_sent[direction, party]
        self._num_sent[direction, party] += 1
        return Draw(self.context.draw.purpose, party, direction, turn)

    def commit(self, client: int) -> State:
        """Return a client's new codec memory, {} for none; called once the server has its upload."""
        return self._pending.pop(client, {})

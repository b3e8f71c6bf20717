"""Bits of secure aggregation, without its cryptography (Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving
Machine Learning, CCS 2017, doi:10.1145/3133956.3133982).

The server learns the sum Σ_k x_k over a round's clients, and no single x_k.

n clients of a round, m numbers in [0, 2^b) of each; all sums are whole numbers below 2^w, w = ⌈log2(n (2^b − 1) + 1)⌉

keys      client k: two public keys up, 2 a_K;  those of the others down, 2 (n − 1) a_K
shares    client k: shares of two secrets for the others up, and theirs down, 2 (n − 1) a_S each way
sums      client k: x_k + masks mod 2^w up, m w;  a share of one secret of each client up, n a_S, by which the masks go
dropout   a client that is lost after the shares;  with fewer than t = ⌈2n/3⌉ answers the sum is lost

So a client sends 2 a_K + (3n − 2) a_S + m w bits and receives 2 (n − 1) (a_K + a_S) besides the broadcast. The masks cancel,
and sums of whole numbers have no rounding error. So the server learns the same sum as without masks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Protocol

import torch
from annotated_types import Ge, Interval
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_fl.algorithms import Algorithm
from lightning_fl.algorithms.compatibility import asks_clients
from lightning_fl.checks import check_fields
from lightning_fl.clients.client_job import ClientJob
from lightning_fl.engine.engine import Engine
from lightning_fl.engine.population import Cohort, Population
from lightning_fl.engine.roles import Observer, Roles, Round
from lightning_fl.errors import UserError, require
from lightning_fl.exchanges.with_sample_count import SAMPLES
from lightning_fl.link.link import Link
from lightning_fl.outputs.losses import say_lost
from lightning_fl.slots import SENT, Codec, Message, Packed, Payload, Result, RoundContext, State, is_finite

WEIGHTS, UNMASKING = "scalars/weights", "keys/unmasking"
NOTHING = torch.zeros(0)


@dataclass(frozen=True)
class SecureAggregation:
    """Let the server see only sums over a round's clients: count the bits, and refuse methods that need more than sums.

    Attributes:
        key_bits: bits of a public key, a_K, at least 1.
        share_bits: bits of an encrypted share of a secret, a_S, at least 1.
        value_bits: bits of a number before the sum, b, in [1, 64]; the rounding to these bits is not simulated.
    """

    _called = "secure_aggregation.{}"
    key_bits: Annotated[int, Ge(1)] = 256
    share_bits: Annotated[int, Ge(1)] = 256
    value_bits: Annotated[int, Interval(ge=1, le=64)] = 16

    def __post_init__(self) -> None:
        check_fields(self)

    def width(self, num_clients: int) -> int:
        """Return the bits w of a masked number, enough for a sum over n clients.

        >>> [SecureAggregation().width(n) for n in (1, 10, 1024, 2**14)]
        [16, 20, 26, 30]
        """
        return (num_clients * (2**self.value_bits - 1)).bit_length()

    def threshold(self, num_clients: int) -> int:
        """Return the smallest number of answers for a sum over n clients, t ≥ 2; a sum over one client hides nothing.

        >>> [SecureAggregation().threshold(n) for n in (1, 2, 3, 4, 10)]
        [2, 2, 2, 3, 7]
        """
        return max(2, -(-2 * num_clients // 3))

    def agreement_bits(self, num_clients: int) -> tuple[int, int]:
        """Return the bits up and down of one of n clients for keys and shares, which is all that a dropout sends."""
        others = num_clients - 1
        return 2 * self.key_bits + 2 * others * self.share_bits, 2 * others * (self.key_bits + self.share_bits)

    def uplink_bits(self, num_clients: int, num_numbers: int) -> int:
        """Return all bits that one of n clients sends for a sum of m numbers.

        >>> SecureAggregation().uplink_bits(10, 61_706), SecureAggregation().uplink_bits(1024, 2**20)
        (1241800, 28049408)
        """
        agreement, _ = self.agreement_bits(num_clients)
        return agreement + num_clients * self.share_bits + num_numbers * self.width(num_clients)


@dataclass(frozen=True)
class SecureSum:
    """A sum over some clients of a round.

    Attributes:
        protocol: sizes of keys, shares and numbers.
        num_clients: clients that agree on keys for it, n.
        weighs_each: each number of a vector comes with a weight of its own, because clients send parts of the model.
    """

    protocol: SecureAggregation
    num_clients: int
    weighs_each: bool = False

    def among(self, num_clients: int) -> SecureSum:
        """Return a further sum, over other clients."""
        return replace(self, num_clients=num_clients)

    def is_lost(self, num_answers: int) -> bool:
        """True if too few clients answer to remove the masks."""
        return num_answers < self.protocol.threshold(self.num_clients)

    @property
    def codec(self) -> Masked:
        """Codec of a client's masked message."""
        return Masked(self)

    @property
    def agreement_bits(self) -> tuple[int, int]:
        """Bits up and down of one client for keys and shares."""
        return self.protocol.agreement_bits(self.num_clients)

    @property
    def number_bits(self) -> int:
        """Bits w of a masked number."""
        return self.protocol.width(self.num_clients)


@dataclass(frozen=True)
class Masked(Codec):
    """Masked message of a client in a secure sum: w bits per number; the simulation sends the numbers without masks.

    The message also has the client's weight, and its shares of secrets, by which the server removes the masks.

    Attributes:
        secure_sum: the sum.
    """

    secure_sum: SecureSum

    def applies_to(self, name: str) -> bool:
        """True, because a client sends only summands."""
        return True

    def encode(self, message: Message, memory: State, context: RoundContext) -> tuple[Payload, State]:
        """Return all numbers, a weight unless the message has it, or one for each number of a vector, and the shares."""
        protocol, n, width = self.secure_sum.protocol, self.secure_sum.num_clients, self.secure_sum.number_bits
        payload = {name: Packed(entry, width * entry.numel()) for name, entry in message.items()}
        num_weights = int(SAMPLES not in message)
        if self.secure_sum.weighs_each:
            num_weights += sum(entry.numel() for entry in message.values())
        payload[WEIGHTS] = Packed(NOTHING, width * num_weights)
        payload[UNMASKING] = Packed(NOTHING, n * protocol.share_bits)
        return payload, {}

    def decode(self, payload: Payload, context: RoundContext) -> Message:
        """Return the numbers."""
        return {name: packed.content for name, packed in payload.items() if name not in (WEIGHTS, UNMASKING)}


class SumsOfClients(Observer):
    """Let the server see only sums over a round's clients."""

    def __init__(self, protocol: SecureAggregation, adds_noise: bool) -> None:
        """Create the observer of a run that has warned of no lost sum yet.

        Args:
            protocol: sizes of keys, shares and numbers.
            adds_noise: True if the server adds noise to the sum, also to a lost one.
        """
        self._protocol, self._adds_noise = protocol, adds_noise
        self._says_lost = False

    def around(self, roles: Roles, engine: Engine) -> Roles:
        """Return the roles of a round with masked messages; clients that will not use their parts are in no sum."""
        method = engine.algorithm
        in_parts = SENT in method.exchange.provides & method.aggregator.uses

        def broadcast(link: Link, cohort: Cohort) -> ClientJob:
            link.show_only(SecureSum(self._protocol, len(cohort.selected), weighs_each=in_parts), cohort.selected)
            return roles.broadcast(link, cohort)

        return replace(
            roles.watched_by(self),
            broadcast=broadcast,
            train=lambda job, clients: map(_out_of_the_sum_if_lost, roles.train(job, clients)),
        )

    def asked(self, client: int) -> None:
        """Raise `UserError`, because the answer of one client is no sum."""
        raise UserError(
            "trainer.secure_aggregation lets the server see only sums over clients, and a callback asks one client: leave one of "
            "them out."
        )

    def end_round(self, finished: Round) -> dict[str, float]:
        """Return how many uploads are lost; say once that too few clients answered for a sum."""
        outcome, secure_sum = finished.outcome, finished.link.only_sum
        if outcome.num_lost and isinstance(secure_sum, SecureSum) and not self._says_lost:
            self._says_lost, n = True, secure_sum.num_clients
            change = "only noise changed the model" if self._adds_noise else "the model did not change"
            needed = self._protocol.threshold(n)
            why = f"{outcome.num_lost} of {n} clients answered, and a secure sum over {n} needs {needed}"
            if outcome.num_lost >= needed:
                why = f"only one of {n} clients sent its update, and a sum over one is its upload"
            say_lost(f"Round {finished.number}: {why}, so it is lost and {change}.")
        return {"clients/lost": outcome.num_lost}


def _out_of_the_sum_if_lost(result: Result) -> Result:
    """Return a result, with NaN as its message if its client will not keep its part of the round: it must not be in a sum."""
    if not is_finite(result.owned, result.state):
        result.message = {name: torch.full_like(entry, torch.nan) for name, entry in result.message.items()}
    return result


class Flags(Protocol):
    """Attributes of a trainer that decide whether sums over clients suffice."""

    algorithm: Algorithm
    loss_guard: Any
    selection: Any
    over_selection: float | None

    @property
    def given_callbacks(self) -> Any: ...


def check_sums(trainer: Flags, protocol: SecureAggregation, population: Population, has_server_samples: bool) -> None:
    """Raise `UserError` if sums over the clients of a round do not suffice, are over one client alone, or are all lost."""
    method, flag, cohort_size = trainer.algorithm, "trainer.secure_aggregation", population.cohort_size
    readers = method.readers_of_single_clients(has_server_samples)
    readers += [
        ("callbacks", type(each).__name__) for each in trainer.given_callbacks if asks_clients(each, has_server_samples)
    ]
    parts = ", ".join(f"{slot} ({name})" for slot, name in dict.fromkeys(readers))
    limit = f"{flag} lets the server see only sums over a round's clients, but"
    require(
        not readers,
        f"{limit} single ones are read in {method.name}'s {parts}: use other parts, or a method that is sum-only in "
        f"`lightning-fl list`{method.sums_to_declare()}.",
    )
    require(
        trainer.loss_guard.clients is None,
        f"{limit} loss_guard.clients reads the loss of each: leave one of them out.",
    )
    require(
        trainer.selection is None or trainer.selection.sums_suffice,
        f"{limit} trainer.selection {type(trainer.selection).__name__} reads something of each: use another selection, such as "
        "ByNorm with approximate.",
    )
    require(
        method.trains_in_rounds,
        f"{flag} is about rounds, in none of which clients of {method!r} take part: leave it out.",
    )
    senders = method.exchange.num_senders(cohort_size)
    who = f"{method.name}'s n" if senders < cohort_size else "clients_per_round"
    require(senders > 1, f"{flag} needs at least 2 clients in a sum, as a sum over one is its upload, but {who} is 1.")
    selected = population.num_selected
    needed = protocol.threshold(selected)
    require(
        needed <= cohort_size or population.availability is not None,  # fewer may be there
        f"trainer.over_selection {trainer.over_selection} selects {selected} clients, and a sum over {selected} needs {needed} "
        f"answers, but a round closes after {cohort_size}, so that {flag} would lose every sum: use an over_selection of "
        f"{100 * (3 * cohort_size // 2) // cohort_size / 100:g} or less.",
    )
    if method.setup_reads_clients:
        rank_zero_info(
            f"{flag} is about the rounds: before the first, {method.name}'s clients send what the server reads one by one."
        )

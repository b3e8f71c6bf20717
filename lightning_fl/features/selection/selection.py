"""Interface of selections: which clients are asked in a round, and which of them train or send."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Flag, auto

import numpy as np

from lightning_fl.checks import Checked
from lightning_fl.errors import UserError, require

NUMBER_BITS = 32
"""Bits of a loss, a norm or a probability."""


class Reads(Flag):
    """Facts about clients that a selection reads, and what the round is charged for them."""

    NOTHING = 0
    SIZES = auto()
    """Numbers of samples n_k, which the server knows: free."""
    SECONDS = auto()
    """Seconds that a clock of clients expects of each: free."""
    LAST_LOSSES = auto()
    """Mean training loss of a client's last pass in the last round in which it trained: free, as it comes with the upload."""
    LOSSES = auto()
    """Loss at the round's model on all samples of each client that is drawn: the broadcast down, 32 bits up, a forward pass.

    With several models (IFCA) it is the smallest of their losses, with a pass for each."""
    NORMS = auto()
    """Length of each client's update, of which some are not sent then: 32 bits up, and the answer down."""


@dataclass(frozen=True)
class SelectionTurn:
    """Facts about a round that a selection may read when it draws the clients.

    Attributes:
        selection: the selection, which has declared what it reads.
        round: index of the round, from 0.
        clients: indices of the clients with samples that are there, ascending, int64.
        num_clients: clients to select, K; more with over_selection.
        random: returns the random stream of this round, or of the round with another index; each call begins it anew.
    """

    selection: ClientSelection
    round: int
    clients: np.ndarray
    num_clients: int
    random: Callable[..., np.random.Generator]
    _sizes: np.ndarray
    _last_losses: Mapping[int, float]
    _seconds: Callable[[Sequence[int]], Mapping[int, float]]

    @property
    def sizes(self) -> np.ndarray:
        """Number of samples of each client of the federation (N,); for `Reads.SIZES`."""
        self._require(Reads.SIZES)
        return self._sizes

    @property
    def last_losses(self) -> Mapping[int, float]:
        """Last training loss of each client that has trained, also one that is not finite; for `Reads.LAST_LOSSES`."""
        self._require(Reads.LAST_LOSSES)
        return self._last_losses

    def seconds(self, clients: Sequence[int]) -> Mapping[int, float]:
        """Return the seconds that clients are expected to need for the round; for `Reads.SECONDS`."""
        self._require(Reads.SECONDS)
        return self._seconds(clients)

    def _require(self, what: Reads) -> None:
        name = type(self.selection).__name__
        require(
            what in self.selection.reads, f"{name} reads what it does not declare: add Reads.{what.name} to its reads."
        )


class ClientSelection(Checked, ABC):
    """Decides which clients take part in a round; a subclass is a frozen dataclass.

    The server draws clients and sends them the model. If the selection reads `LOSSES`, they answer with theirs, and those that
    it chooses train. If it reads `NORMS`, all of them train, and some send their update. All draws are functions of seed and
    round.
    """

    reads: Reads = Reads.NOTHING
    """Facts about clients that it reads; a fact that is not declared is refused."""
    is_unbiased = False
    """True if the mean of the uploads is, over the draws, that of all clients weighted by their samples, whoever they are."""
    counts_alike = False
    """True if the mean gives equal weights to the clients that are drawn, whatever their numbers of samples."""
    needs_everyone = False
    """True if all clients must always be there."""

    @property
    def loss_samples(self) -> int | None:
        """Samples on which a client computes its loss, drawn anew in each round; None for all. For `Reads.LOSSES`."""
        return None

    @property
    def repeats(self) -> bool:
        """True if `draw` may return a client several times, which then trains once and counts as often."""
        return False

    @property
    def reweighs(self) -> bool:
        """True if uploads count by other weights than those of the method's aggregator."""
        return self.repeats or self.counts_alike or Reads.NORMS in self.reads

    @property
    def sums_suffice(self) -> bool:
        """True if the server needs no more of a round's clients than sums over them."""
        return not self.reads & (Reads.LAST_LOSSES | Reads.LOSSES | Reads.NORMS)

    @property
    def reads_sizes(self) -> bool:
        """True if it reads numbers of samples, which are not public in every run."""
        return Reads.SIZES in self.reads

    @property
    def tells_of_samples(self) -> str:
        """Names of the facts that it reads and that depend on clients' samples besides their uploads; empty without any."""
        words = {Reads.LOSSES | Reads.LAST_LOSSES: "losses", Reads.SECONDS: "seconds"}
        return " and ".join(word for facts, word in words.items() if facts & self.reads)

    def check(self, num_clients: int, num_eligible: int) -> None:
        """Raise `UserError` if the selection does not fit the federation.

        Args:
            num_clients: clients to select, K; more with over_selection.
            num_eligible: clients with samples, N.
        """

    def num_training(self, num_clients: int) -> int:
        """Return the number of clients that train in a round in which K are to send their update."""
        return num_clients

    @abstractmethod
    def draw(self, turn: SelectionTurn) -> Sequence[int]:
        """Return the clients to which the round's model is sent, in an order that decides ties."""

    def choose(self, losses: Mapping[int, float], num_clients: int) -> Sequence[int]:
        """Return the clients that train, of those that were drawn and answer; for `Reads.LOSSES`.

        Args:
            losses: loss of each at the round's model, in the order of the draw; it may be not finite.
            num_clients: clients to choose, K.
        """
        raise UserError(
            f"{type(self).__name__} reads losses, so its class needs the method choose(losses, num_clients)."
        )

    def answers(self, norms: Mapping[int, float], num_clients: int) -> Sequence[tuple[int, int]]:
        """Return how many numbers each client sends and receives in each turn between its norm and its update.

        By default one turn, in which the server tells each client its probability.
        """
        return [(0, 1)]

    def probabilities(self, norms: Mapping[int, float], num_clients: int) -> Mapping[int, float]:
        """Return the probability with which each client sends its update; for `Reads.NORMS`.

        Args:
            norms: w_k ‖Δ_k‖ of each client, finite and at least 0.
            num_clients: clients that are to send, on average, K.
        """
        raise UserError(
            f"{type(self).__name__} reads norms, so its class needs the method probabilities(norms, num_clients)."
        )

    def most_probable(self, norms: Mapping[int, float], num_clients: int) -> Mapping[int, float]:
        """Return the largest probability that each client may get, whatever further clients report; by default 1.

        Deltas that will not be sent are dropped before all clients have trained.
        """
        return dict.fromkeys(norms, 1.0)


def check_candidates(selection: ClientSelection, candidates: int, num_clients: int, num_eligible: int) -> None:
    """Raise `UserError` unless K ≤ candidates ≤ N."""
    require(
        num_clients <= candidates <= num_eligible,
        f"{type(selection).__name__} draws {candidates} candidates of the {num_eligible} clients with samples, and selects "
        f"{num_clients} of them: give candidates in [{num_clients}, {num_eligible}].",
    )


def largest(losses: Mapping[int, float], num_clients: int) -> list[int]:
    """Return the clients with the largest losses, in the order of the losses; ties go to earlier ones, not finite ones come last.

    >>> largest({4: 1.0, 7: float("nan"), 2: 3.0, 9: 3.0}, 2), largest({4: 1.0, 7: float("inf")}, 2)
    ([2, 9], [4, 7])
    """
    ranked = sorted(losses, key=lambda client: -losses[client] if np.isfinite(losses[client]) else np.inf)
    chosen = set(ranked[:num_clients])
    return [client for client in losses if client in chosen]


def by_size(turn: SelectionTurn, count: int, repeats: bool = False) -> list[int]:
    """Draw clients with probabilities in proportion to their numbers of samples, one after the other; all if fewer are there."""
    sizes = turn.sizes[turn.clients]
    count = count if repeats else min(count, len(sizes))
    return turn.random().choice(turn.clients, count, replace=repeats, p=sizes / sizes.sum()).tolist()


def uniformly(turn: SelectionTurn, count: int) -> list[int]:
    """Draw clients uniformly without replacement; all if fewer are there."""
    return turn.random().choice(turn.clients, min(count, len(turn.clients)), replace=False).tolist()

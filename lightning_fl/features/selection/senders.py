"""The end of a round in which clients report the length of their update before some of them send it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite, nan

import torch

from lightning_fl.engine.engine import Engine
from lightning_fl.engine.roles import Collect, Observer, Round
from lightning_fl.features.selection.selection import NUMBER_BITS, ClientSelection
from lightning_fl.link.link import Link
from lightning_fl.slots import Result, Upload, is_finite
from lightning_fl.state.run_state import SELECTION

NORM, SUMMANDS = "scalars/norm", "scalars/summands"
ROUNDING = 1e-9
"""Share by which a largest probability may be too small, by rounding."""


@dataclass
class Senders(Observer):
    """Lets each client of a round send its update or not, by its own coin.

    Deltas are kept until all clients have reported, except those of clients that will not send, whatever others report. A client
    whose numbers are not finite sends, and is rejected. One that does not send keeps the state that it had, and counts as
    accepted. If one alone sends in a secure sum, the sum is lost, as it would be this upload.

    Attributes:
        selection: says with which probability each client sends.
        num_senders: clients that are to send, on average, K.
        engine: engine of the run.
        weighs_equally: clients count alike in the mean, so that norms have no weights.
        inner: lets clients send.
        factors: 1/p_k of each client that sends, if the selection is unbiased.
    """

    selection: ClientSelection
    num_senders: int
    engine: Engine
    weighs_equally: bool
    inner: Collect
    factors: dict[int, float] = field(default_factory=dict, init=False)
    _num_sending: int = field(default=0, init=False)

    def collect(self, results: Iterable[Result], link: Link) -> Iterator[Upload]:
        """Let clients report, draw those that send, and yield the uploads; every process must exhaust this."""
        waiting: dict[int, Result] = {}
        norms: dict[int, float] = {}
        coins: dict[int, float] = {}
        undecided: dict[int, float] = {}
        most_undecided = self.num_senders
        self.factors.clear()
        for result in results:
            client, norm = result.client, self._report(result, link)
            waiting[client] = result
            del result  # so that a delta that is dropped is gone
            if isfinite(norm):
                norms[client] = norm
                coins[client] = undecided[client] = self.engine.run.random(SELECTION, client).random()
            if len(undecided) > most_undecided:
                for beaten in self._beaten(norms, undecided):
                    del undecided[beaten]
                    waiting[beaten] = _without_update(waiting[beaten])
                most_undecided = max(self.num_senders, int(1.1 * len(undecided)))  # fewer looks than clients
        everyone = link.gather(norms)
        num_answers = len(everyone) * link.stands_for
        self._num_sending = 0
        if link.only_sum is not None and link.only_sum.is_lost(num_answers):
            link.num_lost = num_answers
            return
        self._answer(link, list(norms), everyone)
        probabilities = self.selection.probabilities(everyone, self.num_senders)
        sending = {k for k, coin in link.gather(coins).items() if coin < probabilities[k]}
        self._num_sending = len(sending)
        if link.only_sum is not None and len(sending) * link.stands_for == 1:  # the sum would be its upload
            link.num_lost = num_answers
        if self.selection.is_unbiased:
            self.factors.update({client: 1 / probabilities[client] for client in sending})
        for client in [k for k in norms if k not in sending]:
            if link.only_sum is not None:
                link.send_up(client, {})  # its shares of secrets, by which masks go
            yield Upload(_without_update(waiting.pop(client)), {})
        yield from self.inner((waiting.pop(client) for client in list(waiting)), link)

    def _report(self, result: Result, link: Link) -> float:
        """Let a client report its norm w_k ‖Δ_k‖; returns it as the server sees it."""
        weight = 1.0 if self.weighs_equally else result.weight
        norm = weight * float(torch.linalg.vector_norm(result.message["model"], dtype=torch.float64))
        norm = norm if is_finite(result.message) else nan
        return float(link.send_up(result.client, {NORM: torch.tensor([norm], dtype=torch.float32)})[NORM])

    def _beaten(self, norms: Mapping[int, float], coins: Mapping[int, float]) -> list[int]:
        """Return those of some clients that will not send, whatever further clients report."""
        most = self.selection.most_probable(norms, self.num_senders)
        return [client for client, coin in coins.items() if coin >= most[client] * (1 + ROUNDING)]

    def _answer(self, link: Link, mine: list[int], everyone: Mapping[int, float]) -> None:
        """Take the turns between the norms and the updates; where the server sees sums alone, each is a sum of its own.

        Args:
            link: link of the round.
            mine: clients of this process that have reported.
            everyone: norms of the clients of all processes.
        """
        num_answers = len(everyone) * link.stands_for
        for num_up, num_down in self.selection.answers(everyone, self.num_senders):
            if num_up:
                _agree_again(link, mine, num_answers)
                for client in mine:
                    link.send_up(client, {SUMMANDS: torch.zeros(num_up, dtype=torch.float32)})
            link.charge("down", mine, {"scalars": num_down * NUMBER_BITS})
        _agree_again(link, mine, num_answers)

    def end_round(self, finished: Round) -> dict[str, float]:
        """Return how many clients have sent their update."""
        return {"clients/sending": self._num_sending}


def _agree_again(link: Link, clients: list[int], num_clients: int) -> None:
    """Let clients agree on one more sum, over so many of them, if the server sees sums alone."""
    if link.only_sum is not None:
        link.show_only(link.only_sum.among(num_clients), clients)


def _without_update(result: Result) -> Result:
    """Return the result of a client that sends nothing, of which the server accepts nothing."""
    return replace(result, message={}, state={})

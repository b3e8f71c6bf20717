"""The selection of a run: it draws the clients of each round, asks them, and lets some of them train or send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lightning_fl.clients.client_job import ClientJob
from lightning_fl.engine.engine import Engine
from lightning_fl.engine.population import Cohort
from lightning_fl.engine.roles import Observer, Roles, Round
from lightning_fl.errors import require
from lightning_fl.features.selection.client_losses import client_losses, received_models
from lightning_fl.features.selection.reweighted_mean import ReweightedMean
from lightning_fl.features.selection.selection import NUMBER_BITS, ClientSelection, Reads, SelectionTurn
from lightning_fl.features.selection.senders import Senders
from lightning_fl.link.link import Link
from lightning_fl.processes import gather_objects
from lightning_fl.slots import Aggregator, Result, RoundContext
from lightning_fl.state.run_state import COHORT, Run

STATE, LOSSES = "selection", "losses"
"""Name of the state in a run, and in it: the last training loss of each client that has trained."""

Seconds = Callable[[Sequence[int], Engine], Mapping[int, float]]
"""Returns the seconds that clients are expected to need for the present round."""


@dataclass(frozen=True)
class Selecting:
    """Lets a selection decide which clients take part in the rounds of a run.

    Attributes:
        selection: the selection.
        num_clients: clients of a round that send their update, K.
        seconds: seconds of clients; asked for only if the selection reads them.
    """

    selection: ClientSelection
    num_clients: int
    seconds: Seconds

    def around(self, roles: Roles, engine: Engine) -> Roles:
        """Return the roles of a round whose clients the selection decides."""
        selection, sampler = self.selection, SelectedClients(self.selection, engine, self.seconds)
        roles = replace(roles, sample=sampler)
        if Reads.LOSSES in selection.reads:
            asking = Asking(sampler, engine)
            inner_broadcast = roles.broadcast
            roles = replace(
                roles.watched_by(asking), broadcast=lambda link, cohort: asking.broadcast(inner_broadcast, link, cohort)
            )
        if Reads.LAST_LOSSES in selection.reads:
            noting = LastLosses(engine)
            inner_train = roles.train
            roles = replace(
                roles.watched_by(noting), train=lambda job, clients: map(noting.note, inner_train(job, clients))
            )
        return self._reweighed(roles, engine, sampler)

    def _reweighed(self, roles: Roles, engine: Engine, sampler: SelectedClients) -> Roles:
        """Return roles in which uploads count by the weights of the selection."""
        selection, inner, device = self.selection, roles.aggregator, engine.run.params.device
        if Reads.NORMS in selection.reads:
            alike = engine.algorithm.aggregator.weighs_equally("model")
            senders = Senders(selection, self.num_clients, engine, alike, roles.collect)

            def mean_of_senders(context: RoundContext) -> Aggregator:
                return ReweightedMean(inner(context), senders.factors, device, of_all=selection.is_unbiased)

            return replace(roles.watched_by(senders), collect=senders.collect, aggregator=mean_of_senders)
        if not selection.reweighs:
            return roles

        def mean_of_draws(context: RoundContext) -> Aggregator:
            times = Counter(sampler.drawn(engine.run)[1])
            return ReweightedMean(inner(context), times, device, selection.counts_alike)

        return replace(roles, aggregator=mean_of_draws)


@dataclass(frozen=True)
class SelectedClients:
    """Sampler of the clients that a selection decides on.

    Attributes:
        selection: the selection.
        engine: engine of the run.
        seconds: seconds of clients.
    """

    selection: ClientSelection
    engine: Engine
    seconds: Seconds

    def drawn(self, run: Run) -> tuple[float, list[int]]:
        """Return the simulated second at which the present round begins, and the clients that are drawn, perhaps repeatedly."""
        population = self.engine.population
        begin, there = population.there(run)
        turn = SelectionTurn(
            self.selection,
            run.round,
            there,
            population.num_selected,
            lambda index=None: run.random(COHORT, in_round=index),
            population.sizes,
            run.features.get(STATE, {}).get(LOSSES, {}),
            lambda clients: self.seconds(clients, self.engine),
        )
        drawn = [int(client) for client in self.selection.draw(turn)]
        name, unknown = type(self.selection).__name__, sorted({*drawn}.difference(there.tolist()))
        require(not unknown, f"{name} draws clients that are not among those of its turn, such as {unknown[:1]}.")
        require(
            self.selection.repeats or len({*drawn}) == len(drawn),
            f"{name} draws a client twice in a round: draw without replacement, or let repeats return True in its class.",
        )
        return begin, drawn

    def select(self, run: Run) -> list[int]:
        """Return the clients that receive the broadcast."""
        return list(dict.fromkeys(self.drawn(run)[1]))

    def asks(self, selected: Sequence[int]) -> bool:
        """True if clients that receive the broadcast are asked for their loss: there is a choice to make."""
        return Reads.LOSSES in self.selection.reads and len(selected) > self.engine.population.num_selected

    def cohort(self, run: Run) -> Cohort:
        """Return the clients of the round, of which those that are asked know the model."""
        engine, population = self.engine, self.engine.population
        begin, drawn = self.drawn(run)
        selected = list(dict.fromkeys(drawn))
        cohort = population.cohort_of(run, selected, begin)
        if not self.asks(selected):
            return cohort
        _, job = engine.dry_broadcast(selected)
        models, num_samples = received_models(job.received), {k: self._num_samples(k) for k in cohort.answering}
        losses = client_losses(engine, num_samples, models, job.received["buffers"])
        chosen = set(self.selection.choose(losses, population.num_selected))
        require(
            chosen <= losses.keys(),
            f"{type(self.selection).__name__} chooses clients that have not told their loss: choose among the keys of losses.",
        )
        answering = [client for client in cohort.answering if client in chosen]
        asked = {k: len(models) * count for k, count in num_samples.items()}
        return replace(cohort, answering=answering, mine=population.mine(answering), asked=asked)

    def _num_samples(self, client: int) -> int:
        """Return the number of samples on which a client computes its loss."""
        size, most = int(self.engine.data.client_sizes[client]), self.selection.loss_samples
        return size if most is None else min(size, most)


@dataclass(frozen=True)
class Asking(Observer):
    """Charges clients for the losses that they are asked for.

    Attributes:
        sampler: says who is asked.
        engine: engine of the run.
    """

    sampler: SelectedClients
    engine: Engine

    def broadcast(self, inner: Callable[[Link, Cohort], ClientJob], link: Link, cohort: Cohort) -> ClientJob:
        """Send the model, and count a number up of each client that is asked."""
        if self.sampler.asks(cohort.selected):
            asked = self.engine.population.answering(self.engine.run, cohort.selected)
            link.charge("up", asked, {"scalars": NUMBER_BITS})
        return inner(link, cohort)

    def end_round(self, finished: Round) -> dict[str, float]:
        """Return how many clients have been asked, and on how many samples they have computed their loss."""
        asked = finished.cohort.asked
        return {"clients/asked": len(asked), "clients/asked_samples": sum(asked.values())}


@dataclass(frozen=True)
class LastLosses(Observer):
    """Keeps the last training loss of each client in the run.

    Attributes:
        engine: engine of the run.
    """

    engine: Engine
    _mine: dict[int, float] = field(default_factory=dict, init=False)

    def note(self, result: Result) -> Result:
        """See the result of a client of this process."""
        if result.last_loss is not None:
            self._mine[result.client] = result.last_loss
        return result

    def end_round(self, finished: Round) -> dict[str, float]:
        """Keep the losses of the round's clients, of all processes."""
        run, parts = finished.run, gather_objects(self.engine.flat_module.fabric, dict(self._mine))
        self._mine.clear()
        known = dict(run.features.get(STATE, {}).get(LOSSES, {}))
        for part in parts:
            known |= part
        run.features[STATE] = {LOSSES: known}
        return {}

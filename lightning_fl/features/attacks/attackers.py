"""The attackers of a round: they train on poisoned samples, and their results are replaced before they are sent.

An attacker without knowledge sends at once. An attacker that knows the honest uploads waits for them: they pass on to the
exchange as they come, while their sums are kept, or the uploads themselves if the attack needs them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_fl.algorithms import Algorithm
from lightning_fl.clients.client_job import ClientJob
from lightning_fl.data import FederatedDataModule, Selection
from lightning_fl.engine.engine import Engine
from lightning_fl.engine.roles import Observer, Roles, Round
from lightning_fl.errors import require
from lightning_fl.exchanges import OneShot
from lightning_fl.exchanges.layer_choice import LayerChoice
from lightning_fl.features.attacks import Adversary, AttackContext, Honest, LabelFlip
from lightning_fl.features.attacks.attack import is_forged
from lightning_fl.features.attacks.batches import PoisonedSelection, labelled
from lightning_fl.processes import gather_objects, share_states, summed
from lightning_fl.slots import SENT, Draw, Exchange, Message, Result, State, is_finite
from lightning_fl.state.run_state import ATTACK, Run

COUNT, COUNTS, SUM, SQUARES = "count", "counts/", "sum/", "squares/"
ATTACKERS = "attackers"
"""Name of the state in a run: model (d,) and buffers (d_b,) of the last round, which some attacks read."""
Factor = float | Tensor
"""Factor of an upload's vector, or of each of its numbers."""
MOST_LISTED = 20
"""Attackers that the log names."""


@dataclass(frozen=True)
class Attackers(Observer):
    """Lets clients of a run attack.

    Attributes:
        adversary: who attacks, how, and when.
        data: the clients' samples.
        fabric: Fabric of the processes.
        weigh: returns the weights in the mean of an entry, by its name, of clients with so many samples, and what divides it.
        exchange: exchange of the method.
    """

    adversary: Adversary
    data: FederatedDataModule
    fabric: Fabric
    weigh: Callable[[str, np.ndarray], tuple[np.ndarray, float]]
    exchange: Exchange = field(default_factory=OneShot)

    def around(self, roles: Roles, engine: Engine) -> Roles:
        """Return the roles of a round in which attackers train on poisoned samples, and send what the attack makes of it."""

        def train(job: ClientJob, clients: Sequence[int]) -> Iterator[Result]:
            if job.data is None:  # a rehearsal of the messages, in which nobody trains
                return roles.train(job, clients)
            attacking = self.among(job.run, job.selected)
            poisoned = replace(job, data=self.poisoned_data(attacking))
            return self.attacked(roles.train(poisoned, clients), job, attacking)

        return replace(roles.watched_by(self), train=train)

    def trained(self, job: ClientJob) -> None:
        """Keep the model that clients have received, for attacks that compare it with the next one."""
        if self.adversary.attack.remembers:
            job.run.features[ATTACKERS] = {name: job.received[name] for name in ("model", "buffers")}

    def end_round(self, finished: Round) -> dict[str, float]:
        """Return how many clients attacked."""
        return {"attack/attackers": finished.outcome.num_attackers}

    def among(self, run: Run, cohort: Sequence[int]) -> frozenset[int]:
        """Return the clients that attack in the run's present round, of which `cohort` are selected."""
        if run.round < self.adversary.start:
            return frozenset()
        if self.adversary.per_round:
            return self.adversary.clients_of(cohort, run.random(ATTACK))
        return self._listed_or_drawn(run.as_of(0).random(ATTACK))

    def _listed_or_drawn(self, random: np.random.Generator) -> frozenset[int]:
        """Return the clients that attack in all rounds; a share is drawn from those that have samples."""
        if isinstance(self.adversary.attackers, list | tuple):
            return self.adversary.clients(self.data.num_clients, random)
        eligible = np.flatnonzero(self.data.client_sizes)
        drawn = self.adversary.clients(len(eligible), random)
        return frozenset(int(eligible[place]) for place in drawn)

    def poisoned_data(self, attackers: frozenset[int]) -> FederatedDataModule:
        """Return the clients' samples as they train on them."""
        if not self.adversary.attack.poisons or not attackers:
            return self.data

        def read(client: int, selection: Selection) -> Selection:
            return PoisonedSelection(selection, self._poison) if client in attackers else selection

        return self.data.read_through(read)

    @property
    def _poison(self) -> Callable[[Any], Any]:
        return partial(self.adversary.attack.poisoned, num_classes=self.data.num_classes or 0)

    def check(self, algorithm: Algorithm, run: Run, cohort_size: int) -> None:
        """Say who attacks.

        Args:
            algorithm: method of the run.
            run: the run, before its first round.
            cohort_size: clients of a round, K.

        Raises:
            UserError: the attack does not fit the method or the data.
        """
        adversary, name = self.adversary, type(self.adversary.attack).__name__
        require(
            algorithm.trains_in_rounds and algorithm.exchange.uses_link,
            f"trainer.adversary lets clients attack what they send in rounds, and those of {algorithm.name} send nothing.",
        )
        require(
            adversary.attack.knows != "uploads" or not algorithm.exchange.cuts,
            f"{name} compares whole uploads, and clients of {algorithm.name} send parts of the model: use another attack, such "
            "as ALIE or IPM.",
        )
        sender = algorithm.exchange.sender
        require(
            not adversary.attack.replaces
            or SENT not in sender.provides
            or sender.cuts
            or isinstance(sender, LayerChoice),
            f"{name} with replace needs the weights of the clients that send each number, and those of {algorithm.name} choose "
            "their numbers after the training: use scale.",
        )
        waits = algorithm.pace is None
        require(
            waits or not (adversary.per_round or adversary.attack.needs_rounds),
            f"{algorithm.name} does not wait for the clients of a round, which "
            f"{'trainer.adversary.per_round' if adversary.per_round else name} needs: use a method that does, or another attack.",
        )
        everyone = self._listed_or_drawn(run.random(ATTACK, in_round=0))
        sizes, num_attackers = self.data.client_sizes, self.adversary.count(cohort_size)
        if not adversary.per_round:
            active = [client for client in everyone if sizes[client]]
            num_attackers = round(len(active) * cohort_size / np.count_nonzero(sizes))
            if len(active) < len(everyone):
                idle = _listed(sorted(everyone.difference(active)))
                rank_zero_warn(f"trainer.adversary: without samples, and so in no round, {idle} cannot attack.")
        if not (num_attackers if adversary.per_round else everyone):
            of = f"{cohort_size} clients of a round" if adversary.per_round else f"{np.count_nonzero(sizes)} clients"
            rank_zero_warn(f"trainer.adversary has no attackers: {adversary.attackers} of {of} is less than one.")
            return
        adversary.attack.check(cohort_size, num_attackers)
        if adversary.attack.poisons:
            self._try_poison(everyone)
        who = f"{num_attackers} clients of each round" if adversary.per_round else _listed(sorted(everyone))
        rank_zero_info(f"Attack {name} from round {adversary.start + 1} on: {who}.")

    def _try_poison(self, attackers: frozenset[int]) -> None:
        """Raise `UserError` if the attack cannot change the data's batches."""
        sizes, name = self.data.client_sizes, type(self.adversary.attack).__name__
        require(self.data.has_classes, f"{name} changes classes, which {type(self.data).__name__} does not have.")
        client = next((k for k in sorted(attackers) if sizes[k]), int(sizes.argmax()))
        samples = list(islice(self.data.client(client).batches(1), self.data.batch_size))
        if isinstance(self.adversary.attack, LabelFlip):
            assert self.data.train.labels is not None
            classes = self.data.train.labels[self.data.client_indices[client][: len(samples)]]
            for sample, number in zip(samples, classes.tolist(), strict=True):
                for label in labelled(sample, name)[1].tolist():
                    require(
                        label == number,
                        f"{name} changes the second part of each batch, but the classes are other numbers, such as {number} "
                        f"where it has {label}: let class_of of Federated name the second part.",
                    )
        self._poison(samples[0])

    def attacked(self, results: Iterator[Result], job: ClientJob, attackers: frozenset[int]) -> Iterator[Result]:
        """Yield the results of this process, those of attackers as they send them; every process must exhaust this.

        Args:
            results: results of the clients that this process trains.
            job: what they do.
            attackers: the clients that attack.
        """
        attack = self.adversary.attack
        waiting: list[Result] = []
        forged = partial(self._forged, job, attackers, {})
        known = HonestStatistics(keeps=attack.knows == "uploads", in_parts=bool(job.smaller))
        for result in results:
            is_attacker = result.client in attackers
            result.attacking = float(is_attacker)
            if attack.knows == "nothing" or not attackers:
                yield forged(result) if is_attacker else result
            elif is_attacker:
                waiting.append(result)
            else:
                known.add(result)
                yield result
        if attack.knows == "nothing" or not attackers:
            return
        honest = known.of_all(self.fabric)
        num_attackers = sum(gather_objects(self.fabric, len(waiting)))
        num_uploads = num_attackers + (honest.count if honest is not None else 0)
        while waiting:
            yield forged(waiting.pop(0), num_uploads, num_attackers, honest)

    def _forged(
        self,
        job: ClientJob,
        attackers: frozenset[int],
        replacement: dict[str, Factor],
        result: Result,
        num_uploads: int = 1,
        num_attackers: int = 1,
        honest: Honest | None = None,
    ) -> Result:
        """Return the result of an attacker with what it sends; `replacement` keeps the factors of the round."""
        run, own = job.run, {name: vector for name, vector in result.message.items() if is_forged(name)}
        for name in own.keys() - replacement.keys():
            replacement[name] = self._replacement(name, own, attackers, job)
        context = AttackContext(
            Draw((run.seed, run.round, ATTACK, run.again), result.client),
            job.received,
            run.features.get(ATTACKERS, {}),
            replacement,
            num_uploads,
            num_attackers,
            honest,
        )
        sent = self.adversary.attack.forged(own, context)
        result.message = result.message | {name: sent[name].to(vector) for name, vector in own.items()}
        masks = {} if result.submodel is None else result.submodel.masks(result.message)
        result.message |= {name: torch.where(mask, result.message[name], 0) for name, mask in masks.items()}
        return result

    def _replacement(self, name: str, message: Message, attackers: frozenset[int], job: ClientJob) -> Factor:
        """Return Σu / Σ_{attackers} u of the weights in the mean of a vector, or of each number; Σu is what divides it."""
        cohort = list(job.answering)
        weights, total = self.weigh(name, self.data.client_sizes[cohort])
        attack = np.array([client in attackers for client in cohort])
        theirs, num_attackers = float(weights[attack].sum()), int(attack.sum())
        if not theirs:
            return 1.0
        if job.smaller:
            return self._replacement_of_each(name, message, dict(zip(cohort, weights, strict=True)), attackers, job)
        if self.exchange.prefers_large and num_attackers < len(cohort):
            # The attackers' uploads are chosen first, so the others get what is left.
            places = max(0, self.exchange.num_senders(len(cohort)) - num_attackers)
            total = theirs + (total - theirs) * min(1.0, places / (len(cohort) - num_attackers))
        return total / theirs

    def _replacement_of_each(
        self, name: str, message: Message, weights: Mapping[int, float], attackers: frozenset[int], job: ClientJob
    ) -> Tensor:
        """Return the factor of each number, by the clients whose networks have it; 1 where no attacker's has."""
        everyone, theirs = (torch.zeros_like(message[name], dtype=torch.float64) for _ in range(2))
        for client, weight in weights.items():
            masks = job.smaller[client][0].sent.masks(message) if client in job.smaller else {}
            sent = masks.get(name, torch.ones_like(everyone)) * weight
            everyone += sent
            if client in attackers:
                theirs += sent
        return torch.where(theirs > 0, everyone / theirs, 1.0)


class HonestStatistics:
    """Moments of the honest uploads of a round, or these uploads, as colluding attackers see them.

    Args:
        keeps: True to keep the uploads, False to sum them up.
        in_parts: True if clients send parts of the model: the moments of a number are those of the clients that send it.
    """

    def __init__(self, keeps: bool, in_parts: bool = False) -> None:
        self._keeps, self._in_parts = keeps, in_parts
        self._sums: dict[str, Tensor] = {}
        self._rows: dict[int, State] = {}

    def add(self, result: Result) -> None:
        """See an honest upload of this process; one that is not finite is none."""
        vectors = {name: vector for name, vector in result.message.items() if is_forged(name)}
        if not is_finite(vectors):
            return
        if self._keeps:
            self._rows[result.client] = vectors
            return
        terms = {COUNT: torch.ones(1, dtype=torch.float64, device=next(iter(vectors.values())).device)}
        for name, vector in vectors.items():
            terms |= {f"{SUM}{name}": vector.double(), f"{SQUARES}{name}": vector.double().square()}
            if self._in_parts:
                sent = None if result.submodel is None else result.submodel.masks(vectors).get(name)
                terms[f"{COUNTS}{name}"] = (torch.ones_like(vector) if sent is None else sent).double()
        for key, term in terms.items():
            self._sums[key] = self._sums[key].add_(term) if key in self._sums else term.clone()

    def of_all(self, fabric: Fabric) -> Honest | None:
        """Return what attackers know, of all processes, which must all call this; None if there is no honest upload."""
        if self._keeps:
            vectors = sorted(share_states(fabric, self._rows), key=lambda entry: entry[0])
            names = list(vectors[0][1]) if vectors else []
            rows = {
                name: torch.stack([state[name].to(fabric.device) for _, state in vectors]).double() for name in names
            }
            mean = {name: entry.mean(0) for name, entry in rows.items()}
            std = {
                name: entry.std(0) if len(entry) > 1 else torch.zeros_like(mean[name]) for name, entry in rows.items()
            }
            return Honest(len(vectors), mean, std, rows) if vectors else None
        sums = summed(fabric, self._sums)
        if not sums:
            return None
        names = [key.removeprefix(SUM) for key in sums if key.startswith(SUM)]
        counts = {name: sums.get(f"{COUNTS}{name}", sums[COUNT]) for name in names}
        mean = {name: sums[f"{SUM}{name}"] / counts[name].clamp(min=1) for name in names}
        std = {name: self._std(sums[f"{SQUARES}{name}"], mean[name], counts[name]) for name in names}
        return Honest(int(sums[COUNT]), mean, std)

    @staticmethod
    def _std(squares: Tensor, mean: Tensor, counts: Tensor) -> Tensor:
        """Return the standard deviation with the divisor count − 1, given the sum of the squares."""
        return ((squares - counts * mean.square()).clamp(min=0) / (counts - 1).clamp(min=1)).sqrt()


def _listed(clients: Sequence[int]) -> str:
    """Return clients in words."""
    shown = ", ".join(map(str, clients[:MOST_LISTED]))
    return f"{'clients' if len(clients) > 1 else 'client'} {shown}{' …' if len(clients) > MOST_LISTED else ''}"

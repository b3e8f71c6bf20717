"""Mechanism of a trusted server: the noise of each round, its privacy loss, and the end of the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf, isfinite, sqrt
from typing import Any

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_fl.clients.client_job import ClientJob
from lightning_fl.engine.engine import Engine
from lightning_fl.engine.population import Cohort
from lightning_fl.engine.roles import Roles, Round
from lightning_fl.errors import require
from lightning_fl.features.privacy.accountant import (
    EVERY,
    FIXED,
    PASSES,
    POISSON,
    calibrated,
    epsilon,
    library_version,
    require_library,
)
from lightning_fl.features.privacy.adaptive_clip import WITHIN, AdaptiveClip, rest_of_noise
from lightning_fl.features.privacy.buffers import (
    keeping_counters,
    keeping_variances,
    without_buffers,
    without_needless_noise,
)
from lightning_fl.features.privacy.client_privacy import ClientPrivacy
from lightning_fl.features.privacy.expected_costs import expected
from lightning_fl.features.privacy.mechanism import Mechanism, require_private_from_the_start
from lightning_fl.features.privacy.noisy_sum import Bits, NoisySum
from lightning_fl.features.privacy.side_channels import is_of_clients
from lightning_fl.features.privacy.spent_privacy import (
    PRIVACY,
    Event,
    SpentPrivacy,
    noise_seeds,
    spent_by,
    spent_of,
)
from lightning_fl.features.privacy.tree import changed_nodes, number_of
from lightning_fl.link.link import Link
from lightning_fl.outputs.neighbours import EPSILON, NEIGHBOURS
from lightning_fl.slots import Aggregator, Result, RoundContext, ServerTurn, Upload
from lightning_fl.state.run_state import Run


@dataclass(frozen=True)
class CentralMechanism(Mechanism):
    """Clips uploads at the server and adds noise to their sum.

    Attributes:
        settings: settings of the user.
        num_clients: clients that can be drawn, N.
        cohort_size: clients of a round, K; with Poisson sampling on average.
        total_weight: Σ_j u_j over these clients.
        delta: δ.
    """

    settings: ClientPrivacy
    num_clients: int
    cohort_size: int
    total_weight: float
    delta: float

    @classmethod
    def of(cls, settings: ClientPrivacy, client_sizes: np.ndarray, cohort_size: int) -> CentralMechanism:
        """Return the mechanism for a federation.

        Args:
            settings: settings of the user.
            client_sizes: number of samples of each client.
            cohort_size: clients of a round, K.

        Raises:
            UserError: the settings do not fit the federation, or the accounting library is missing.
        """
        sizes = client_sizes[client_sizes > 0]
        num_clients, is_noisy = len(sizes), settings.noise_multiplier != 0
        require(
            settings.sampling != EVERY or cohort_size == num_clients,
            f"privacy.sampling every takes all {num_clients} clients in each round, but clients_per_round is {cohort_size}: give "
            f"{num_clients}, or sampling poisson.",
        )
        delta = float(num_clients) ** -1.1 if settings.delta is None else settings.delta
        require(
            not is_noisy or delta < 1 / num_clients,
            f"privacy.delta is {delta:g}, but must be below 1/N = {1 / num_clients:g} for {num_clients} clients: a mechanism "
            "that publishes one client whole would satisfy it.",
        )
        if is_noisy:
            require_library()
        counted = np.ones(num_clients) if settings.cap is None else np.minimum(sizes, settings.cap)
        return cls(settings, num_clients, cohort_size, float(counted.sum()), delta)

    @property
    def sampling(self) -> Any:  # type: ignore[override]
        """How a round's clients are drawn; every client is a fixed draw of all."""
        return FIXED if self.settings.sampling == EVERY else self.settings.sampling

    @property
    def hides_clients(self) -> bool:  # type: ignore[override]
        """True with noise."""
        return self.settings.noise_multiplier != 0

    @property
    def parts_clients(self) -> bool:  # type: ignore[override]
        """True with noise, or if side channels are to be dropped."""
        return self.hides_clients or self.hides_costs

    @property
    def hides_costs(self) -> bool:  # type: ignore[override]
        """True if side channels are to be dropped."""
        return self.settings.side_channels == "drop"

    @property
    def rounds_of_pass(self) -> int:
        """Rounds in which each client takes part once."""
        return -(-self.num_clients // self.cohort_size)

    @property
    def noise_of_bits(self) -> float:
        """Standard deviation σ_b of the noise in the number of uploads within an adaptive clip; 0 for another clip."""
        clip = self.settings.clip
        return clip.noise_of_bits(self.cohort_size, self.hides_clients) if isinstance(clip, AdaptiveClip) else 0.0

    @property
    def largest_weight(self) -> float:
        """Largest weight of a client, u_max."""
        return 1.0 if self.settings.cap is None else float(self.settings.cap)

    def denominator(self, counts_alike: bool) -> float:
        """Return W̄ = q Σ_j u_j; K for an entry with equal weights."""
        total = float(self.num_clients) if counts_alike else self.total_weight
        return self.cohort_size * total / self.num_clients

    # -- the run ----------------------------------------------------------------------------------------------------------

    def begin(self, run: Run, num_rounds: int, noise_key: Callable[[float], int] = lambda z: 0) -> int:
        """Find the noise multiplier, or keep that of the checkpoint, and return the last round that `max_epsilon` allows."""
        require_private_from_the_start(run)
        settings = self.settings
        spent = spent_of(run)
        if spent is None:
            noise_multiplier = settings.noise_multiplier
            if noise_multiplier is None:
                assert settings.epsilon is not None
                noise_multiplier = calibrated(
                    lambda z: self.events(SpentPrivacy(z), num_rounds),
                    settings.epsilon,
                    self.delta,
                    settings.accountant,
                )
                rank_zero_info(
                    f"A noise multiplier of {noise_multiplier:.6g} lets {num_rounds} rounds cost epsilon "
                    f"{settings.epsilon:g} at delta {self.delta:.2g} ({self._claim})."
                )
            clip = settings.clip
            spent = run.features[PRIVACY] = SpentPrivacy(
                noise_multiplier,
                clip.initial if isinstance(clip, AdaptiveClip) else clip,
                cohort_size=self.cohort_size,
                num_clients=self.num_clients,
                noise_key=noise_key(noise_multiplier),
            )
        elif settings.epsilon is not None:
            planned = self._epsilon(spent, num_rounds - run.round)
            if planned > settings.epsilon * (1 + 1e-9):
                rank_zero_warn(
                    f"The run goes on with the noise multiplier {spent.noise_multiplier:.6g} of its checkpoint, so that "
                    f"{num_rounds} rounds cost epsilon {planned:.4g}, above the {settings.epsilon:g} of privacy.epsilon."
                )
        self._check_passes(spent)
        self._noise(spent)  # refuses too little noise for an adaptive clip
        return num_rounds if settings.max_epsilon is None else self._last_round(run, num_rounds, settings.max_epsilon)

    def _check_passes(self, spent: SpentPrivacy) -> None:
        """Raise `UserError` if a resumed run has passes over other clients, or cuts them into other rounds."""
        if self.settings.sampling != PASSES:
            return
        require(
            spent.num_clients in (0, self.num_clients),
            f"the checkpoint's passes are over {spent.num_clients} clients with samples, and now over {self.num_clients}, so "
            "that a client could take part twice: use its batch_size and drop_last.",
        )
        before, now = spent.cohort_size, self.cohort_size
        require(
            before == now,
            f"the checkpoint's passes over the clients take {before} clients a round, and now {now}, so that a client could take "
            "part twice: use its clients_per_round.",
        )

    def _last_round(self, run: Run, num_rounds: int, bound: float) -> int:
        """Return the number of rounds after which one more would pass a bound of ε, at most `num_rounds`."""
        spent = spent_by(run)
        low, high = -1, num_rounds - run.round
        if high <= 0 or self._epsilon(spent, high) <= bound:
            return num_rounds
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._epsilon(spent, middle) <= bound else (low, middle)
        last = run.round + max(low, 0)
        require(
            last > 0,
            f"privacy.max_epsilon is {bound:g}, but one round costs epsilon {self._epsilon(spent, 1):.4g}: give more noise.",
        )
        if last < num_rounds:
            rank_zero_info(
                f"The run ends after round {last} of {num_rounds}: the next would cost more than privacy.max_epsilon {bound:g}."
            )
        return last

    def events(self, spent: SpentPrivacy, num_rounds: int) -> Counter[Event]:
        """Return all releases after this many more rounds; those of passes for whole passes, and the rounds of the last."""
        rounds = Counter(spent.events)
        rounds[self._event(spent.noise_multiplier)] += num_rounds
        if self.settings.sampling != PASSES:
            return rounds
        events = Counter[Event]()
        for (kind, noise_multiplier, rounds_of_pass, _), count in rounds.items():
            passes, rest = divmod(count, int(rounds_of_pass))
            events[kind, noise_multiplier, rounds_of_pass, 0.0] += passes
            if rest:
                events[kind, noise_multiplier, float(rest), 0.0] += 1
        return events

    def _event(self, noise_multiplier: float) -> Event:
        """Return the release of a round."""
        sampling = self.settings.sampling
        if sampling == POISSON:
            return sampling, noise_multiplier, self.cohort_size / self.num_clients, 0.0
        if sampling == FIXED:
            return sampling, noise_multiplier, float(self.num_clients), float(self.cohort_size)
        if sampling == PASSES:
            return sampling, noise_multiplier, float(self.rounds_of_pass), 0.0
        return sampling, noise_multiplier, 0.0, 0.0

    def _epsilon(self, spent: SpentPrivacy, num_rounds: int = 0) -> float:
        return epsilon(self.events(spent, num_rounds), self.delta, self.settings.accountant)

    # -- the round --------------------------------------------------------------------------------------------------------

    def around(self, roles: Roles, engine: Engine) -> Roles:
        """Return the roles of a round whose server learns only a noisy sum of the uploads, if there is noise."""
        noisy = replace(
            keeping_variances(roles.watched_by(self), self.settings.buffers),
            aggregator=lambda context: self._noisy_sum(roles.aggregator(context), engine, context),
            reveal=lambda turn: self._revealed(roles.reveal(turn), engine.run),
        )
        return self._telling_the_clip(self._keeping_buffers(self._hiding_costs(noisy, engine)), engine)

    def _keeping_buffers(self, roles: Roles) -> Roles:
        """Let nobody send buffers that stay the server's."""
        if self.settings.buffers != "keep":
            return roles
        return replace(roles, train=lambda job, clients: map(without_buffers, roles.train(job, clients)))

    def _telling_the_clip(self, roles: Roles, engine: Engine) -> Roles:
        """Count 32 bits down for an adaptive clip, and up whether the upload is within it: a bit, or a number of a secure sum."""
        if not isinstance(self.settings.clip, AdaptiveClip):
            return roles

        def broadcast(link: Link, cohort: Cohort) -> ClientJob:
            recipients = engine.algorithm.exchange.recipients(cohort.selected, link.context)
            link.charge("down", recipients, {"scalars": 32})
            return roles.broadcast(link, cohort)

        def collect(results: Iterable[Result], link: Link) -> Iterator[Upload]:
            def with_bit(upload: Upload) -> Upload:
                client, only_sum = upload.result.client, link.only_sum
                if only_sum is None or client in link.senders:
                    link.charge("up", [client], {"scalars": 1 if only_sum is None else only_sum.number_bits})
                return upload

            return map(with_bit, roles.collect(results, link))

        return replace(roles, broadcast=broadcast, collect=collect)

    def _hiding_costs(self, roles: Roles, engine: Engine) -> Roles:
        """Count expected costs in place of those of the clients that have come, if side channels are to be dropped."""
        if not self.hides_costs:
            return roles
        return replace(roles, costs=lambda finished: roles.costs(expected(finished, engine)))

    def _revealed(self, turn: ServerTurn, run: Run) -> ServerTurn:
        """Return a turn with W̄ as the number of samples, unless the uploads' own weights divide, and with noise of no client."""
        turn = without_needless_noise(turn, self.settings.buffers)
        if self.settings.denominator == "fixed":
            turn = replace(turn, num_samples=self.denominator(False))
        return replace(keeping_counters(turn, run), clients=[]) if self.hides_clients else turn

    def _noisy_sum(self, given: Aggregator, engine: Engine, context: RoundContext) -> NoisySum:
        """Return the noisy sum of the present round."""
        method, run, settings = engine.algorithm, engine.run, self.settings
        spent = spent_by(run)
        adapts = isinstance(settings.clip, AdaptiveClip)
        lengths = dict.fromkeys(("model", *method.rule.provides), context.layout.numel)
        if context.buffer_layout.names and settings.buffers != "keep":
            lengths["buffers"] = context.buffer_layout.numel
        uniform = (
            frozenset(name for name in lengths if given.weighs_equally(name)) if settings.cap else frozenset[str]()
        )
        totals = {name: self.denominator(name in uniform) for name in lengths}
        return NoisySum(
            clip=spent.clip,
            scales=settings.scales or {},
            noise=self._noise(spent),
            draws=self._draws(run),
            bits=Bits(self.noise_of_bits, noise_seeds(run)[1], self.cohort_size) if adapts else None,
            cap=settings.cap,
            uniform=uniform,
            lengths=lengths,
            totals=totals if settings.denominator == "fixed" else {},
            device=run.params.device,
        )

    def weights(self, aggregator: Aggregator, name: str, sizes: np.ndarray) -> tuple[np.ndarray, float]:
        """Return u_k, and W̄ unless the weights that came divide."""
        cap = np.inf if self.settings.cap is None else self.settings.cap
        counts_alike = self.settings.cap is None or aggregator.weighs_equally(name)
        weights = np.ones(len(sizes)) if counts_alike else np.minimum(sizes, cap)
        return weights, self.denominator(counts_alike) if self.settings.denominator == "fixed" else float(weights.sum())

    def _noise(self, spent: SpentPrivacy) -> float:
        """Return the standard deviation of the noise in a sum, z C u_max, or z_Δ C u_max with an adaptive clip."""
        noise_multiplier = spent.noise_multiplier
        if isinstance(self.settings.clip, AdaptiveClip):
            noise_multiplier = rest_of_noise(noise_multiplier, self.noise_of_bits)
        return noise_multiplier * spent.clip * self.largest_weight if noise_multiplier else 0.0

    def _draws(self, run: Run) -> list[tuple[int, float]]:
        """Return the seeds of the present round's noise with their factors."""
        if self.settings.mechanism == "gaussian":
            return [(noise_seeds(run)[0], 1.0)]
        number, position = divmod(run.round, self.rounds_of_pass)
        return [
            (noise_seeds(run, number_of(node), in_round=number)[0], sign) for node, sign in changed_nodes(position + 1)
        ]

    def end_round(self, finished: Round) -> dict[str, float]:
        """Count the round's release, even if the round is undone; return its columns."""
        run = finished.run
        spent = spent_by(run)
        columns = {"privacy/clip": spent.clip} if spent.clip < inf else {}
        scale = (self.settings.scales or {}).get("model", 1.0)
        if self.hides_clients:
            num_draws = len(self._draws(run))
            columns["privacy/noise"] = self._noise(spent) * sqrt(num_draws) / (self.denominator(False) * scale)
        spent.events[self._event(spent.noise_multiplier)] += 1
        if isinstance(self.settings.clip, AdaptiveClip) and WITHIN in finished.merging:  # not if nothing was merged
            spent.clip = self.settings.clip.next(spent.clip, finished.merging[WITHIN])
        return columns

    # -- the claim --------------------------------------------------------------------------------------------------------

    @property
    def _claim(self) -> str:
        names = {"poisson": "Poisson", "every": "every client", "fixed": "fixed cohort", "passes": "passes"}
        sampling = self.settings.sampling
        return f"{NEIGHBOURS[sampling]}, {names[sampling]}, {self.settings.accountant.upper()}"

    def shown(
        self, record: dict[str, float], told: tuple[str, ...] = (), of_clients: Collection[str] = ()
    ) -> dict[str, float]:
        """Return the columns of a row, without those of clients if side channels are dropped."""
        if not self.hides_costs:
            return record
        return {
            name: value for name, value in record.items() if name not in of_clients and not is_of_clients(name, told)
        }

    def loss(self, run: Run) -> dict[str, float]:
        """Return ε so far; {} without noise."""
        spent = spent_by(run)
        return {EPSILON: self._epsilon(spent)} if self.hides_clients else {}

    def in_words(self, run: Run) -> str:
        """Return ε so far, δ, neighbours, sampling and accountant in words."""
        epsilon_so_far = self._epsilon(spent_by(run))
        if not isfinite(epsilon_so_far):
            return "none: clipped without noise"
        return f"ε {epsilon_so_far:.3g} at δ {self.delta:.2g} ({self._claim})"

    def hyperparameters(self, run: Run) -> dict[str, Any]:
        """Return the numbers of the guarantee."""
        spent = spent_by(run)
        claimed = {"accountant": f"{self.settings.accountant} of {library_version()}"} if self.hides_clients else {}
        return {
            "privacy/delta": self.delta,
            "privacy/neighbours": NEIGHBOURS[self.settings.sampling],
            "privacy/sampling": self.settings.sampling,
            "privacy/noise_multiplier": spent.noise_multiplier,
            **{f"privacy/{name}": value for name, value in claimed.items()},
        }

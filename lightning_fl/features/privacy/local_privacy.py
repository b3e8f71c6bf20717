"""Local differential privacy: each client adds noise before it sends anything, so it need not trust anybody.

    result ← min(1, C/‖v‖) · result + ξ / s,     ξ ~ N(0, (zC)² I)

All work of the exchange, codecs, aggregator and server is post-processing, including FedLDF's divergences and FLTrust's
scores. Replacing all data of a client moves a result by 2C, so m results are exactly one Gaussian mechanism at z/(2√m).
Numbers of samples would be sent without noise, so clients have equal weights unless these numbers are declared public.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Gt, Interval

from lightning_fl.engine.engine import Engine
from lightning_fl.engine.roles import Roles, Round
from lightning_fl.features.privacy.accountant import library_version, local_epsilon, require_library
from lightning_fl.features.privacy.buffers import (
    Buffers,
    keeping_counters,
    keeping_variances,
    without_buffers,
    without_needless_noise,
)
from lightning_fl.features.privacy.mechanism import (
    Mechanism,
    Privacy,
    check_scales,
    check_weights,
    clip_factor,
    joint_norm,
    require_private_from_the_start,
)
from lightning_fl.features.privacy.noisy_sum import drawn
from lightning_fl.features.privacy.spent_privacy import PRIVACY, SpentPrivacy, noise_seeds, spent_by, spent_of
from lightning_fl.outputs.neighbours import EPSILON, REPLACED_DATA
from lightning_fl.slots import Aggregator, Result, ServerTurn
from lightning_fl.state.run_state import Run


@dataclass(frozen=True)
class LocalPrivacy(Privacy):
    """Let each client clip its upload and add noise itself, so that not even the server learns much about its samples.

    A client's privacy loss grows with its uploads; the run logs the largest loss of all clients.

    Attributes:
        clip: C > 0, largest length of all vectors of an upload together.
        noise_multiplier: z ≥ 0: each number gets normal noise of z · C; 0 is no privacy.
        delta: δ in (0, 1).
        weights: equal (`uniform`), or the clients' numbers of `samples`, at most `cap`, which are assumed to be public.
        cap: largest weight of a client in samples, at least 1; only with `samples`.
        scales: factor of a vector in the length of an upload by its name, such as model or moments/first; 1 if not given.
        buffers: treatment of clients' running statistics: `refuse` them, add them to the upload (`clip`), or `keep` the
            server's.
    """

    changeable = frozenset({"delta"})
    clip: Annotated[float, Gt(0)] = 1.0
    noise_multiplier: Annotated[float, Ge(0)] = 1.0
    delta: Annotated[float, Interval(gt=0, lt=1)] = 1e-5
    weights: Literal["uniform", "samples"] = "uniform"
    cap: Annotated[float, Ge(1)] | None = None
    scales: Mapping[str, float] | None = None
    buffers: Buffers = "refuse"

    def __post_init__(self) -> None:
        check_weights(self.weights, self.cap)
        check_scales(self.scales)


@dataclass(frozen=True)
class LocalMechanism(Mechanism):
    """Clips results and adds noise to them before they are sent.

    Attributes:
        settings: settings of the user.
    """

    settings: LocalPrivacy

    @classmethod
    def of(cls, settings: LocalPrivacy) -> LocalMechanism:
        """Return the mechanism; raise `UserError` if the accounting library is missing."""
        if settings.noise_multiplier:
            require_library()
        return cls(settings)

    @property
    def parts_clients(self) -> bool:  # type: ignore[override]
        """True with noise."""
        return self.settings.noise_multiplier != 0

    def begin(self, run: Run, num_rounds: int, noise_key: Callable[[float], int] = lambda z: 0) -> int:
        """Begin to count the clients' uploads, or go on with those of the checkpoint."""
        require_private_from_the_start(run)
        if spent_of(run) is None:
            noise_multiplier = self.settings.noise_multiplier
            run.features[PRIVACY] = SpentPrivacy(
                noise_multiplier, self.settings.clip, noise_key=noise_key(noise_multiplier)
            )
        return num_rounds

    def weights(self, aggregator: Aggregator, name: str, sizes: np.ndarray) -> tuple[np.ndarray, float]:
        """Return the weights that the clients send, and their sum."""
        return super().weights(aggregator, name, self._counted(sizes))

    def _counted(self, sizes: np.ndarray) -> np.ndarray:
        """Return min(n_k, cap), or 1 where clients count alike."""
        cap = self.settings.cap
        return np.ones(np.shape(sizes)) if cap is None else np.minimum(sizes, cap)

    def around(self, roles: Roles, engine: Engine) -> Roles:
        """Return the roles of a round in which clients clip their uploads and add noise, and variances stay above 0."""
        return replace(
            keeping_variances(roles.watched_by(self), self.settings.buffers),
            train=lambda job, clients: map(partial(self._noisy, job.run), roles.train(job, clients)),
            reveal=lambda turn: self._revealed(roles.reveal(turn), engine.run),
        )

    def _revealed(self, turn: ServerTurn, run: Run) -> ServerTurn:
        """Return a turn without the clients' counters, which have no noise."""
        turn = without_needless_noise(turn, self.settings.buffers)
        return keeping_counters(turn, run) if self.settings.noise_multiplier else turn

    def _noisy(self, run: Run, result: Result) -> Result:
        """Return a client's result, clipped and with noise, in the dtypes that it has."""
        settings, scales = self.settings, self.settings.scales or {}
        result = replace(result, weight=float(self._counted(np.array(result.weight))))
        if settings.buffers == "keep":
            result = without_buffers(result)
        message, noise = result.message, settings.noise_multiplier * settings.clip
        factor = clip_factor(joint_norm(message, scales), settings.clip)
        if not noise:
            clipped = message if factor == 1 else {name: entry * factor for name, entry in message.items()}
            return replace(result, message=clipped)
        lengths = {name: len(entry) for name, entry in message.items()}
        draws = drawn(noise_seeds(run, result.client)[0], lengths, run.unpruned)
        noisy = {}
        for name, entry in message.items():
            vector = entry.double() * factor
            vector.add_(draws[name].to(vector.device), alpha=noise / scales.get(name, 1.0))
            noisy[name] = vector.to(entry.dtype)
        return replace(result, message=noisy)

    def end_round(self, finished: Round) -> dict[str, float]:
        """Count the upload of each client that sent one, even in an undone round; return the round's columns."""
        spent = spent_by(finished.run)
        noise_multiplier = self.settings.noise_multiplier
        for client in dict.fromkeys(k for k in finished.cohort.answering if k not in finished.outcome.silent):
            variance = noise_multiplier**-2 if noise_multiplier else inf
            spent.uploads[client] = spent.uploads.get(client, 0.0) + variance
        return {"privacy/clip": self.settings.clip}

    def _epsilon(self, run: Run) -> float:
        """Return the largest ε of a client so far."""
        return local_epsilon(max(spent_by(run).uploads.values(), default=0.0), self.settings.delta)

    def loss(self, run: Run) -> dict[str, float]:
        """Return the largest ε so far; {} without noise."""
        return {EPSILON: self._epsilon(run)} if self.settings.noise_multiplier else {}

    def in_words(self, run: Run) -> str:
        """Return the largest ε so far, δ and neighbours."""
        if not self.settings.noise_multiplier:
            return "none: clipped without noise"
        return f"ε {self._epsilon(run):.3g} at δ {self.settings.delta:.2g} ({REPLACED_DATA}, the client with most uploads, exact)"

    def hyperparameters(self, run: Run) -> dict[str, Any]:
        """Return the numbers of the guarantee."""
        known = (
            {"privacy/accountant": f"exact Gaussian of {library_version()}"} if self.settings.noise_multiplier else {}
        )
        return {
            "privacy/delta": self.settings.delta,
            "privacy/neighbours": REPLACED_DATA,
            "privacy/noise_multiplier": self.settings.noise_multiplier,
            **known,
        }

"""Privacy mechanism of a run, which wraps its rounds; without privacy it changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Ge
from torch import Tensor

from lightning_fl.checks import Checked, check_positive
from lightning_fl.engine.engine import Engine
from lightning_fl.engine.roles import Observer, Roles
from lightning_fl.errors import require
from lightning_fl.features.privacy.spent_privacy import spent_of
from lightning_fl.slots import Aggregator
from lightning_fl.state.run_state import Run


class Mechanism(Observer):
    """Hooks of a round. This base class serves runs without privacy.

    Attributes:
        sampling: how a round's clients are drawn.
        hides_clients: True if the server may learn only a noisy sum of the round's clients.
        parts_clients: True if only messages may pass between clients and the server.
        hides_costs: True if columns reveal nothing about a round's clients, and costs are expected values.
    """

    public = frozenset({"privacy/clip", "privacy/noise"})
    sampling: Literal["fixed", "poisson", "passes"] = "fixed"
    hides_clients = False
    parts_clients = False
    hides_costs = False

    def begin(self, run: Run, num_rounds: int, noise_key: Callable[[float], int] = lambda z: 0) -> int:
        """Begin a run, or go on with it; returns the round after which it ends.

        Args:
            run: run before its first round, or as it was resumed.
            num_rounds: planned number of rounds.
            noise_key: returns the key of the noise of a run that begins, given its noise multiplier.
        """
        return num_rounds

    def around(self, roles: Roles, engine: Engine) -> Roles:
        """Return the roles of a round, wrapped for privacy."""
        return roles

    def weights(self, aggregator: Aggregator, name: str, sizes: np.ndarray) -> tuple[np.ndarray, float]:
        """Return the weights of clients with so many samples in the mean of an entry, and the weight that divides it.

        Args:
            aggregator: aggregator of the method.
            name: name of the entry.
            sizes: numbers of samples of the clients that answer (K,).
        """
        weights = np.ones(len(sizes)) if aggregator.weighs_equally(name) else sizes
        return weights, float(weights.sum())

    def shown(
        self, record: dict[str, float], told: tuple[str, ...] = (), of_clients: Collection[str] = ()
    ) -> dict[str, float]:
        """Return the columns of a row that may be shown.

        Args:
            record: columns of the row.
            told: prefixes of columns in which callbacks report on clients.
            of_clients: further columns about clients.
        """
        return record

    def clip(self, run: Run) -> float | None:
        """Return the clip of the present round; None without one."""
        spent = spent_of(run)
        return None if spent is None else spent.clip

    def loss(self, run: Run) -> dict[str, float]:
        """Return ε so far under its column of metrics.csv; {} without a guarantee."""
        return {}

    def in_words(self, run: Run) -> str:
        """Return ε so far with what it means, for the table at the end; empty without privacy."""
        return ""

    def hyperparameters(self, run: Run) -> dict[str, Any]:
        """Return the guarantee's numbers for loggers."""
        return {}


class Privacy(Checked):
    """Settings of a private run, `trainer.privacy`: `ClientPrivacy`, or `LocalPrivacy`."""

    changeable = frozenset[str]()
    """Names of the settings that a resumed run may change."""
    _called = "privacy.{}"
    cap: Annotated[float, Ge(1)] | None
    """Largest weight of a client in samples; None for equal weights."""


def require_private_from_the_start(run: Run) -> None:
    """Raise `UserError` if a run is resumed whose earlier rounds were not private."""
    require(
        run.round == 0 or spent_of(run) is not None,
        f"the checkpoint's {run.round} rounds were trained without trainer.privacy, so that nothing could be claimed for the "
        "whole run: start a new run in another folder.",
    )


def check_weights(weights: str, cap: float | None) -> None:
    """Raise `UserError` unless clients have equal weights, or weights by samples with a cap."""
    require(
        (cap is not None) == (weights == "samples"),
        f"privacy.cap bounds the samples that a client counts for with weights samples, got weights {weights} and cap {cap}: "
        f"{'give a cap, such as 100' if cap is None else 'leave one out'}.",
    )


def check_scales(scales: Mapping[str, float] | None) -> None:
    """Raise `UserError` unless all factors of vectors are positive."""
    for name, scale in (scales or {}).items():
        check_positive(f"the scale of {name} in privacy.scales", scale)


def joint_norm(message: Mapping[str, Tensor], scales: Mapping[str, float]) -> float:
    """Return ‖v‖, v the vectors of a message one after the other, each times its scale, 1 if there is none; in float64."""
    squares = 0.0
    for name in sorted(message):
        squares += (scales.get(name, 1.0) * float(torch.linalg.vector_norm(message[name], dtype=torch.float64))) ** 2
    return squares**0.5


def clip_factor(norm: float, clip: float) -> float:
    """Return min(1, C/‖v‖), and 1 for v = 0.

    >>> clip_factor(0.0, 1.0), clip_factor(1.0, 1.0), clip_factor(4.0, 1.0)
    (1.0, 1.0, 0.25)
    """
    return 1.0 if norm <= clip else clip / norm

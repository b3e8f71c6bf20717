"""Privacy loss ε of a run's releases, computed by Google's `dp-accounting`, which is imported only here.

The events of its library for each way to draw clients, N eligible clients, K of a round, noise multiplier z:

    poisson   Poisson(q, Gaussian(z)), one client more or less
    every     Gaussian(z), one client more or less
    fixed     WithoutReplacement(N, K, Gaussian(z/2)), one client replaced
    passes    SingleEpochTree(z, rounds of the pass), one client replaced by nothing

Replacing a client moves the sum by 2C instead of C. With Rényi accounting the caller must halve z.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from math import inf, sqrt
from typing import Any, Literal

from lightning_fl.errors import UserError, require
from lightning_fl.features.privacy.spent_privacy import Event
from lightning_fl.outputs.quiet import quiet

POISSON, EVERY, FIXED, PASSES = ("poisson", "every", "fixed", "passes")
Accountant = Literal["rdp", "pld"]
LEAST_NOISE = 0.05
"""Least noise multiplier that is found for a target; less noise costs an ε of hundreds."""
LOGGER = "absl"
"""Logger of the accounting library, which warns of orders of Rényi divergences that it does not use."""
CLOSER = 0.9
"""Factor of the noise multiplier from step to step of the search for one that costs more than a target."""


def require_library() -> None:
    """Raise `UserError` if the accounting library is missing."""
    require(
        find_spec("dp_accounting") is not None,
        "differential privacy needs the package dp-accounting, which is not installed: pip install 'lightning-fl[privacy]'.",
    )


def library_version() -> str:
    """Return name and version of the accounting library."""
    return f"dp-accounting {version('dp-accounting')}"


def epsilon(events: Mapping[Event, int], delta: float, accountant: Accountant = "rdp") -> float:
    """Return ε at δ of releases, each with its count; 0 without any, infinite if one has no noise.

    Args:
        events: counts of the releases, all of the same sampling.
        delta: δ in (0, 1).
        accountant: `rdp`, Rényi differential privacy, or `pld`, numerical privacy-loss distributions, of `poisson` and `every`.
    """
    counts = {event: count for event, count in events.items() if count}
    if not counts:
        return 0.0
    if any(noise_multiplier == 0 for _, noise_multiplier, *_ in counts):
        return inf
    with quiet(LOGGER, level=logging.ERROR):
        if accountant == "rdp":
            from dp_accounting.rdp import compute_epsilon

            orders = _divergences(next(iter(counts)))[0]
            total = sum(count * _divergences(event)[1] for event, count in counts.items())
            return float(compute_epsilon(orders, total, delta)[0])
        account = _accountant(next(iter(counts))[0], accountant)
        for event, count in counts.items():
            account.compose(_library_event(event), count)
        return float(account.get_epsilon(delta))


@lru_cache(maxsize=1024)
def _divergences(event: Event) -> tuple[Any, Any]:
    """Return the orders of Rényi divergences, and those of one release; they add up, and take the library most of the time."""
    account = _accountant(event[0], "rdp")
    account.compose(_library_event(event))
    return account.orders, account.rdp


def calibrated(
    events: Callable[[float], Mapping[Event, int]], target: float, delta: float, accountant: Accountant = "rdp"
) -> float:
    """Return the smallest noise multiplier z for which releases cost at most a target.

    Privacy-loss distributions with little noise take minutes and gigabytes. So the search for their z begins just below the z
    of Rényi accounting, an upper bound that takes milliseconds.

    Args:
        events: returns the releases of the whole run, given z.
        target: ε > 0.
        delta: δ in (0, 1).
        accountant: see `epsilon`.

    Raises:
        UserError: there is no such z.
    """
    from dp_accounting import LowerEndpointAndGuess, calibrate_dp_mechanism, dp_event

    kind = next(iter(events(1.0)))[0]
    bracket = LowerEndpointAndGuess(LEAST_NOISE, 1.0)
    if accountant == "pld":
        above = below = calibrated(events, target, delta)
        while below > LEAST_NOISE and epsilon(events(below), delta, accountant) <= target:
            below = max(LEAST_NOISE, CLOSER * below)
        bracket = LowerEndpointAndGuess(below, above)

    def composed(noise_multiplier: float) -> Any:
        parts = [
            dp_event.SelfComposedDpEvent(_library_event(event), count)
            for event, count in events(noise_multiplier).items()
            if count
        ]
        return dp_event.ComposedDpEvent(parts)

    with quiet(LOGGER, level=logging.ERROR):
        try:
            found = calibrate_dp_mechanism(lambda: _accountant(kind, accountant), composed, target, delta, bracket)
        except Exception as error:  # the library has several classes for it
            raise UserError(
                f"no noise multiplier was found for epsilon {target:g} at delta {delta:g}: {error}."
            ) from error
    reached = epsilon(events(found), delta, accountant)
    require(
        reached <= target, f"the noise multiplier {found:g} gives epsilon {reached:g}, above the {target:g} asked for."
    )
    return float(found)


def local_epsilon(inverse_variances: float, delta: float) -> float:
    """Return the exact ε at δ of a client's own noise. Replacing all data of the client moves each upload by 2C.

    Args:
        inverse_variances: Σ 1/z² over its uploads; m uploads with the same z are one Gaussian at z/√m.
        delta: δ in (0, 1).
    """
    if not inverse_variances:
        return 0.0
    if inverse_variances == inf:
        return inf
    from dp_accounting import get_epsilon_gaussian

    return float(get_epsilon_gaussian(1 / (2 * sqrt(inverse_variances)), delta))


def _accountant(kind: str, accountant: Accountant) -> Any:
    """Return a new accountant of the library for a sampling."""
    from dp_accounting import NeighboringRelation, pld, rdp

    relations = {FIXED: NeighboringRelation.REPLACE_ONE, PASSES: NeighboringRelation.REPLACE_SPECIAL}
    relation = relations.get(kind, NeighboringRelation.ADD_OR_REMOVE_ONE)
    if accountant == "pld":
        return pld.PLDAccountant(relation)
    return rdp.RdpAccountant(neighboring_relation=relation)


def _library_event(event: Event) -> Any:
    """Return a release as the library describes it."""
    from dp_accounting import dp_event

    kind, noise_multiplier, first, second = event
    gaussian = dp_event.GaussianDpEvent(noise_multiplier / 2 if kind == FIXED else noise_multiplier)
    if kind == POISSON:
        return dp_event.PoissonSampledDpEvent(first, gaussian)
    if kind == FIXED:
        return dp_event.SampledWithoutReplacementDpEvent(int(first), int(second), gaussian)
    if kind == PASSES:
        return dp_event.SingleEpochTreeAggregationDpEvent(noise_multiplier, int(first))
    return gaussian

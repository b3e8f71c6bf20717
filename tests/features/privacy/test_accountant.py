"""Test ε against known values, its monotony, and the noise that is found for a target."""

from collections import Counter
from math import inf
from typing import Any

import pytest

from lightning_fl import UserError
from lightning_fl.features.privacy import accountant
from lightning_fl.features.privacy.accountant import calibrated, epsilon, local_epsilon
from lightning_fl.features.privacy.spent_privacy import Event, SpentPrivacy

pytest.importorskip("dp_accounting", reason="needs the extra privacy")

KNOWN: list[tuple[str, dict[Event, int], float, float, float | None]] = [
    ("every client", {("every", 1.0, 0.0, 0.0): 1}, 1e-5, 4.728507, 4.377178),
    ("Poisson, a tenth", {("poisson", 1.0, 0.1, 0.0): 60}, 1e-3, 4.380951, 3.640381),
    ("Poisson, a hundredth", {("poisson", 1.1, 0.01, 0.0): 1000}, 1e-5, 1.711770, 1.515370),
    ("fixed", {("fixed", 1.0, 100.0, 10.0): 60}, 1e-3, 49.807633, None),
    ("one pass of a tree", {("passes", 8.0, 100.0, 0.0): 1}, 1e-5, 1.374122, None),
    ("five passes of a tree", {("passes", 8.0, 20.0, 0.0): 5}, 1e-5, 2.776609, None),
]
"""Releases, δ, and ε by Rényi accounting and by privacy-loss distributions, computed with dp-accounting 0.6.0."""


@pytest.mark.parametrize(
    ("events", "delta", "by_rdp", "by_pld"), [case[1:] for case in KNOWN], ids=[c[0] for c in KNOWN]
)
@pytest.mark.matrix
def test_known_values(events: dict[Event, int], delta: float, by_rdp: float, by_pld: float | None) -> None:
    assert epsilon(events, delta) == pytest.approx(by_rdp, abs=1e-5)
    if by_pld is not None:
        assert epsilon(events, delta, "pld") == pytest.approx(by_pld, abs=1e-5)


def test_a_client_with_noise_of_its_own() -> None:
    assert local_epsilon(10 / 20**2, 1e-5) == pytest.approx(1.199370, abs=1e-5)
    assert local_epsilon(0.0, 1e-5) == 0
    assert local_epsilon(inf, 1e-5) == inf


def test_nothing_released_costs_nothing_and_no_noise_costs_everything() -> None:
    assert epsilon({}, 1e-3) == epsilon({("every", 1.0, 0.0, 0.0): 0}, 1e-3) == 0
    assert epsilon({("every", 1.0, 0.0, 0.0): 3, ("every", 0.0, 0.0, 0.0): 1}, 1e-3) == inf


@pytest.mark.long
def test_epsilon_grows_with_rounds_and_share_and_falls_with_noise() -> None:
    def of(noise_multiplier: float = 1.0, share: float = 0.1, rounds: int = 20) -> float:
        return epsilon({("poisson", noise_multiplier, share, 0.0): rounds}, 1e-3)

    assert of(rounds=20) < of(rounds=21) < of(rounds=40)
    assert of(share=0.05) < of(share=0.1) < of(share=1.0)
    assert of(noise_multiplier=1.5) < of(noise_multiplier=1.0)
    assert of(share=1.0) == pytest.approx(epsilon({("every", 1.0, 0.0, 0.0): 20}, 1e-3))


@pytest.mark.long
def test_rounds_before_and_after_a_resumption_are_rounds_of_one_run() -> None:
    event: Event = ("poisson", 1.0, 0.1, 0.0)
    spent = SpentPrivacy(1.0, 1.0, Counter({event: 25}), {3: 0.5})
    resumed = SpentPrivacy.from_state(spent.state_dict())
    assert resumed == spent
    resumed.events[event] += 35
    assert epsilon(resumed.events, 1e-3) == epsilon({event: 60}, 1e-3)


@pytest.mark.parametrize(
    ("by", "found", "digits"),
    [("rdp", 1.553480, 1e-5), pytest.param("pld", 1.3977, 1e-3, marks=pytest.mark.slow)],
)
@pytest.mark.matrix
def test_the_noise_for_a_target_meets_it_and_less_does_not(
    by: accountant.Accountant, found: float, digits: float
) -> None:
    def rounds(noise_multiplier: float) -> dict[Event, int]:
        return {("poisson", noise_multiplier, 0.1, 0.0): 60}

    noise_multiplier = calibrated(rounds, 2.0, 1e-3, by)
    assert noise_multiplier == pytest.approx(found, abs=digits)
    assert epsilon(rounds(noise_multiplier), 1e-3, by) <= 2.0 < epsilon(rounds(noise_multiplier - 1e-3), 1e-3, by)


@pytest.mark.parametrize(
    "event",
    [("every", 0.0, 0.0), ("passes", 20.0, 0.0), pytest.param(("fixed", 100.0, 10.0), marks=pytest.mark.slow)],
)
def test_every_sampling_has_a_noise_for_a_target(event: tuple[str, float, float]) -> None:
    def rounds(noise_multiplier: float) -> dict[Event, int]:
        return {(event[0], noise_multiplier, *event[1:]): 5, ("passes", noise_multiplier, 0.0, 0.0): 0}

    noise_multiplier = calibrated(rounds, 3.0, 1e-3)
    assert epsilon(rounds(noise_multiplier), 1e-3) <= 3.0 < epsilon(rounds(noise_multiplier - 1e-3), 1e-3)


@pytest.mark.matrix
def test_loss_distributions_are_computed_near_the_noise_that_is_found_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that nothing is computed at little noise, where one distribution takes gigabytes."""
    from dp_accounting.pld import PLDAccountant

    tried: list[float] = []
    compose = PLDAccountant.compose

    def composing(self: Any, event: Any, count: int = 1) -> Any:
        single = getattr(event, "events", [event])[0]
        tried.append(getattr(single, "event", single).noise_multiplier)
        return compose(self, event, count)

    monkeypatch.setattr(PLDAccountant, "compose", composing)
    found = calibrated(lambda z: {("every", z, 0.0, 0.0): 2}, 3.0, 1e-3, "pld")
    assert 0.75 * found < min(tried) < max(tried) < 1.25 * found
    assert epsilon({("every", found, 0.0, 0.0): 2}, 1e-3, "pld") <= 3.0


def test_a_missing_library_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accountant, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"needs the package dp-accounting, .*: pip install 'lightning-fl\[privacy\]'"):
        accountant.require_library()

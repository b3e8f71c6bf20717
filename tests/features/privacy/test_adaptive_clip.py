"""Test the clip that follows a quantile of the uploads' lengths."""

from itertools import pairwise
from math import inf, log, nan, sqrt
from typing import Any

import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer
from toys import SIZES, Perceptron, federation, samples

from lightning_fl import FederatedTrainer, UserError
from lightning_fl.algorithms import FedAvg
from lightning_fl.features.privacy import AdaptiveClip, ClientPrivacy
from lightning_fl.features.privacy.accountant import epsilon
from lightning_fl.features.privacy.adaptive_clip import rest_of_noise
from lightning_fl.features.privacy.central import CentralMechanism
from lightning_fl.features.privacy.noisy_sum import Bits
from lightning_fl.features.privacy.spent_privacy import SpentPrivacy
from lightning_fl.features.secure_aggregation import SecureAggregation


def test_bits_and_uploads_cost_one_mechanism() -> None:
    """With sensitivities ½ and 1, two Gaussian mechanisms at z_Δ and 2σ_b are one at (z_Δ⁻² + (2σ_b)⁻²)^−½."""
    rest = rest_of_noise(1.0, 5.0)
    assert rest == pytest.approx(1.005038, abs=1e-6)
    assert (rest**-2 + (2 * 5.0) ** -2) ** -0.5 == pytest.approx(1.0)
    assert rest_of_noise(0.0, 0.0) == 0
    with pytest.raises(
        UserError, match=r"noise multiplier below 2 · count_noise = 1, got 1: give more clients_per_round"
    ):
        rest_of_noise(1.0, 0.5)


@pytest.mark.parametrize("quantile", [0.1, 0.5, 0.9])
def test_without_noise_it_finds_the_quantile_of_lengths(quantile: float) -> None:
    lengths = np.exp(np.random.default_rng(0).normal(size=201))
    clip, adaptive = 0.1, AdaptiveClip(quantile=quantile)
    for _ in range(400):
        within = Bits(0.0, 1, len(lengths)).share(float((lengths <= clip).sum() - len(lengths) / 2))
        assert within == pytest.approx((lengths <= clip).mean())
        clip = adaptive.next(clip, within)
    # Near the quantile the clip moves by η/n of its logarithm or less.
    assert abs(log(clip) - log(np.quantile(lengths, quantile))) < 0.05


def test_nobody_counts_as_half_of_those_expected_and_noise_is_normal() -> None:
    assert Bits(0.0, 1, 10.0).share(0.0) == 0.5
    shares = [Bits(2.0, seed, 10.0).share(-1.0) for seed in range(2000)]
    assert abs(np.mean(shares) - 0.4) < 4 * 0.2 / sqrt(2000)
    assert np.std(shares) == pytest.approx(0.2, rel=4 / sqrt(2 * 2000))


def test_a_client_moves_the_count_by_a_half() -> None:
    for inside in (-0.5, 0.5):
        assert abs(Bits(0.0, 1, 10.0).share(3.0 + inside) - Bits(0.0, 1, 10.0).share(3.0)) == pytest.approx(0.05)


def fitted(make_trainer: MakeTrainer, privacy: ClientPrivacy, data: Any = None, **flags: Any) -> FederatedTrainer:
    torch.default_generator.manual_seed(0)
    trainer = make_trainer(**{"max_rounds": 3, "clients_per_round": 6, "privacy": privacy, **flags})
    trainer.fit(Perceptron(), data or federation(), FedAvg())
    return trainer


def test_rounds_use_the_clip_from_before_them_and_cost_a_bit_up_and_32_down(make_trainer: MakeTrainer) -> None:
    adaptive = AdaptiveClip(initial=0.2, quantile=0.3, learning_rate=0.5)
    trainer = fitted(make_trainer, ClientPrivacy(clip=adaptive, noise_multiplier=0, sampling="every"))
    rows = trainer.fit_loop.rows
    assert rows[0]["privacy/clip"] == 0.2
    for row, later in pairwise(rows):
        assert later["privacy/clip"] == pytest.approx(adaptive.next(row["privacy/clip"], row["privacy/within"]))
    assert all(row["privacy/within"] in [pytest.approx(share / 6) for share in range(7)] for row in rows)
    usual = fitted(make_trainer, ClientPrivacy(clip=inf, noise_multiplier=0, sampling="every"))
    for row, other in zip(rows, usual.fit_loop.rows, strict=True):
        assert row["comm/uplink_bits"] - other["comm/uplink_bits"] == 6
        assert row["comm/downlink_bits"] - other["comm/downlink_bits"] == 6 * 32


def test_in_a_secure_sum_whether_an_upload_is_within_the_clip_is_one_more_number(make_trainer: MakeTrainer) -> None:
    secure = {"secure_aggregation": SecureAggregation(), "clients_per_round": 5, "max_rounds": 1}
    numbers = []
    for clip in (AdaptiveClip(), 0.1):
        x, y = samples(sum(SIZES))
        x[0] = nan  # of one client, which then sends nothing
        privacy = ClientPrivacy(clip=clip, noise_multiplier=0, sampling="fixed")
        numbers.append(fitted(make_trainer, privacy, data=federation(train=(x, y)), **secure).fit_loop.rows[0])
    adaptive, fixed = numbers
    assert adaptive["clients/rejected"] == fixed["clients/rejected"] == 1
    assert adaptive["comm/uplink_bits"] - fixed["comm/uplink_bits"] == 4 * 19


def test_it_stays_after_a_round_in_which_nothing_is_merged(make_trainer: MakeTrainer) -> None:
    privacy = ClientPrivacy(clip=AdaptiveClip(initial=0.3), noise_multiplier=0, denominator="received")
    trainer = fitted(make_trainer, privacy, max_rounds=2, dropout_rate=0.999999)
    assert [int(row["clients/accepted"]) for row in trainer.fit_loop.rows] == [0, 0]
    assert trainer.run.features["privacy"].clip == 0.3


def test_it_costs_what_a_fixed_clip_costs(make_trainer: MakeTrainer) -> None:
    pytest.importorskip("dp_accounting", reason="needs the extra privacy")
    sizes = np.full(100, 3)
    mechanism = CentralMechanism.of(
        ClientPrivacy(clip=AdaptiveClip(count_noise=5.0), noise_multiplier=1.0, delta=1e-3), sizes, 10
    )
    spent = SpentPrivacy(1.0, 0.1)
    assert epsilon(mechanism.events(spent, 60), 1e-3) == pytest.approx(4.380951, abs=1e-5)
    assert mechanism._noise(spent) == pytest.approx(1.005038 * 0.1, abs=1e-6)
    with pytest.raises(UserError, match=r"below 2 · count_noise = 0.6, got 1"):
        fitted(make_trainer, ClientPrivacy(clip=AdaptiveClip(), noise_multiplier=1, delta=0.01, sampling="every"))

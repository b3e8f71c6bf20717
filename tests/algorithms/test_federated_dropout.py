"""Test Federated Dropout: random smaller networks, whose units follow from a seed."""

from typing import Any

import numpy as np
import pytest
import torch
from compared_runs import RUNNERS, MakeTrainer, ends_as_fedavg
from test_heterofl import Images, images
from toys import Perceptron, Recorded, federation, vector

from lightning_fl import UserError
from lightning_fl.algorithms import FederatedDropout
from lightning_fl.codecs import TopK


@RUNNERS
def test_rate_0_is_fedavg_bit_for_bit(runner: str, make_trainer: MakeTrainer) -> None:
    assert ends_as_fedavg(FederatedDropout(rate=0.0), runner, make_trainer)


def test_the_left_out_units_stay_for_a_round(make_trainer: MakeTrainer) -> None:
    """Check that all clients of a round have one network, and that every round has another."""
    seen, module, starts = Recorded(), Perceptron(), []

    class Watch(Recorded):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            starts.append(vector(pl_module))

    trainer = make_trainer(max_rounds=6, clients_per_round=6, precision="64-true", callbacks=[seen, Watch()])
    trainer.fit(module, federation(), FederatedDropout(rate=0.5))
    moved = [b != a for a, b in zip(starts, [*starts[1:], vector(module)], strict=True)]
    units = [tuple(np.flatnonzero(change[12:16])) for change in moved]
    assert all(len(round_units) == 2 for round_units in units)
    assert len(set(units)) > 1
    for change, round_units in zip(moved, units, strict=True):
        assert [unit for unit in range(4) if change[3 * unit : 3 * unit + 3].any()] == list(round_units)
    for t, messages in seen.rounds.items():
        for message in messages:
            assert not message.sent["model"][torch.from_numpy(~moved[t])].any()


def test_clients_draw_units_of_their_own(make_trainer: MakeTrainer) -> None:
    seen = Recorded()
    trainer = make_trainer(max_rounds=2, clients_per_round=6, callbacks=seen)
    trainer.fit(Perceptron(), federation(), FederatedDropout(rate=0.5, per_client=True))
    chosen = {tuple(np.flatnonzero(message.sent["model"][12:16])) for message in seen.rounds[0]}
    assert len(chosen) > 1


def test_runners_agree_on_a_residual_network_with_few_bits(make_trainer: MakeTrainer) -> None:
    ends = []
    for runner in ("serial", "stacked"):
        torch.manual_seed(0)
        module = Images()
        make_trainer(max_rounds=3, clients_per_round=6, precision="64-true", runner=runner).fit(
            module, images(), FederatedDropout(rate=0.4, per_client=True, scaled=True, uplink=TopK(0.3))
        )
        ends.append(vector(module))
    np.testing.assert_allclose(ends[0], ends[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("rate", [1.0, -0.1])
def test_rates_are_checked(rate: float) -> None:
    with pytest.raises(UserError, match=r"rate, the share of the units that are left out, must lie in \[0, 1\)"):
        FederatedDropout(rate=rate)

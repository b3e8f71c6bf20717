"""Test FedSAM: its limit, the point of the second gradient, and the trace that the second gradient must not leave."""

import copy
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from compared_runs import RUNNERS, MakeTrainer
from roster import problem
from torch import Tensor, nn
from toys import Normalised, Perceptron, federation, vector

from lightning_fl import UserError
from lightning_fl.algorithms import FedAvg, FedSAM, FjORD
from lightning_fl.rules import SharpnessAware
from lightning_fl.slots import LocalTraining, RoundContext
from lightning_fl.vectors.layout import Layout


class Counted(Normalised):
    """Perceptron with batch normalisation and dropout, whose log counts the steps of a round."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.dropout(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("train/steps", torch.tensor(1.0), reduce_fx="sum")
        return super().training_step(batch, batch_idx)


@RUNNERS
@pytest.mark.parametrize(
    "flags", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}], ids=["plain", "clipped"]
)
def test_with_radius_0_it_is_fedavg_bit_for_bit(flags: Any, runner: str, make_trainer: MakeTrainer) -> None:
    """Test that random draws repeat, and that running statistics, counts and logs are those of one gradient."""
    one = Counted()
    other = copy.deepcopy(one)
    runs = []
    for module, algorithm in ((one, FedAvg()), (other, FedSAM(rho=0))):
        trainer = make_trainer(max_rounds=3, local_epochs=2, runner=runner, **flags)
        trainer.fit(module, federation(), algorithm)
        runs.append(trainer)
    for name, entry in one.state_dict().items():
        assert torch.equal(entry, other.state_dict()[name]), name
    assert runs[0].run.num_steps == runs[1].run.num_steps
    assert runs[0].callback_metrics["train/steps"] == runs[1].callback_metrics["train/steps"]


@RUNNERS
def test_running_statistics_are_those_of_one_gradient(runner: str, make_trainer: MakeTrainer) -> None:
    one = Normalised()  # which normalises its inputs, so that their statistics do not depend on the parameters
    other = copy.deepcopy(one)
    for module, algorithm in ((one, FedAvg()), (other, FedSAM(rho=0.5))):
        make_trainer(max_rounds=2, runner=runner).fit(module, federation(), algorithm)
    assert torch.equal(one.norm.running_var, other.norm.running_var)
    assert torch.equal(one.norm.num_batches_tracked, other.norm.num_batches_tracked)
    assert np.abs(vector(one) - vector(other)).max() > 1e-4


def test_weight_decay_is_taken_once_at_the_clients_model(make_trainer: MakeTrainer) -> None:
    def configure(module: Any) -> Any:
        return torch.optim.SGD(module.parameters(), lr=0.1, weight_decay=0.3)

    def local(w: np.ndarray, batches: oracle.Batches, eta: float) -> np.ndarray:
        y = w.copy()
        for batch in batches:
            g = oracle.gradient(y, *batch)
            y -= eta * (oracle.gradient(y + 0.2 * g / np.linalg.norm(g), *batch) + 0.3 * y)
        return y

    module = Perceptron(configure=configure)
    expected = oracle.fedavg(problem(rounds=3), vector(module), local)
    make_trainer(max_rounds=3, precision="64-true").fit(module, federation(), FedSAM(rho=0.2))
    np.testing.assert_allclose(vector(module), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_the_point_is_at_the_radius_of_each_client_and_stays_without_a_gradient(dtype: torch.dtype) -> None:
    params = torch.zeros(3, 4, dtype=dtype)
    gradient = torch.tensor([[3.0, 0, 4, 0], [0, 0, 0, 0], [300, 300, 300, 300]], dtype=dtype)
    context = RoundContext(Layout.of({}), Layout.of({}), num_clients=3)
    local = LocalTraining(context, {"model": params[0]}, params, gradient, lambda: None)
    point = SharpnessAware(rho=0.5).point(local)
    torch.testing.assert_close(point[0], torch.tensor([0.3, 0, 0.4, 0], dtype=dtype))
    assert not point[1].any()
    torch.testing.assert_close(point[2], torch.full((4,), 0.25, dtype=dtype))


def test_the_clock_counts_both_gradients(make_trainer: MakeTrainer) -> None:
    counts = []
    for algorithm in (FedAvg(), FedSAM()):
        trainer = make_trainer(max_rounds=1)
        trainer.fit(Perceptron(), federation(), algorithm)
        counts.append(trainer.fit_loop.rows[0]["clients/samples"])
    assert counts[1] == 2 * counts[0]


def test_networks_that_differ_in_each_step_are_refused() -> None:
    with pytest.raises(UserError, match="each step of FirstUnits trains another network, and SharpnessAware takes two"):
        FjORD(rule=SharpnessAware())


def test_refuses_a_negative_radius() -> None:
    with pytest.raises(UserError, match="rho, the radius of FedSAM's neighbourhood, must be at least 0, got -1"):
        FedSAM(rho=-1)

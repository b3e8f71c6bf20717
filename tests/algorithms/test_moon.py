"""Test MOON: its limit, the gradient of its term, the models that clients keep, the trace of the comparison, refusals."""

import copy
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from compared_runs import MakeTrainer
from roster import problem
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cosine_similarity, cross_entropy
from toys import Normalised, Perceptron, Statistics, federation, vector

from lightning_fl import UserError
from lightning_fl.algorithms import MOON, FedAvg, FedBuff
from lightning_fl.callbacks import MagnitudePruning
from lightning_fl.rules import ModelContrast


class Noisy(Normalised):
    """Perceptron with batch normalisation, dropout and an augmentation, that counts its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.steps = nn.Dropout(0.4), 0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.dropout(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        self.log("train/steps", torch.tensor(1.0))
        x, y = batch
        return self.loss((x.add_(0.1 * torch.randn_like(x)), y))


def states_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: entry.clone() for name, entry in module.state_dict().items()}


@pytest.mark.parametrize("make", [Noisy, lambda: Statistics(in_place=True), lambda: Statistics(in_place=False)])
def test_with_weight_0_it_is_fedavg_bit_for_bit(make: Any, make_trainer: MakeTrainer) -> None:
    """Test that the comparison leaves no trace in draws, statistics, attributes, batches and logs."""
    one = make()
    other = copy.deepcopy(one)
    runs = []
    for module, algorithm in ((one, FedAvg()), (other, MOON(mu=0))):
        trainer = make_trainer(max_rounds=3, local_epochs=2, runner="serial")
        trainer.fit(module, federation(), algorithm)
        runs.append(dict(trainer.callback_metrics))
    expected, found = states_of(one), states_of(other)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert getattr(one, "steps", None) == getattr(other, "steps", None)
    runs[0].pop("clients/samples"), runs[1].pop("clients/samples")
    assert {n: x for n, x in runs[0].items() if "time" not in n} == {
        n: x for n, x in runs[1].items() if "time" not in n
    }


def test_with_a_weight_it_is_not_fedavg_from_the_second_round_on(make_trainer: MakeTrainer) -> None:
    """In its first round a client has no model but the received one, so that the term is constant."""
    apart = []
    for rounds in (1, 2):
        models = []
        for algorithm in (FedAvg(), MOON(mu=5.0)):
            torch.manual_seed(3)
            module = Perceptron()
            make_trainer(max_rounds=rounds, clients_per_round=6, precision="64-true").fit(
                module, federation(), algorithm
            )
            models.append(vector(module))
        apart.append(np.abs(models[0] - models[1]).max())
    assert apart[0] < 1e-12
    assert apart[1] > 1e-4


def test_the_gradient_of_the_term_is_autograds_of_the_papers_formula() -> None:
    torch.manual_seed(1)
    body = nn.Sequential(nn.Linear(3, 5), nn.Tanh()).double()
    x = torch.randn(7, 3, dtype=torch.float64)
    others = [body[1](nn.Linear(3, 5).double()(x)).detach() for _ in range(2)]
    for tau in (0.5, 0.02):
        params = {name: p.detach().clone().requires_grad_() for name, p in body.named_parameters()}
        z = functional_call(body, params, (x,))
        logits = torch.stack([cosine_similarity(z, other) for other in others], dim=1) / tau
        expected = 3.0 * cross_entropy(logits, torch.zeros(7, dtype=torch.int64))
        found = ModelContrast(mu=3.0, tau=tau).penalty(body(x), others)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        gradients = torch.autograd.grad(found, list(body.parameters()))
        for one, other in zip(gradients, torch.autograd.grad(expected, list(params.values())), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_clients_keep_their_last_models(make_trainer: MakeTrainer) -> None:
    module, expected = Perceptron(), dict[int, np.ndarray]()
    oracle.moon(problem(rounds=4), vector(module), mu=2.0, tau=0.5, models=expected)
    trainer = make_trainer(max_rounds=4, precision="64-true")
    trainer.fit(module, federation(), MOON(mu=2.0))
    assert trainer.run.clients.keys() == expected.keys()
    for client, model in expected.items():
        np.testing.assert_allclose(trainer.run.clients[client]["last"].numpy(), model, rtol=0, atol=1e-10)


def test_the_last_model_has_its_own_running_statistics(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=2, clients_per_round=6)
    trainer.fit(Normalised(), federation(), MOON())
    kept = torch.stack([state["last/buffers"] for state in trainer.run.clients.values()])
    assert kept.shape == (6, 6)
    assert not torch.isclose(kept, trainer.run.buffers).all()


def test_the_term_counts_in_the_training_and_not_in_the_logged_loss(make_trainer: MakeTrainer) -> None:
    losses = []
    for mu in (0.0, 50.0):
        torch.manual_seed(3)
        trainer = make_trainer(max_rounds=1, local_steps=1, clients_per_round=6)
        trainer.fit(Perceptron(), federation(), MOON(mu=mu))
        losses.append(float(trainer.callback_metrics["train/loss"]))
    assert losses[0] == losses[1]


MODES: list[bool] = []


class Watched(Perceptron):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        MODES.append(self.training)
        return super().training_step(batch, batch_idx)


def test_the_other_models_are_in_evaluation_mode(make_trainer: MakeTrainer) -> None:
    MODES.clear()
    make_trainer(max_rounds=1, clients_per_round=1, local_steps=3, num_sanity_val_steps=0).fit(
        Watched(), federation(), MOON()
    )
    assert MODES[-9:] == 3 * [False, False, True]


def test_a_layer_may_be_named(make_trainer: MakeTrainer) -> None:
    models = []
    for layer in (None, "output", "hidden"):
        torch.manual_seed(3)
        module = Perceptron()
        make_trainer(max_rounds=3).fit(module, federation(), MOON(mu=5.0, layer=layer))
        models.append(vector(module))
    np.testing.assert_array_equal(models[0], models[1])
    # The inputs of the first layer are the samples, by every model alike.
    torch.manual_seed(3)
    module = Perceptron()
    make_trainer(max_rounds=3).fit(module, federation(), FedAvg())
    np.testing.assert_array_equal(models[2], vector(module))
    assert np.abs(models[0] - models[2]).max() > 1e-4


class WithoutLinear(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.output = nn.Conv1d(3, 4, 1), nn.Conv1d(4, 2, 1)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.output(torch.tanh(self.hidden(x[..., None])))[..., 0]


class Unused(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("module", "algorithm", "sentence"),
    [
        (
            WithoutLinear,
            MOON(),
            "inputs of the last linear layer, and WithoutLinear has none: name the layer .*hidden, output",
        ),
        (Perceptron, MOON(layer="outptu"), "Perceptron has no layer 'outptu'; did you mean 'output'"),
        (Unused, MOON(), "training_step of Unused does not call probe, .* name another layer"),
    ],
)
def test_refuses_networks_without_the_layer(
    module: Any, algorithm: Any, sentence: str, make_trainer: MakeTrainer
) -> None:
    with pytest.raises(UserError, match=sentence):
        make_trainer().fit(module(), federation(), algorithm)


def test_a_convolution_may_be_named(make_trainer: MakeTrainer) -> None:
    torch.manual_seed(3)
    one = WithoutLinear()
    other = copy.deepcopy(one)
    make_trainer(max_rounds=3).fit(one, federation(), MOON(mu=5.0, layer="output"))
    make_trainer(max_rounds=3).fit(other, federation(), FedAvg())
    assert np.abs(vector(one) - vector(other)).max() > 1e-4


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"runner": "stacked"}, "runner 'stacked' cannot read representations by other models, as ModelContrast does"),
        ({"runner": "lightning", "clients_per_round": 1}, "ModelContrast"),
    ],
)
def test_refuses_runners_that_compare_nothing(flags: Any, sentence: str, make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match=sentence):
        make_trainer(**flags).fit(Perceptron(), federation(), MOON())


def test_follows_a_mask_and_rounds_that_wait_for_nobody(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=4, callbacks=MagnitudePruning(rate=0.5, prune_epoch=2))
    trainer.fit(Perceptron(), federation(), MOON())
    assert trainer.run.mask is not None
    for state in trainer.run.clients.values():
        assert not state["last"][~trainer.run.mask].any()
    asynchronous = make_trainer(max_rounds=4)
    asynchronous.fit(Perceptron(), federation(), FedBuff(rule=ModelContrast(mu=5.0)))
    assert all(state["last"].any() for state in asynchronous.run.clients.values())


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"mu": -1}, "mu, the weight of MOON's contrastive loss, must be at least 0, got -1"),
        ({"tau": 0}, "must be positive, got 0"),
    ],
)
def test_refuses_values_out_of_range(given: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        MOON(**given)

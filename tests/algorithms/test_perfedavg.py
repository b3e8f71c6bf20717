"""Test Per-FedAvg: its gradient, its fixed point, what clients predict with, refusals."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer
from lightning.pytorch import Callback
from quadratics import Quadratics, Regression
from toys import SIZES, Normalised, Perceptron, federation, samples, vector

from lightning_fl import UserError
from lightning_fl.algorithms import Algorithm, Ditto, FedAvg, PerFedAvg, PFedMe
from lightning_fl.callbacks import ClientEvaluation, TargetReached
from lightning_fl.features.privacy import ClientPrivacy
from lightning_fl.personal import AdaptedModel
from lightning_fl.rules import MetaGradient, meta_gradient


class Batches(Callback):
    """Callback that keeps the batches of the clients."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found.append([x.clone() for x in batch])


def gradients(module: Perceptron, params: list[torch.Tensor], batch: Any, graph: bool = False) -> list[torch.Tensor]:
    """Return autograd's gradient of the loss of a batch at other parameters."""
    named = dict(zip(dict(module.named_parameters()), params, strict=True))

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self) -> torch.Tensor:
            return module.loss(batch)

    loss = torch.func.functional_call(Loss(), {f"inner.{name}": x for name, x in named.items()}, ())
    return list(torch.autograd.grad(loss, params, create_graph=graph))


def test_the_upload_is_a_step_by_autograds_first_order_gradient(make_trainer: MakeTrainer) -> None:
    """Check one client with two minibatches, and that the exact gradient, through the step to ŷ, would be another."""
    module, watch, beta, eta = Perceptron().double(), Batches(), 0.3, 0.1
    before = copy.deepcopy(module)
    trainer = make_trainer(max_rounds=1, clients_per_round=1, precision="64-true", callbacks=watch, runner="serial")
    trainer.fit(module, federation((8,)), PerFedAvg(beta))
    first, second = watch.found
    params = [p.detach().clone().requires_grad_() for p in before.parameters()]
    adapted = [p - beta * g for p, g in zip(params, gradients(before, params, first, graph=True), strict=True)]
    leaves = [x.detach().requires_grad_() for x in adapted]
    at_adapted = gradients(before, leaves, second)
    expected = [p - eta * g for p, g in zip(params, at_adapted, strict=True)]
    exact = torch.autograd.grad(adapted, params, at_adapted)
    ends = [torch.cat([x.detach().flatten() for x in each]).numpy() for each in (expected, exact, at_adapted)]
    np.testing.assert_allclose(vector(module), ends[0], rtol=0, atol=1e-12)
    assert np.abs(ends[1] - ends[2]).max() > 1e-3


def test_converges_to_the_model_whose_gradients_after_the_step_cancel(make_trainer: MakeTrainer) -> None:
    """Check Σ_k ∇F_k(w − β∇F_k(w)) = 0 on quadratics, where it is Σ_k A_k(I − βA_k)(w − b_k), and not FedAvg's optimum."""
    given, beta = Quadratics.drawn(num_clients=3, least=0.3), 0.5
    adapted = Quadratics(np.stack([a @ (np.eye(4) - beta * a) for a in given.curvatures]), given.optima)
    module = Regression(4)
    flags = {"clients_per_round": 3, "max_rounds": 120, "local_steps": 2, "precision": "64-true"}
    make_trainer(**flags).fit(module, given.data(), PerFedAvg(beta))
    np.testing.assert_allclose(vector(module), adapted.optimum, atol=1e-6)
    assert np.abs(adapted.optimum - given.optimum).max() > 0.05


class OnItsOwn(Callback):
    """Callback that measures each client's own model by hand after each round, and compares the module that a hook gets."""

    def __init__(self, beta: float, x: torch.Tensor, y: torch.Tensor) -> None:
        self.beta, self.x, self.y = beta, x, y
        self.means, self.servers = list[float](), list[float]()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        params, data, losses = list(pl_module.parameters()), trainer.datamodule, []
        test = [z.to(params[0].dtype) for z in samples(10, seed=1)]
        self.servers.append(float(pl_module.loss(test).detach()))
        for client in range(len(SIZES)):
            rows = data.client_indices[client][:4]
            batch = [z[rows].to(params[0].dtype) for z in (self.x, self.y)]
            steps = torch.autograd.grad(pl_module.loss(batch), params)
            with torch.no_grad():
                for param, step in zip(params, steps, strict=True):
                    param -= self.beta * step
                losses.append(float(pl_module.loss(test)))
                own = vector(pl_module)
                for param, step in zip(params, steps, strict=True):
                    param += self.beta * step
            with trainer.client_model(client) as module:
                np.testing.assert_allclose(vector(module), own, rtol=0, atol=1e-12)
        self.means.append(sum(losses) / len(losses))


@pytest.mark.parametrize("runner", ["serial", "stacked"])
def test_clients_predict_after_one_step_from_the_present_model(
    runner: str, make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    """Check clients that take part and those that never do; validation of the checkpoint finds the same."""
    watch, module = OnItsOwn(0.3, *samples(sum(SIZES))), Perceptron()
    flags = {"precision": "64-true", "runner": runner, "clients_per_round": 2}
    trainer = make_trainer(max_rounds=2, callbacks=watch, **flags, **keeps_files)
    trainer.fit(module, federation(), PerFedAvg(0.3))
    found = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
    assert found["val/loss"] == pytest.approx(watch.means[-1], rel=1e-9)
    assert found["val/loss_server"] == pytest.approx(watch.servers[-1], rel=1e-9)
    assert abs(watch.means[-1] - watch.servers[-1]) > 1e-3
    assert not trainer.run.clients, "nothing is kept"
    other = make_trainer(**flags)
    (again,) = other.validate(
        Perceptron(), federation(), algorithm=PerFedAvg(0.3), ckpt_path=tmp_path / "checkpoints/last.ckpt"
    )
    assert again["val/loss"] == pytest.approx(found["val/loss"], rel=1e-9)


def test_the_evaluation_of_clients_adapts_too_and_leaves_no_trace(make_trainer: MakeTrainer) -> None:
    """Check own held-out samples, with batch normalisation: the model is what it would be without validation."""
    ends, start = [], Normalised()
    for extra in ({"val_every_n_rounds": 5}, {"callbacks": ClientEvaluation(1)}):
        module, data = copy.deepcopy(start), federation()
        data.val_fraction = 0.3
        trainer = make_trainer(max_rounds=3, precision="64-true", **extra)
        trainer.fit(module, data, PerFedAvg(0.3))
        ends.append(module.state_dict())
    for name, value in ends[0].items():
        assert torch.equal(value, ends[1][name]), name
    metrics = trainer.callback_metrics
    assert float(metrics["val/loss_clients_mean"]) == pytest.approx(float(metrics["val/loss_local"]), rel=1e-9)
    assert abs(float(metrics["val/loss_clients_mean"]) - float(metrics["val/loss_server"])) > 1e-3


def test_parts_of_it_combine_with_other_methods(make_trainer: MakeTrainer) -> None:
    """Check that clients of FedAvg may adapt its model, which trains as without."""
    ends = []
    for personal in ([], [AdaptedModel(0.3)]):
        torch.manual_seed(0)
        module = Perceptron()
        trainer = make_trainer()
        trainer.fit(module, federation(), FedAvg(personal=personal))
        ends.append((vector(module).tolist(), float(trainer.callback_metrics["val/loss"])))
    assert ends[0][0] == ends[1][0]
    assert ends[0][1] != ends[1][1]


def test_a_client_with_one_minibatch_is_told_of(make_trainer: MakeTrainer) -> None:
    module = Perceptron()
    before = vector(module)
    meta_gradient.WARNINGS.clear()  # which another test may have filled
    with pytest.warns(UserWarning, match="A client has read one minibatch .* its upload changes nothing"):
        make_trainer(clients_per_round=1).fit(module, federation((4,)), Algorithm(MetaGradient()))
    assert np.array_equal(vector(module), before)


@pytest.mark.parametrize(
    ("make", "flags", "words"),
    [
        (lambda: PerFedAvg(beta=0.0), {}, ["beta", "0.0"]),
        (lambda: PerFedAvg(personal=[AdaptedModel()]), {}, ["PerFedAvg fills the slot personal itself"]),
        (lambda: Ditto(FedAvg(personal=[AdaptedModel()])), {}, ["AdaptedModel and PersonalModel", "leave one out"]),
        (
            lambda: PerFedAvg(),
            {"privacy": ClientPrivacy(noise_multiplier=1.0), "callbacks": TargetReached(0.9, "val/accuracy")},
            ["TargetReached acts on val/accuracy, which PerFedAvg measures with what clients own"],
        ),
        (lambda: Algorithm(personal=[AdaptedModel(), *PFedMe().personal]), {}, ["AdaptedModel and KeptModel"]),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    make: Callable[[], Algorithm], flags: dict[str, Any], words: list[str], make_trainer: MakeTrainer
) -> None:
    with pytest.raises(UserError) as error:
        make_trainer(**flags).fit(Perceptron(), federation(), make())
    assert [word for word in words if word not in str(error.value)] == []

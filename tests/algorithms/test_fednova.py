"""Test FedNova: limits, a case computed by hand, the normalisers of momentum and the proximal term, refusals."""

from collections.abc import Callable
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import oracle
import pytest
import torch
from compared_runs import MakeTrainer
from lightning.pytorch import Callback
from roster import problem
from torch import Tensor, nn
from toys import SIZES, Perceptron, federation, vector

from lightning_fl import UserError
from lightning_fl.aggregators import KeepUploads, NormalisedMean
from lightning_fl.algorithms import Algorithm, FedAvg, FedNova, FedProx
from lightning_fl.exchanges import WithSampleCount
from lightning_fl.rules import Normalised


def momentum(rho: float, **options: Any) -> Callable[[Any], Any]:
    return lambda module: torch.optim.SGD(module.parameters(), lr=0.1, momentum=rho, **options)


def after(make_trainer: MakeTrainer, algorithm: Algorithm, sizes: Any = SIZES, module: Any = None, **flags: Any) -> Any:
    """Return the final model of a run from the test's seed."""
    torch.manual_seed(3)
    module = module() if module else Perceptron()
    make_trainer(**{"max_rounds": 4, **flags}).fit(module, federation(sizes), algorithm)
    return vector(module)


@pytest.mark.parametrize("configure", [None, momentum(0.7)], ids=["plain", "momentum"])
@pytest.mark.parametrize(
    "plan", [{"local_steps": 5}, {"local_epochs": 2, "sizes": (5, 8, 7, 6)}], ids=["steps", "epochs"]
)
def test_is_fedavg_where_all_make_equally_many_steps(
    plan: dict[str, Any], configure: Any, make_trainer: MakeTrainer
) -> None:
    """Test equal and unequal numbers of samples."""
    nova, average = (
        after(make_trainer, algorithm, module=lambda: Perceptron(configure=configure), **plan)
        for algorithm in (FedNova(), FedAvg())
    )
    np.testing.assert_allclose(nova, average, rtol=0, atol=1e-6)


def test_is_not_fedavg_where_they_do_not(make_trainer: MakeTrainer) -> None:
    assert np.abs(after(make_trainer, FedNova()) - after(make_trainer, FedAvg())).max() > 1e-4


def test_with_a_proximal_term_and_equal_steps_it_is_fedprox_but_for_the_length(make_trainer: MakeTrainer) -> None:
    """Check the ratio: τ_eff = τ where FedProx has a: 5 steps with ημ = 0.05 make a = (1 − 0.95⁵)/0.05."""
    torch.manual_seed(3)
    start = vector(Perceptron())
    nova, prox = (
        after(make_trainer, algorithm, local_steps=5, max_rounds=1, precision="64-true") - start
        for algorithm in (FedNova(mu=0.5), FedProx(mu=0.5))
    )
    np.testing.assert_allclose(nova, prox * 5 / ((1 - 0.95**5) / 0.05), rtol=0, atol=1e-9)


class Slope(L.LightningModule):
    """Module with one number w and the loss w · mean(x), whose gradient does not depend on w; a buffer counts samples."""

    def __init__(self, rho: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([2.0]))
        self.rho = rho
        self.register_buffer("seen", torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += len(batch[0])
        return (self.w * batch[0][:, :1]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=self.rho)


@pytest.mark.parametrize(
    ("rho", "lengths"),
    # Heavy ball: velocities 1; 1, 1.5; 1, 1.5, 1.75.
    [(0.0, (1.0, 3.0)), (0.5, (1.0, 4.25))],
)
def test_unequal_steps_by_hand(rho: float, lengths: tuple[float, float], make_trainer: MakeTrainer) -> None:
    """Check clients of 4 and 12 samples, 1 and 3 steps, constant gradients 1 and −2, p = ¼ and ¾."""
    data = federation(sizes=(4, 12))
    data.setup("fit")
    x = torch.zeros(16, 3)
    for rows, slope in zip(data.client_indices, (1.0, -2.0), strict=True):
        x[rows, 0] = slope
    module = Slope(rho)
    trainer = make_trainer(max_rounds=1, clients_per_round=2)
    trainer.fit(module, federation(sizes=(4, 12), train=(x, torch.zeros(16, 2))), FedNova())
    tau_eff = 0.25 * lengths[0] + 0.75 * lengths[1]
    assert module.w.item() == pytest.approx(2 - 0.1 * tau_eff * (0.25 * 1 + 0.75 * -2), abs=1e-6)
    assert module.seen.item() == pytest.approx(0.25 * 4 + 0.75 * 12), "buffers are averaged as in FedAvg"
    bits = trainer.run.ledger.round_bits["up"]
    assert [bits[kind] for kind in ("model", "buffers", "scalars")] == [2 * 32, 2 * 32, 2 * (32 + 32)]


@pytest.mark.parametrize("runner", ["serial", "stacked"])
@pytest.mark.parametrize("rho", [0.5, 0.9])
def test_the_normaliser_of_momentum_is_the_papers(rho: float, runner: str, make_trainer: MakeTrainer) -> None:
    module = Perceptron(configure=momentum(rho))
    expected = oracle.fednova(problem(rounds=4, epochs=2), vector(module), rho=rho)
    trainer = make_trainer(max_rounds=4, local_epochs=2, precision="64-true", runner=runner)
    trainer.fit(module, federation(), FedNova())
    np.testing.assert_allclose(vector(module), expected, rtol=0, atol=1e-10)


def adam(module: Any) -> Any:
    return torch.optim.Adam(module.parameters(), lr=0.05)


def test_with_another_optimiser_steps_are_counted(make_trainer: MakeTrainer) -> None:
    nova, average = (
        after(make_trainer, algorithm, module=lambda: Perceptron(configure=adam), local_steps=3)
        for algorithm in (FedNova(), FedAvg())
    )
    np.testing.assert_allclose(nova, average, rtol=0, atol=1e-6)


def groups(module: Any) -> Any:
    return torch.optim.SGD(
        [{"params": module.hidden.parameters(), "momentum": 0.5}, {"params": module.output.parameters()}], lr=0.1
    )


def cycled(module: Any) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)
    return [optimizer], [{"scheduler": cycle, "interval": "step"}]


@pytest.mark.parametrize(
    "configure",
    [momentum(0.9, nesterov=True), momentum(0.9, dampening=0.5), groups, cycled],
    ids=["nesterov", "damped", "groups", "cycled"],
)
def test_momentum_whose_normaliser_is_unknown_is_refused(configure: Any, make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match="one momentum, without dampening and nesterov"):
        make_trainer().fit(Perceptron(configure=configure), federation(), FedNova())


class Idle(Perceptron):
    """Module that skips batches of three samples; one client has only such batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        return None if len(batch[0]) == 3 else self.loss(batch)


def test_a_client_that_makes_no_step_is_rejected(make_trainer: MakeTrainer) -> None:
    counts = []

    class Watch(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            counts.append([int(trainer.callback_metrics[f"clients/{x}"]) for x in ("accepted", "rejected")])

    module = Idle()
    make_trainer(clients_per_round=3, callbacks=Watch()).fit(module, federation(sizes=(3, 4, 8)), FedNova())
    assert counts == [[2, 1]] * 2
    assert np.isfinite(vector(module)).all()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FedNova(mu=-0.1), ["mu", "at least 0", "-0.1"]),
        (lambda: FedNova(mu=float("nan")), ["mu", "nan"]),
        (lambda: NormalisedMean("step"), ["'step'", "did you mean 'steps'"]),  # type: ignore[arg-type]
        (
            lambda: Algorithm(aggregator=NormalisedMean()),
            ["NormalisedMean needs 'scalars/normaliser'", "LocalOptimizer"],
        ),
        (lambda: Algorithm(aggregator=KeepUploads(NormalisedMean())), ["KeepUploads needs 'scalars/normaliser'"]),
    ],
)
def test_bad_input_is_refused_in_a_sentence(make: Callable[[], Any], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        make()
    assert [word for word in words if word not in str(error.value)] == []


def test_the_parts_put_together_by_hand_are_fednova(make_trainer: MakeTrainer) -> None:
    parts = Algorithm(rule=Normalised(), exchange=WithSampleCount(), aggregator=NormalisedMean())
    np.testing.assert_array_equal(after(make_trainer, parts), after(make_trainer, FedNova()))

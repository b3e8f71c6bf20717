"""Test training and accuracy on the server's own samples, and bits sent before the first round."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from compared_runs import MakeTrainer
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Callback
from roster import problem
from torchmetrics import MeanMetric
from toys import BATCH_SIZE, Normalised, Perceptron, Served, Unlabelled, federation, read_rows, samples, vector

from lightning_fl import UserError
from lightning_fl.algorithms import Algorithm, DataSharing, FedAvg, FedDF, FedDU, FedDUDA, FedDUS, FedKT
from lightning_fl.engine.server_side import accuracy_in
from lightning_fl.slots import ServerTurn, State
from lightning_fl.steps import Apply, DynamicServerUpdate


def test_the_whole_server_update_is_a_clients_training_from_the_average(make_trainer: MakeTrainer) -> None:
    """Compare FedDU-S with all its steps with plain PyTorch, running statistics and counters included."""
    module = Normalised()
    averaged = copy.deepcopy(module)
    make_trainer(max_rounds=1, local_epochs=2).fit(averaged, Served(9), FedAvg())
    trainer = make_trainer(max_rounds=1, local_epochs=2)
    trainer.fit(module, Served(9), FedDUS(tau_eff="full"))
    optimizer, num_steps = averaged.configure_optimizers(), 0
    for x, y in problem(rounds=1, epochs=2, num_server=9).server_batches(0):
        if len(x) > 1:
            num_steps += 1
            optimizer.zero_grad()
            averaged.loss((torch.tensor(x).float(), torch.tensor(y).float())).backward()
            optimizer.step()
    for name, value in averaged.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=0, atol=2e-6, msg=name)
    assert trainer.callback_metrics["feddu/tau_eff"] == num_steps == 4
    assert int(module.norm.num_batches_tracked) > 4, "it must continue from the clients' maximum"


@pytest.mark.parametrize(
    ("flags", "num_steps"),
    [
        ({"local_epochs": 2}, 2 * 3),
        ({"local_steps": 5}, 5),
        ({"local_epochs": 2, "limit_train_batches": 2}, 2 * 2),
        ({"local_epochs": 3, "accumulate_grad_batches": 2}, 3 * 2),
        ({"local_epochs": 1, "fast_dev_run": True}, 1),
    ],
    ids=str,
)
def test_the_server_trains_as_long_as_a_client_of_its_size(
    flags: dict[str, Any], num_steps: int, make_trainer: MakeTrainer
) -> None:
    alone, both = (make_trainer(max_rounds=1, **flags) for _ in range(2))
    alone.fit(Perceptron(), Served(9), FedAvg())
    both.fit(Perceptron(), Served(9), FedDUS(tau_eff="full"))
    assert both.callback_metrics["feddu/tau_eff"] == num_steps
    assert both.global_step == alone.global_step + num_steps, "the server's optimiser steps must be counted too"


def decaying(module: Any) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    by_round = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    by_step = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    return [optimizer], [{"scheduler": by_round, "interval": "epoch"}, {"scheduler": by_step, "interval": "step"}]


def test_the_server_follows_the_clients_learning_rate(make_trainer: MakeTrainer) -> None:
    module = Perceptron(configure=decaying)
    models = []

    class Watch(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            models.append(copy.deepcopy(pl_module))

    make_trainer(max_rounds=1, local_epochs=1, callbacks=Watch()).fit(copy.deepcopy(module), Served(9), FedAvg())
    second = make_trainer(max_rounds=2, local_epochs=1, callbacks=Watch())
    second.fit(copy.deepcopy(module), Served(9), FedDUS(tau_eff="full"))
    y, eta = vector(models[0]), 0.1
    for batch in problem(rounds=1, num_server=9).server_batches(0):
        y, eta = y - eta * oracle.gradient(y, *batch), eta / 2
    np.testing.assert_allclose(vector(models[1]), y, rtol=0, atol=1e-6)
    assert not np.allclose(vector(models[1]), vector(models[2]))


def test_callbacks_see_no_validation_when_the_server_judges(make_trainer: MakeTrainer) -> None:
    seen: list[str] = []

    class Watch(Callback):
        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            seen.append("validation")

    make_trainer(max_rounds=2, limit_val_batches=0, callbacks=Watch()).fit(Perceptron(), Served(9), FedDU())
    assert seen == []


class LogsAtTheEnd(Perceptron):
    """Module that collects hits in the steps and logs the accuracy at the end."""

    def on_validation_epoch_start(self) -> None:
        self.hits: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.hits += (self(x).argmax(1) == y.argmax(1)).float().tolist()

    def on_validation_epoch_end(self) -> None:
        self.log("valid/acc", sum(self.hits) / len(self.hits))


class Metered(Perceptron):
    """Module that logs a torchmetrics object in training, and another in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.samples, self.right = MeanMetric(), MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.samples(loss.detach())
        self.log("train/mean", self.samples)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.right(self(x).argmax(1) == y.argmax(1))
        self.log("val_acc", self.right)


def test_the_servers_training_stays_out_of_the_clients_metrics(make_trainer: MakeTrainer) -> None:
    module = Metered()
    clients, both = (make_trainer(max_rounds=1) for _ in range(2))
    clients.fit(copy.deepcopy(module), Served(9), FedAvg())
    both.fit(module, Served(9), FedDU())
    for name in ("train/mean", "train/loss"):
        assert both.callback_metrics[name] == clients.callback_metrics[name]


@pytest.mark.parametrize("kind", [Perceptron, Metered, LogsAtTheEnd])
def test_the_accuracy_is_of_the_averaged_model_on_all_server_samples(
    kind: type[Perceptron], make_trainer: MakeTrainer
) -> None:
    module = kind()
    averaged = copy.deepcopy(module)
    make_trainer(max_rounds=1).fit(averaged, Served(9), FedAvg())
    trainer = make_trainer(max_rounds=1)
    trainer.fit(module, Served(9), FedDU())
    given = problem(rounds=1, num_server=9)
    with torch.no_grad():
        right = averaged(torch.tensor(given.server_x).float()).argmax(1).numpy() == given.server_y.argmax(1)
    assert trainer.callback_metrics["feddu/accuracy"] == pytest.approx(right.mean(), abs=1e-6)


@dataclass(frozen=True)
class ReadLogits(Apply):
    """`Apply` that keeps the server's model's outputs on the server's first two samples, after the clients have trained."""

    found: list[torch.Tensor] = field(default_factory=list)

    def __call__(self, turn: ServerTurn, state: State) -> State:
        inputs = next(turn.server.inputs(torch.arange(2), batch_size=2))
        self.found.append(turn.server.logits(turn.params, turn.proposed_buffers, inputs).detach())
        return super().__call__(turn, state)


def test_logits_are_of_the_layers_that_clients_begin_with_not_of_a_clients_own(make_trainer: MakeTrainer) -> None:
    module, step, data = Perceptron(), ReadLogits(), Served(9)
    initial = copy.deepcopy(module)
    make_trainer(max_rounds=1).fit(module, data, Algorithm(personal=["output"], steps=[step]))
    x = data.train.inputs[torch.as_tensor(data.server_indices[:2])]
    torch.testing.assert_close(step.found[0], initial(x).detach())


@pytest.mark.parametrize("method", [FedDUS(tau_eff=3), FedDU()], ids=["FedDUS", "FedDU"])
def test_server_training_that_is_not_finite_counts_for_nothing_and_is_said(
    method: Algorithm, make_trainer: MakeTrainer, says_lost: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    x, y = samples(49)
    data = Served(9)
    data.setup("fit")
    x[data.server_indices[0]] = torch.nan
    one = Perceptron()
    other = copy.deepcopy(one)
    trainer = make_trainer(max_rounds=3)
    with says_lost(
        "Round 1: the server's training on its own samples changed nothing, because its result was not finite"
    ):
        trainer.fit(one, Served(9, (x, y)), method)
    assert sum("the server's training" in record.getMessage() for record in caplog.records) == 1, "once in a run"
    make_trainer(max_rounds=3).fit(other, Served(9, (x, y)), FedAvg())
    assert trainer.callback_metrics["feddu/alpha"] > 0
    assert trainer.callback_metrics["feddu/tau_eff"] == 0
    np.testing.assert_array_equal(vector(one), vector(other))


def test_a_warm_up_that_is_not_finite_is_said(make_trainer: MakeTrainer, says_lost: Callable[..., Any]) -> None:
    x, y = samples(49)
    with says_lost("Before round 1: the server's training on its own samples changed nothing"):
        make_trainer(max_rounds=0).fit(Perceptron(), Served(9, (x * torch.nan, y)), DataSharing(warmup_epochs=1))


@pytest.mark.parametrize(
    "make",
    [
        lambda: FedDF(max_steps=3),
        lambda: FedKT(mode="one_shot", preset="light", epochs=1),
    ],
    ids=["FedDF", "FedKT"],
)
def test_the_server_leaves_alone_what_the_optimizer_lacks(
    make: Callable[[], Algorithm], make_trainer: MakeTrainer
) -> None:
    module = Perceptron(configure=lambda m: torch.optim.SGD(m.output.parameters(), lr=0.1))
    before = copy.deepcopy(module.state_dict())
    make_trainer(max_rounds=2).fit(module, Served(9), make())
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]) == name.startswith("hidden"), name


# -- what crosses before the first round ------------------------------------------------------------------------------


def test_label_histograms_are_booked_once_as_set_up(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    make_trainer(max_rounds=1, **keeps_files).fit(Perceptron(), Served(9), FedDU())
    trainer = make_trainer(max_rounds=3, **keeps_files)
    trainer.fit(Perceptron(), Served(9), FedDU(), ckpt_path="last")
    setup = 6 * (32 * 2 + 32)
    assert trainer.run.ledger.setup() == {"up": setup, "down": 0}
    for done, row in enumerate(read_rows(tmp_path), start=1):
        assert int(row["comm/uplink_bits"]) == 3 * 32 * 26
        assert int(row["comm/setup_uplink_bits"]) == setup
        assert int(row["comm/total_uplink_bytes"]) == done * 3 * 4 * 26 + setup // 8
        assert int(row["comm/total_downlink_bytes"]) == done * 3 * 4 * 26


@pytest.mark.parametrize(
    "make", [DataSharing, lambda **slots: FedKT(preset="light", epochs=1, **slots)], ids=["DataSharing", "FedKT"]
)
def test_further_steps_of_a_method_with_set_up_have_theirs(
    make: Callable[..., Algorithm], make_trainer: MakeTrainer
) -> None:
    trainer = make_trainer(max_rounds=1)
    trainer.fit(Perceptron(), Served(9), make(steps=[DynamicServerUpdate()]))
    assert trainer.run.ledger.setup_bits["up"]["scalars"] == 6 * (32 * 2 + 32)


def test_methods_without_set_up_have_no_columns_for_it(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=1)
    trainer.fit(Perceptron(), Served(9), FedDUS(tau_eff=2))
    assert not [name for name in trainer.callback_metrics if "setup" in name]


def test_clients_that_hold_more_leave_the_data_module_as_it_was() -> None:
    data = Served(9)
    data.setup("fit")
    sizes, histograms = data.client_sizes.copy(), data.label_histograms.copy()
    larger = data.enlarged([data.server_indices[:2]] * 6)
    assert larger.client_sizes.tolist() == [size + 2 for size in sizes]
    assert larger.label_histograms.sum() == histograms.sum() + 12
    assert len(larger.client(0)) == len(data.client(0)) + 2
    assert data.client_sizes.tolist() == sizes.tolist()
    np.testing.assert_array_equal(data.label_histograms, histograms)


# -- what a user may get wrong ----------------------------------------------------------------------------------------


class LogsLoss(Perceptron):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch))


class LogsPercent(Perceptron):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/accuracy", 40.0)


@pytest.mark.parametrize(
    ("module", "data", "algorithm", "sentence"),
    [
        (Perceptron(), federation(), FedDU(), "server_fraction"),
        (Perceptron(), federation(), FedDUS(), "server_fraction"),
        (Perceptron(), Unlabelled(9), FedDU(), "labels"),
        (LogsLoss(), Served(9), FedDU(), "LogsLoss log 'val/accuracy'; it logs 'val/loss'"),
        (LogsPercent(), Served(9), FedDU(), r"\[0, 1\], but the validation_step of LogsPercent logs 40"),
    ],
    ids=["no server data", "no server data for the static update", "no labels", "no accuracy", "percent"],
)
def test_what_a_server_step_lacks_is_said_before_training(
    module: Perceptron, data: Any, algorithm: Any, sentence: str, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    before = vector(module)
    with pytest.raises(UserError, match=sentence):
        make_trainer(logger=True).fit(module, data, algorithm)
    np.testing.assert_array_equal(vector(module), before)
    assert list(tmp_path.iterdir()) == []


def test_names_of_an_accuracy() -> None:
    assert accuracy_in({"val/accuracy": 0.5, "val/top5_accuracy": 0.9}, "FedAP", "M") == 0.5
    assert accuracy_in({"val_acc": 0.5, "val_accrued": 3.0}, "FedAP", "M") == 0.5
    with pytest.raises(UserError, match="'acc', 'top5_acc'"):
        accuracy_in({"acc": 0.5, "top5_acc": 0.9}, "FedAP", "M")


def test_steps_beyond_the_servers_are_allowed_with_a_warning(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=1)
    with pytest.warns(UserWarning, match="more than the 3 steps"):
        trainer.fit(Perceptron(), Served(9), FedDUS(tau_eff=6))
    assert trainer.callback_metrics["feddu/alpha"] == 6 / (9 // BATCH_SIZE + 1)


class Adaptive(Perceptron):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def test_a_servers_rule_that_steps_itself_needs_plain_sgd_as_a_clients_does(make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match="Adaptive has Adam"):
        make_trainer().fit(Adaptive(), Served(9), FedDUDA())


# -- the size of the dynamic update -----------------------------------------------------------------------------------

shares = st.floats(0.01, 1)


@pytest.mark.long
@given(accuracy=st.floats(0, 1), cohort=shares, server=shares, less=st.floats(0.1, 0.9), t=st.integers(0, 50))
def test_alpha_falls_with_accuracy_time_and_the_servers_degree_and_rises_with_the_cohorts(
    accuracy: float, cohort: float, server: float, less: float, t: int
) -> None:
    for f in ("one_minus", "inverse"):
        alpha = DynamicServerUpdate(f=f, decay=0.9, alpha_max=1e9).alpha  # type: ignore[arg-type]
        here = alpha(accuracy, cohort, server, 100, 1000, t)
        assert alpha(accuracy * less, cohort, server, 100, 1000, t) >= here
        assert alpha(accuracy, cohort, server, 100, 1000, t + 1) <= here
        assert alpha(accuracy, cohort * less, server, 100, 1000, t) <= here
        assert alpha(accuracy, cohort, server * less, 100, 1000, t) >= here


def test_alpha_in_its_limits() -> None:
    step = DynamicServerUpdate(decay=1.0)
    assert step.alpha(1.0, 0.3, 0.3, 100, 1000, 0) == 0
    assert step.alpha(0.0, 0.0, 0.0, 100, 300, 0) == 0.25
    assert DynamicServerUpdate(f="inverse").alpha(0.0, 0.5, 0.0, 100, 300, 0) == 1
    assert DynamicServerUpdate(C=1.5).alpha(0.0, 0.5, 0.0, 100, 300, 0) == 1.5
    assert DynamicServerUpdate(f="inverse", alpha_max=50.0).alpha(0.0, 0.5, 0.0, 100, 300, 0) == 50


def test_the_server_does_not_train_for_a_thousandth(make_trainer: MakeTrainer) -> None:
    trainer, average = make_trainer(max_rounds=1), make_trainer(max_rounds=1)
    trainer.fit(Perceptron(), Served(9), FedDU(C=1e-3))
    average.fit(Perceptron(), Served(9), FedAvg())
    assert trainer.callback_metrics["feddu/tau_eff"] == 0
    assert 0 < trainer.callback_metrics["feddu/alpha"] <= 1e-3
    assert trainer.global_step == average.global_step

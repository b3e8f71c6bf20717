"""Test ClientEvaluation against hand-written loops over the clients, and that it changes nothing else."""

import copy
import csv
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import processes
import pytest
import torch
from compared_runs import MakeTrainer, agree, equal_states, ran
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection
from torchmetrics.classification import BinaryAUROC, BinaryAveragePrecision
from toys import SIZES, Normalised, Perceptron, Sizes, read_rows, samples, vector

from lightning_fl import FederatedTrainer, UserError
from lightning_fl.algorithms import APFL, SCAFFOLD, Algorithm, Ditto, FedAvg, FedBN, FedDP, FedRep, PFedMe
from lightning_fl.callbacks import ClientEvaluation, TargetReached
from lightning_fl.data import Arrays, ByGroup, Digits, Dirichlet, Rotation
from lightning_fl.modules import ImageClassifier
from lightning_fl.outputs import checkpoint_file
from lightning_fl.outputs.clients.distribution import distribution, is_over_clients
from lightning_fl.outputs.metric import find_metric
from lightning_fl.state.run_state import EVALUATION
from lightning_fl.vectors.personal import PERSONAL

Row = dict[str, str]
COLUMNS = ("weighted", "mean", "std", "min", "max", "q10", "q50", "q90", "worst10", "best10", "jain", "gini")


def federation(val_fraction: float = 0.3, sizes: tuple[int, ...] = SIZES, **more: Any) -> Arrays:
    given = {"num_clients": len(sizes), "partition": Sizes(sizes=sizes), **more}
    return Arrays(
        train=samples(sum(sizes)),
        test=samples(10, seed=1),
        batch_size=4,
        eval_batch_size=2,
        val_fraction=val_fraction,
        **given,
    )


def rows_of(folder: Path) -> list[Row]:
    with (folder / "clients.csv").open() as file:
        return list(csv.DictReader(file))


def numbers(row: Row, name: str) -> float:
    return float(row[name])


def by_hand(module: Perceptron, data: Arrays, client: int) -> tuple[float, float]:
    """Return loss and accuracy of a model on a client's held-out samples."""
    x, y = (torch.stack([part[i] for i in data.client_val_indices[client]]) for part in samples(sum(SIZES)))
    with torch.no_grad():
        output = module(x)
    return float(0.5 * (output - y).square().sum(1).mean()), float((output.argmax(1) == y.argmax(1)).double().mean())


def tuned_by_hand(module: Perceptron, data: Arrays, client: int, epochs: int, rate: float, seed: int) -> Perceptron:
    """Return a copy that has trained on a client's training samples by plain SGD."""
    x, y = (torch.stack([part[i] for i in data.client_indices[client]]) for part in samples(sum(SIZES)))
    trained, order = copy.deepcopy(module), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(trained.parameters(), lr=rate)
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=order).split(4):
            optimizer.zero_grad()
            trained.loss((x[rows], y[rows])).backward()
            optimizer.step()
    return trained


# ------------------------------------------------------------------------------------------------- statistics


def test_statistics_over_clients_are_those_computed_by_hand() -> None:
    found = distribution([0.9, 0.8, 0.8, 0.5], [10, 20, 30, 40], lower_is_better=False)
    expected = (0.69, 0.75, 0.15, 0.5, 0.9, 0.59, 0.8, 0.87, 0.5, 0.9, 0.9615385, 0.1)
    assert found == pytest.approx(dict(zip(COLUMNS, expected, strict=True)), abs=1e-6)


def test_the_worst_tenth_is_that_of_the_metric_s_direction() -> None:
    values = [float(value) for value in range(1, 12)]  # 11 clients, whose tenth is two of them
    up, down = (distribution(values, [1] * 11, lower_is_better=lower) for lower in (False, True))
    assert (up["worst10"], up["best10"]) == (1.5, 10.5)
    assert (down["worst10"], down["best10"]) == (10.5, 1.5)


def test_without_clients_or_with_negative_values_statistics_are_left_out() -> None:
    assert distribution([], [], lower_is_better=False) == {}
    assert set(COLUMNS) - set(distribution([0.5, -0.1], [1, 1], lower_is_better=False)) == {"jain", "gini"}
    zero = distribution([0.0, 0.0], [1, 2], lower_is_better=False)
    assert (zero["jain"], zero["gini"]) == (1.0, 0.0)
    alone = distribution([0.0, 0.0, 3.0], [1, 1, 1], lower_is_better=False)
    assert (alone["jain"], alone["gini"]) == pytest.approx((1 / 3, 2 / 3))


@pytest.mark.filterwarnings("error")
@given(st.lists(st.tuples(st.floats(0, 1e3), st.integers(1, 99)), min_size=1, max_size=40))
def test_statistics_obey_their_identities(drawn: list[tuple[float, int]]) -> None:
    values, counts = zip(*drawn, strict=True)
    found, many = distribution(values, counts, lower_is_better=False), len(values)
    assert 1 / many - 1e-9 <= found["jain"] <= 1
    assert 0 <= found["gini"] <= 1 - 1 / many + 1e-9
    if found["mean"] > 1e-6:
        assert found["jain"] * (1 + (found["std"] / found["mean"]) ** 2) == pytest.approx(1)
        differences = np.abs(np.subtract.outer(values, values)).mean()
        assert found["gini"] == pytest.approx(differences / (2 * found["mean"]), abs=1e-9)
    assert found["weighted"] == pytest.approx(np.average(values, weights=counts))


# ----------------------------------------------------------------------------------------- each client's values


def test_each_client_is_measured_as_by_a_loop_over_its_samples(
    make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    module, data = Perceptron(), federation()
    trainer = make_trainer(callbacks=ClientEvaluation(2, finetune_epochs=3), **keeps_files)
    trainer.fit(module, data)
    rows = rows_of(tmp_path)
    # The client with 3 samples holds out round(0.3 · 3) = 1 of them.
    assert [(row["round"], row["client"], row["samples"]) for row in rows] == [
        ("1", str(client), str(len(held_out))) for client, held_out in enumerate(data.client_val_indices)
    ]
    for client, row in enumerate(rows):
        loss, accuracy = by_hand(module, data, client)
        assert numbers(row, "val/loss") == pytest.approx(loss, rel=1e-6)
        assert numbers(row, "val/accuracy") == accuracy
        order = trainer.run.torch_seeds(EVALUATION, client, in_round=1)[0]
        loss, accuracy = by_hand(tuned_by_hand(module, data, client, 3, 0.1, order), data, client)
        assert numbers(row, "val/loss_tuned") == pytest.approx(loss, rel=1e-5)
        assert numbers(row, "val/accuracy_tuned") == accuracy
    logged = read_rows(tmp_path)[-1]
    losses, tuned = ([numbers(row, name) for row in rows] for name in ("val/loss", "val/loss_tuned"))
    counts = [int(row["samples"]) for row in rows]
    for prefix, values in (("", losses), ("tuned_", tuned)):
        for name, value in distribution(values, counts, lower_is_better=True).items():
            assert numbers(logged, f"val/loss_clients_{prefix}{name}") == pytest.approx(value, rel=1e-12), name
    assert numbers(logged, "val/loss_clients_gain_mean") == pytest.approx(np.mean(tuned) - np.mean(losses), abs=1e-12)
    assert numbers(logged, "val/accuracy_clients_worst10") == min(numbers(row, "val/accuracy") for row in rows)
    for name in ("loss", "accuracy"):  # all samples that clients hold out, pooled
        assert numbers(logged, f"val/{name}_clients_weighted") == pytest.approx(
            numbers(logged, f"val/{name}"), abs=1e-6
        )


def test_a_client_predicts_with_the_parameters_that_it_owns(
    make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    module, data = Perceptron(), federation()
    initial = copy.deepcopy(module.output.state_dict())
    trainer = make_trainer(max_rounds=1, callbacks=ClientEvaluation(1, finetune_epochs=1), **keeps_files)
    trainer.fit(module, data, Algorithm(personal=["output"]))
    assert 0 < len(trainer.run.clients) < len(SIZES)
    for client, row in enumerate(rows_of(tmp_path)):
        own = copy.deepcopy(module)
        own.output.load_state_dict(initial)
        if client in trainer.run.clients:
            views = trainer.run.personal_layout.views(trainer.run.clients[client][PERSONAL])
            own.load_state_dict(views, strict=False)
            assert not torch.equal(own.output.weight, initial["weight"])
        assert numbers(row, "val/loss") == pytest.approx(by_hand(own, data, client)[0], rel=1e-6)
        order = trainer.run.torch_seeds(EVALUATION, client, in_round=0)[0]
        tuned = tuned_by_hand(own, data, client, 1, 0.1, order)
        assert numbers(row, "val/loss_tuned") == pytest.approx(by_hand(tuned, data, client)[0], rel=1e-5)
    logged = read_rows(tmp_path)[-1]
    assert logged["clients/newcomers"] == str(len(SIZES) - len(trainer.run.clients)), "counts are whole numbers"
    assert logged["clients/evaluated"] == str(len(SIZES))


class Poisonable(Perceptron):
    """Module whose loss is NaN on the samples of one client, whose targets are beyond 100."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        _, y = batch
        self.log("val/score", -self.loss(batch) * (torch.nan if (y > 100).any() else 1.0))
        self.log("val/accuracy", 0.5)


def test_values_that_are_not_finite_are_left_out_and_counted(
    make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    data = federation(val_fraction=0.1)  # two clients have too few samples to hold one out
    trainer = make_trainer(max_rounds=1, callbacks=ClientEvaluation(1), **keeps_files)
    data.setup("fit")
    held_out = [len(rows) for rows in data.client_val_indices]
    data.train._stored[1][data.client_val_indices[4]] = 101.0
    trainer.fit(Poisonable(), data)
    logged, rows = read_rows(tmp_path)[-1], rows_of(tmp_path)
    assert [int(row["client"]) for row in rows] == [k for k, count in enumerate(held_out) if count]
    assert float(logged["clients/failed"]) == 1
    assert float(logged["clients/without_samples"]) == held_out.count(0) > 0
    assert float(logged["clients/evaluated"]) == len(rows)
    scores = [numbers(row, "val/score") for row in rows if row["client"] != "4"]
    assert numbers(logged, "val/score_clients_mean") == pytest.approx(np.mean(scores))
    assert "val/score_clients_jain" not in logged, "a score is below 0"
    assert numbers(logged, "val/accuracy_clients_jain") == 1.0


def test_a_panel_without_samples_is_warned_of_once(make_trainer: MakeTrainer) -> None:
    data = federation(val_fraction=0.2, sizes=(1, 1, 1, 1, 1, 1, 1, 12))
    trainer = make_trainer(max_rounds=3, callbacks=ClientEvaluation(1, clients=1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Perceptron(), data)
    said = [str(warning.message) for warning in caught if "measured nothing" in str(warning.message)]
    assert len(said) == 1
    assert not any(map(is_over_clients, trainer.callback_metrics))
    assert trainer.callback_metrics["clients/without_samples"] == 1


# ---------------------------------------------------------------------------------------------- panels and rounds


def evaluated(folder: Path) -> dict[int, list[int]]:
    """Return the clients of each evaluation by round."""
    found: dict[int, list[int]] = {}
    for row in rows_of(folder):
        found.setdefault(int(row["round"]), []).append(int(row["client"]))
    return found


@pytest.mark.parametrize("clients", [3, 0.5])
def test_a_fixed_panel_stays_and_a_fresh_one_changes(
    clients: float, make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    panels = {}
    for panel in ("fixed", "fresh"):
        evaluation = ClientEvaluation(2, clients=clients, panel=panel)  # type: ignore[arg-type]
        make_trainer(max_rounds=7, callbacks=evaluation, default_root_dir=tmp_path / panel, **keeps_files).fit(
            Perceptron(), federation()
        )
        panels[panel] = evaluated(tmp_path / panel)
        assert list(panels[panel]) == [1, 3, 5, 6], "every second round, and the last"
        assert all(len(set(drawn)) == 3 for drawn in panels[panel].values())
    drawn = np.random.default_rng([0, 0, EVALUATION, 0]).choice(6, 3, replace=False)
    assert set(map(tuple, panels["fixed"].values())) == {tuple(sorted(map(int, drawn)))}
    assert len(set(map(tuple, panels["fresh"].values()))) > 1


class Stops(L.Callback):
    """Callback that stops the run after its second round."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.should_stop |= trainer.current_epoch == 1


STOPS: dict[str, Callable[[], list[L.Callback]]] = {
    "EarlyStopping": lambda: [EarlyStopping("val/loss", patience=1, min_delta=1e9)],
    "TargetReached": lambda: [TargetReached(1e9, "val/loss")],
    "another": lambda: [Stops()],
    "max_time": list,
}


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("every", [5, 1])
def test_a_run_that_stops_early_evaluates_its_last_round_once(
    every: int, is_first: bool, stop: str, make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    """Check both orders of the callbacks, in clients.csv, metrics.csv and the trainer's metrics."""
    module, data, evaluation = Perceptron(), federation(), ClientEvaluation(every)
    callbacks = [evaluation, *STOPS[stop]()] if is_first else [*STOPS[stop](), evaluation]
    flags = {"max_time": {"microseconds": 1}} if stop == "max_time" else {}
    trainer = make_trainer(max_rounds=9, callbacks=callbacks, **flags, **keeps_files)
    trainer.fit(module, data)
    num_rounds = trainer.current_epoch
    assert num_rounds == (1 if stop in ("TargetReached", "max_time") else 2)
    everyone = list(range(len(SIZES)))
    assert evaluated(tmp_path) == {
        index: everyone for index in range(num_rounds) if every == 1 or index > num_rounds - 2
    }
    losses = [numbers(row, "val/loss") for row in rows_of(tmp_path)[-len(SIZES) :]]
    assert losses == pytest.approx([by_hand(module, data, client)[0] for client in everyone], rel=1e-6)
    assert numbers(read_rows(tmp_path)[-1], "val/loss_clients_mean") == pytest.approx(np.mean(losses), rel=1e-12)
    assert float(trainer.callback_metrics["val/loss_clients_mean"]) == pytest.approx(np.mean(losses), rel=1e-12)


class Fails(L.Callback):
    """Callback that stops the run after its second round, and fails there."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.should_stop = True
            raise RuntimeError("fails")


def test_a_run_that_fails_is_not_evaluated(
    make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    trainer = make_trainer(max_rounds=9, callbacks=[ClientEvaluation(5), Fails()], **keeps_files)
    with pytest.raises(RuntimeError, match="fails"):
        trainer.fit(Perceptron(), federation())
    assert not (tmp_path / "clients.csv").exists()


def test_a_constant_rate_of_fine_tuning_replaces_that_of_the_schedule(
    make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    """Test schedules by round and by step, which stay as they are without fine-tuning."""

    def configure(module: L.LightningModule) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.2)
        of_steps = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step"}
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8), of_steps]

    plain, module, data = Perceptron(configure=configure), Perceptron(configure=configure), federation()
    plain.load_state_dict(module.state_dict())
    make_trainer().fit(plain, federation())
    trainer = make_trainer(callbacks=ClientEvaluation(1, finetune_epochs=2, finetune_lr=0.03), **keeps_files)
    trainer.fit(module, data)
    assert np.array_equal(vector(plain), vector(module))
    for client, row in enumerate(rows_of(tmp_path)[-len(SIZES) :]):
        order = trainer.run.torch_seeds(EVALUATION, client, in_round=1)[0]
        tuned = tuned_by_hand(module, data, client, 2, 0.03, order)
        assert numbers(row, "val/loss_tuned") == pytest.approx(by_hand(tuned, data, client)[0], rel=1e-5)


# ----------------------------------------------------------------------------------------------- nothing else changes


class Watched(Normalised):
    """Module with random numbers, norms, torchmetrics objects, and values that it collects in attributes over a round."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.nn.Dropout(0.3)
        self.errors = MeanSquaredError()
        self.collection = MetricCollection({"one": MeanMetric(), "two": MeanMetric()})
        self.of_round = MeanMetric()
        self.losses: list[float] = []
        self.num_batches = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.noise(x))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(loss.detach()))
        self.of_round.update(loss)
        self.num_batches += 1
        return loss + 0 * self.num_batches

    def on_train_epoch_end(self) -> None:
        self.log("train/sum", torch.tensor(sum(self.losses)))
        self.log("train/of_round", self.of_round.compute())
        self.log("train/batches", float(self.num_batches))
        self.losses.clear()
        self.of_round.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.errors(self(x), y)
        self.log("val/error", self.errors)
        self.log_dict(self.collection(self(x)[:, 0]))
        super().validation_step(batch, batch_idx)


class Counting(L.Callback):
    """Callback that logs the number of its calls, and a value before ClientEvaluation does."""

    def __init__(self) -> None:
        self.calls = 0

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.calls += 1

    on_before_optimizer_step = on_validation_batch_end = on_train_batch_end

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("calls", float(self.calls))
        pl_module.log("random", torch.rand(()))


@pytest.mark.parametrize(
    ("algorithm", "runner"),
    [
        (FedAvg, "serial"),
        (SCAFFOLD, "serial"),
        (lambda: Algorithm(personal=["output"]), "serial"),
        (FedBN, "serial"),
        (Ditto, "serial"),
        (FedAvg, "stacked"),
    ],
    ids=["FedAvg", "SCAFFOLD", "personal", "FedBN", "Ditto", "stacked"],
)
def test_a_run_with_the_callback_is_that_without_it_bit_for_bit(
    algorithm: Any, runner: str, make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    module = Perceptron() if runner == "stacked" else Watched()
    runs = []
    for name, more in (("without", []), ("with", [ClientEvaluation(1, finetune_epochs=2)])):
        fitted, folder = copy.deepcopy(module), tmp_path / name
        callbacks = [*([] if runner == "stacked" else [Counting()]), *more]
        trainer = make_trainer(max_rounds=3, runner=runner, callbacks=callbacks, default_root_dir=folder, **keeps_files)
        torch.manual_seed(3)
        trainer.fit(fitted, federation(), algorithm())
        saved = checkpoint_file.load(folder / "checkpoints" / "last.ckpt")
        kept = {"clients": dict(trainer.run.clients.items()), "memory": dict(trainer.run.client_memory.items())}
        runs.append((fitted.state_dict(), read_rows(folder), saved, torch.rand(3), kept))
    (model, rows, saved, drawn, kept), (model_too, rows_too, saved_too, drawn_too, kept_too) = runs
    assert equal_states(dict(model), dict(model_too))
    assert equal_states(kept, kept_too)
    assert bool(kept["clients"]) == (algorithm is not FedAvg)
    assert torch.equal(drawn, drawn_too)
    own = ("clients/evaluated", "clients/failed", "clients/newcomers", "clients/without_samples")
    for row, other in zip(rows, rows_too, strict=True):
        assert row == {name: x for name, x in other.items() if not is_over_clients(name) and name not in own}
        assert any(map(is_over_clients, other))
    of_run, of_run_too = saved["federation"]["run"], saved_too["federation"]["run"]
    assert of_run.keys() == of_run_too.keys()
    for name in of_run.keys() - {"clients", "client_memory"}:
        assert equal_states(of_run[name], of_run_too[name]), name


def test_the_metric_that_a_run_is_about_is_not_a_statistic_over_clients() -> None:
    names = ["val_acc", *(f"val_acc_clients_{name}" for name in COLUMNS), "val_acc_clients_tuned_mean"]
    assert find_metric(names) == "val_acc"
    assert find_metric(["val/clients_mean"]) == "val/clients_mean"


# ------------------------------------------------------------------------------------------- validate, test, checkpoints


@pytest.mark.parametrize("algorithm", [FedAvg, lambda: Algorithm(personal=["output"])], ids=["FedAvg", "personal"])
def test_a_checkpoint_is_validated_with_the_same_statistics(
    algorithm: Any, make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    """Test a learning rate that falls, and a test that reports the clients' validation parts as well."""

    def configure(module: L.LightningModule) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    evaluation = ClientEvaluation(2, finetune_epochs=2)
    trainer = make_trainer(max_rounds=2, callbacks=evaluation, **keeps_files)
    trainer.fit(Perceptron(configure=configure), federation(), algorithm())
    logged = {name: float(x) for name, x in read_rows(tmp_path)[-1].items() if is_over_clients(name)}
    rows, before = evaluation.rows, (tmp_path / "clients.csv").read_bytes()
    assert len(logged) > 2 * len(COLUMNS)
    fresh = ClientEvaluation(1, finetune_epochs=2)
    last = tmp_path / "checkpoints" / "last.ckpt"
    for run in (trainer, make_trainer(callbacks=fresh)):
        for stage in ("validate", "test"):
            if run is trainer:
                (found,) = getattr(run, stage)(verbose=False)
            else:
                module = Perceptron(configure=configure)
                (found,) = getattr(run, stage)(module, federation(), algorithm(), ckpt_path=last, verbose=False)
            assert {name: x for name, x in found.items() if is_over_clients(name)} == pytest.approx(logged, rel=1e-6)
    assert [row["client"] for row in fresh.rows] == [row["client"] for row in rows]
    assert (tmp_path / "clients.csv").read_bytes() == before, "validation writes no file"


def test_a_module_with_a_scheduler_of_steps_is_validated_as_well(
    make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    """Test configure_optimizers that reads the length of a local training, outside a fit."""
    module, evaluation = Cosine(), {"finetune_epochs": 3, "finetune_lr": 0.05}
    make_trainer(callbacks=ClientEvaluation(2, **evaluation), **keeps_files).fit(module, federation())  # type: ignore[arg-type]
    logged = {name: float(x) for name, x in read_rows(tmp_path)[-1].items() if is_over_clients(name)}
    trainer = make_trainer(callbacks=ClientEvaluation(**evaluation))  # type: ignore[arg-type]
    last = tmp_path / "checkpoints" / "last.ckpt"
    (found,) = trainer.validate(Cosine(), federation(), ckpt_path=last, verbose=False)
    assert {name: x for name, x in found.items() if is_over_clients(name)} == pytest.approx(logged, rel=1e-6)


def test_gates_of_each_client_are_used(make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path) -> None:
    """Compare with FedDP's own validation, which measures each client's gates on its own samples."""
    data = Digits(num_clients=6, partition=Dirichlet(0.5, min_samples=10), val_fraction=0.2, image_size=16)
    module = ImageClassifier("lenet5", num_classes=10, in_channels=1, image_size=16, learning_rate=0.1)
    trainer = make_trainer(max_rounds=2, callbacks=ClientEvaluation(1), limit_train_batches=2, **keeps_files)
    trainer.fit(module, data, FedDP(keep=0.5))
    logged = read_rows(tmp_path)[-1]
    for name in ("val/loss", "val/accuracy"):
        assert numbers(logged, f"{name}_clients_mean") == pytest.approx(numbers(logged, f"{name}_local"), abs=1e-6)
        assert numbers(logged, f"{name}_clients_mean") != pytest.approx(numbers(logged, f"{name}_dense"), abs=1e-6)


@pytest.mark.parametrize(
    "algorithm", [APFL(), Ditto(), FedRep(head_epochs=1), PFedMe(strength=5.0)], ids=lambda algorithm: algorithm.name
)
@pytest.mark.matrix
def test_what_each_client_keeps_is_used(
    algorithm: Algorithm, make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    """Compare with the validation of personalised methods, on each client's own samples; then fine-tune, and leave no trace."""
    weights = []
    for tuned in (0, 1):
        data = Digits(num_clients=6, partition=Dirichlet(0.5, min_samples=10), val_fraction=0.2, image_size=16)
        torch.manual_seed(1)
        module = ImageClassifier("lenet5", num_classes=10, in_channels=1, image_size=16, learning_rate=0.1)
        callback = ClientEvaluation(1, finetune_epochs=tuned, finetune_lr=0.01 if tuned else None)
        trainer = make_trainer(
            max_rounds=2, callbacks=callback, limit_train_batches=2, local_epochs=2, clients_per_round=4, **keeps_files
        )
        trainer.fit(module, data, algorithm)
        logged = read_rows(tmp_path)[-1]
        for name in ("val/loss", "val/accuracy"):
            assert numbers(logged, f"{name}_clients_mean") == pytest.approx(numbers(logged, f"{name}_local"), abs=1e-6)
        assert float(logged["clients/newcomers"]) == 6 - len(trainer.run.clients)
        weights.append([trainer.run.params, *(x for state in trainer.run.clients.values() for x in state.values())])
    for plain, other in zip(*weights, strict=True):
        assert torch.equal(plain, other)


def test_clients_that_are_users_have_their_names_in_the_rows(
    make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    users = np.repeat(["zoe", "adam", "eve"], (10, 14, 16))
    data = federation(groups=users, sizes=(40,), partition=ByGroup(), num_clients=None)
    make_trainer(callbacks=ClientEvaluation(2), max_rounds=2, **keeps_files).fit(Perceptron(), data)
    assert [(row["client"], row["name"]) for row in rows_of(tmp_path)] == [("0", "adam"), ("1", "eve"), ("2", "zoe")]
    assert not any("name" in column for column in read_rows(tmp_path)[-1] if "clients" in column)


class WithTestParts(Arrays):
    """Data whose clients have test samples of their own: every sixth of the twelve."""

    def after_split(self) -> None:
        super().after_split()
        self.client_test_indices = [np.arange(client, 10, 6) for client in range(6)]


def test_clients_with_test_samples_of_their_own_are_tested_on_them(
    make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    data = WithTestParts(
        train=samples(40), test=samples(10, seed=1), num_clients=6, batch_size=4, partition=Sizes(), eval_batch_size=4
    )
    module = Perceptron()
    make_trainer(callbacks=ClientEvaluation(2, part="test"), **keeps_files).fit(module, data)
    x, y = samples(10, seed=1)
    for client, row in enumerate(rows_of(tmp_path)):
        own = torch.arange(client, 10, 6)
        with torch.no_grad():
            assert numbers(row, "test/loss") == pytest.approx(float(module.loss((x[own], y[own]))), rel=1e-6)


# ------------------------------------------------------------------------------------------------------ files of a run


class Killer(L.Callback):
    """Callback that kills the process when a round has been logged and its clients' rows are written, but no checkpoint."""

    def __init__(self, when: int) -> None:
        self.when = when

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == self.when:
            os.kill(os.getpid(), signal.SIGKILL)


def fit_seven_rounds(folder: str, killed_in: int | None = None, ckpt_path: str | None = None) -> None:
    callbacks = [ClientEvaluation(2, finetune_epochs=1), *([] if killed_in is None else [Killer(killed_in)])]
    trainer = FederatedTrainer(
        max_rounds=7,
        clients_per_round=3,
        accelerator="cpu",
        default_root_dir=folder,
        callbacks=callbacks,
        checkpoint_every_n_rounds=3,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(1)
    trainer.fit(Perceptron(), federation(), verbose=False, ckpt_path=ckpt_path)


@pytest.mark.process
def test_a_killed_run_goes_on_to_the_rows_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, killed, elsewhere = (str(tmp_path / name) for name in ("whole", "killed", "elsewhere"))
    fit_seven_rounds(whole)
    processes.run(fit_seven_rounds, killed, 5, exit_codes=[-signal.SIGKILL])
    assert list(evaluated(Path(killed))) == [1, 3, 5], (
        "round 5 is repeated, because the last checkpoint is that of round 2"
    )
    last = f"{killed}/checkpoints/last.ckpt"
    fit_seven_rounds(elsewhere, ckpt_path=last)
    fit_seven_rounds(killed, ckpt_path=last)
    expected = Path(whole, "clients.csv").read_bytes()
    assert Path(elsewhere, "clients.csv").read_bytes() == Path(killed, "clients.csv").read_bytes() == expected
    fit_seven_rounds(whole)
    assert list(evaluated(Path(whole, "earlier-1"))) == [1, 3, 5, 6]
    assert list(evaluated(Path(whole))) == [1, 3, 5, 6], "no rows of the earlier run"


def test_without_a_file_there_is_none(make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path) -> None:
    make_trainer(callbacks=ClientEvaluation(1, file=False), **keeps_files).fit(Perceptron(), federation())
    make_trainer(callbacks=ClientEvaluation(1), default_root_dir=tmp_path / "quiet").fit(Perceptron(), federation())
    assert list(tmp_path.rglob("clients.csv")) == []


def test_a_checkpoint_may_follow_a_statistic_over_clients(
    make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    best = ModelCheckpoint(
        tmp_path / "best", monitor="val/loss_clients_worst10", mode="min", every_n_epochs=2, filename="{epoch}"
    )
    trainer = make_trainer(max_rounds=6, callbacks=[ClientEvaluation(2), best], **keeps_files)
    trainer.fit(Perceptron(), federation())
    column = {int(row["round"]): row["val/loss_clients_worst10"] for row in read_rows(tmp_path)}
    values = {index: float(value) for index, value in column.items() if value}
    assert list(values) == [1, 3, 5]
    assert float(best.best_model_score) == pytest.approx(min(values.values()))


# ------------------------------------------------------------------------------------------------------------ processes


class WithMetrics(Perceptron):
    """Module that logs a torchmetrics object."""

    def __init__(self) -> None:
        super().__init__()
        self.errors = MeanSquaredError()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.errors(self(batch[0]), batch[1])
        self.log("val/error", self.errors)


def evaluate_in_processes(folder: str, num_processes: int) -> None:
    torch.manual_seed(0)
    trainer = FederatedTrainer(
        max_rounds=2,
        clients_per_round=5,
        accelerator="cpu",
        devices=num_processes,
        default_root_dir=folder,
        callbacks=ClientEvaluation(1, finetune_epochs=2),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(WithMetrics(), federation(), Algorithm(personal=["output"]))
    (found,) = trainer.validate(verbose=False)
    assert found["val/loss_clients_mean"] == pytest.approx(float(trainer.callback_metrics["val/loss_clients_mean"]))


@pytest.mark.process
def test_three_processes_evaluate_as_one(tmp_path: Path) -> None:
    """Test torchmetrics objects, personal parameters and fine-tuning; some process has fewer clients than others."""
    for count in (1, 3):
        processes.run(evaluate_in_processes, str(tmp_path / str(count)), count, num_processes=count)
    one, three = (rows_of(tmp_path / str(count)) for count in (1, 3))
    assert len(one) == len(three) == 2 * len(SIZES)
    for here, there in zip(one, three, strict=True):
        assert here.keys() == there.keys() >= {"val/error", "val/error_tuned"}
        for name in here:
            assert float(here[name]) == pytest.approx(float(there[name]), rel=1e-5, abs=1e-7), name
    for here, there in zip(*(read_rows(tmp_path / str(count)) for count in (1, 3)), strict=True):
        assert float(here["val/error"]) == pytest.approx(float(there["val/error"]), rel=1e-5), (
            "over clients' own models"
        )


@pytest.mark.slow
def test_processes_of_a_command_evaluate_as_one(tmp_path: Path) -> None:
    words = ("--model.network", "linear", "--data.val_fraction", "0.2", "--trainer.callbacks+=ClientEvaluation")
    words += ("--trainer.callbacks.every_n_rounds", "1", "--trainer.callbacks.finetune_epochs", "1")
    agree(ran(tmp_path / "one", *words), ran(tmp_path / "three", *words, num_processes=3))


# ------------------------------------------------------------------------------------------------------------- refusals


def test_a_trainer_without_clients_is_refused(make_stock_trainer: Callable[..., L.Trainer]) -> None:
    data = federation()
    with pytest.raises(UserError, match=r"lightning.Trainer has no clients: use FederatedTrainer"):
        make_stock_trainer(callbacks=ClientEvaluation()).fit(Perceptron(), data)


class Silent(Perceptron):
    validation_step = L.LightningModule.validation_step  # type: ignore[assignment]


class Cosine(Perceptron):
    """Module whose learning rate falls to 0 within a round."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


@pytest.mark.parametrize(
    ("evaluation", "data", "module", "more", "sentence"),
    [
        ({}, {"val_fraction": 0.0}, Perceptron, [], "data.val_fraction is 0: set it to 0.2"),
        ({"part": "test"}, {}, Perceptron, [], "Arrays has one test set for all: use part 'validation'"),
        ({"clients": 7}, {}, Perceptron, [], "clients of ClientEvaluation is 7, but the federation has 6"),
        ({}, {}, Silent, [], "runs validation_step, which Silent does not have"),
        ({}, {}, Perceptron, [ClientEvaluation(part="test")], "two ClientEvaluation callbacks"),
        (
            {"finetune_epochs": 1},
            {},
            Cosine,
            [],
            "the scheduler that Cosine steps within a round, .*: give finetune_lr",
        ),
        (
            {"every_n_rounds": 4},
            {},
            Perceptron,
            [ModelCheckpoint(monitor="val/loss_clients_mean", every_n_epochs=2)],
            "'val/loss_clients_mean' every 2 rounds, but ClientEvaluation measures it every 4 rounds",
        ),
        (
            {"every_n_rounds": 2},
            {},
            Perceptron,
            [EarlyStopping("val/loss_clients_mean")],
            "after every round, but ClientEvaluation measures it every 2 rounds: .*, every_n_rounds 1",
        ),
        (
            {"every_n_rounds": 1},
            {},
            Perceptron,
            [TargetReached(0.5, "val/acuracy_clients_mean")],
            "monitors 'val/acuracy_clients_mean', which is not logged; did you mean 'val/accuracy_clients_mean'",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence(
    evaluation: dict[str, Any],
    data: dict[str, Any],
    module: Any,
    more: list[Any],
    sentence: str,
    make_trainer: MakeTrainer,
) -> None:
    trainer = make_trainer(callbacks=[ClientEvaluation(**evaluation), *more])
    with pytest.raises(UserError, match=sentence):
        trainer.fit(module(), federation(**data))


def test_a_target_is_reached_in_the_round_whose_clients_reach_it(
    make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    evaluation, target = ClientEvaluation(1), TargetReached(1.08, "val/loss_clients_mean", stop=False)
    trainer = make_trainer(max_rounds=4, callbacks=[evaluation, target], **keeps_files)
    trainer.fit(Perceptron(), federation())
    values = [numbers(row, "val/loss_clients_mean") for row in read_rows(tmp_path)]
    first = next(index for index, value in enumerate(values) if value <= 1.08)
    assert first > 0
    assert target.reached is not None
    assert (target.reached["epoch"], target.reached["value"]) == (first, pytest.approx(values[first]))
    with pytest.raises(UserError, match="put ClientEvaluation before it"):
        make_trainer(callbacks=[target, evaluation]).fit(Perceptron(), federation())


def test_test_samples_without_the_clients_shift_are_refused(make_trainer: MakeTrainer) -> None:
    images, labels = np.zeros((40, 8, 8, 1), dtype=np.uint8), np.arange(40) % 2
    data = WithTestParts(
        train=(images, labels), test=(images[:10], labels[:10]), num_clients=6, batch_size=4, shift=Rotation()
    )
    with pytest.raises(
        UserError, match=r"Rotation\(.*\) changes the clients' training images, but not .* 'validation'"
    ):
        make_trainer(callbacks=ClientEvaluation(part="test")).fit(Perceptron(), data)


def test_test_samples_of_other_users_are_refused(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    path, labels = tmp_path / "data.npz", np.arange(6) % 2
    train = {
        "train_images": np.zeros((6, 4, 4), dtype=np.uint8),
        "train_labels": labels,
        "train_groups": list("aabbcc"),
    }
    test = {name.replace("train", "test"): x for name, x in train.items()} | {"test_groups": list("ddeeff")}
    np.savez(path, **train, **test)
    data = Arrays(str(path), partition=ByGroup(), num_clients=None)
    with pytest.raises(
        UserError, match=r"because the test samples of Arrays belong to no client's users: .*'validation'"
    ):
        make_trainer(callbacks=ClientEvaluation(part="test")).fit(Perceptron(), data)


@pytest.mark.parametrize("name", ["client", "name", "samples"])
def test_a_metric_with_the_name_of_another_column_is_refused(name: str, make_trainer: MakeTrainer) -> None:
    class Logs(Perceptron):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log(name, 1.0)

    with pytest.raises(
        UserError, match=f"Logs logs '{name}', .*: log another name in validation_step, such as val/{name}"
    ):
        make_trainer(callbacks=ClientEvaluation(1)).fit(Logs(), federation())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"every_n_rounds": 0}, "every_n_rounds must be a whole number of at least 1"),
        ({"part": "train"}, "part 'train' is unknown"),
        ({"panel": "freesh"}, "did you mean 'fresh'"),
        ({"clients": 0}, "clients must be a whole number of at least 1"),
        ({"clients": 1.5}, r"clients, unless it is a count, must lie in \(0, 1\]"),
        ({"finetune_epochs": -1}, "finetune_epochs must be"),
        ({"finetune_lr": 0.1}, "finetune_lr 0.1 needs finetune_epochs"),
        ({"finetune_lr": 0.0, "finetune_epochs": 1}, "finetune_lr must be positive"),
        ({"lower_is_better": "yes"}, "lower_is_better 'yes' is unknown"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        ClientEvaluation(**arguments)


def test_clients_are_evaluated_only_in_a_session(make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match="call it in a callback"):
        make_trainer().evaluate_clients()


def test_clients_that_cannot_be_evaluated_are_refused_in_a_sentence(make_trainer: MakeTrainer) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"part": "test"}, "^evaluate_clients finds no test samples .* because Arrays has one test set for all"),
        ({"part": "tests"}, "^part 'tests' is unknown; did you mean 'test'"),
        ({"clients": -1}, "^clients must be a whole number of at least 0, got -1"),
        ({"clients": 0.5}, "^clients must be a whole number of at least 0, got 0.5"),
        ({"finetune_epochs": -1}, "^finetune_epochs must be a whole number of at least 0, got -1"),
        ({"finetune_epochs": 1, "finetune_lr": 0.0}, "^finetune_lr must be "),
    ]

    class Asks(Callback):
        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            for arguments, sentence in refused:
                with pytest.raises(UserError, match=sentence):
                    trainer.evaluate_clients(**arguments)

    make_trainer(max_rounds=0, callbacks=Asks()).fit(Perceptron(), federation())
    refused[:] = [({}, r"^evaluate_clients finds no samples that clients hold out: set data\.val_fraction")]
    make_trainer(max_rounds=0, callbacks=Asks()).fit(Perceptron(), federation(val_fraction=0.0))


class Ranked(Perceptron):
    """Logs metrics that are undefined if the samples lack a class, and one that never is."""

    def __init__(self) -> None:
        super().__init__()
        self.auroc, self.precision, self.error = BinaryAUROC(), BinaryAveragePrecision(), MeanSquaredError()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        output, target = self(batch[0])[:, 0], batch[1][:, 0]
        for metric in (self.auroc, self.precision):
            metric.update(output.sigmoid(), (target > 0).long())
        self.error.update(output, target)
        self.log_dict({"val/auroc": self.auroc, "val/precision": self.precision, "val/error": self.error})


def test_a_metric_that_is_undefined_for_a_client_is_left_out(
    make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    """A client with samples of one class fails, although torchmetrics returns 0."""
    x, y = samples(60)
    data = Arrays(train=(x, y), test=(x[:9], y[:9]), num_clients=4, batch_size=4, eval_batch_size=2, val_fraction=0.4)
    data.setup("fit")
    for client, held_out in enumerate(data.client_val_indices):
        y[held_out, 0] = -1.0
        if client:
            y[held_out[::2], 0] = 1.0
    trainer = make_trainer(max_rounds=1, callbacks=ClientEvaluation(1), **keeps_files)
    trainer.fit(Ranked(), data)
    values = [(float(row["val/auroc"]), float(row["val/precision"])) for row in rows_of(tmp_path)]
    assert np.isnan(values[0]).all()
    assert np.isfinite(values[1:]).all()
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert (logged["clients/failed"], logged["clients/evaluated"]) == (1, 4)
    assert logged["val/auroc_clients_mean"] == pytest.approx(np.mean(values[1:], axis=0)[0], abs=1e-6)
    assert logged["val/precision_clients_mean"] == pytest.approx(np.mean(values[1:], axis=0)[1], abs=1e-6)
    assert all(np.isfinite(float(row["val/error"])) for row in rows_of(tmp_path))

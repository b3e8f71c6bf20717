"""Test the trainer's flags: the effect of each, and that invalid ones are refused with a sentence."""

import copy
import logging
import time
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L  # noqa: N812
import numpy as np
import oracle
import pytest
import torch
from compared_runs import MakeTrainer
from lightning.fabric.accelerators import MPSAccelerator
from lightning.fabric.strategies import ModelParallelStrategy
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.profilers import SimpleProfiler
from roster import problem
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from toys import OnlyTrains, Perceptron, federation, read_rows, samples, stepped_by_hand, vector

from lightning_fl import FederatedTrainer, UserError
from lightning_fl.algorithms import MOON, SCAFFOLD, Algorithm, DeviceM, FedAvg, FedProx
from lightning_fl.data import Federated
from lightning_fl.trainer.lightning_parts import PRECISIONS

each_rule = pytest.mark.parametrize("algorithm", [FedAvg(), FedProx(mu=0)], ids=lambda algorithm: algorithm.name)


class Counting(Perceptron):
    """Module that records the sizes of its training batches and the number of its evaluation batches."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []
        self.evaluated = 0

    def on_train_start(self) -> None:
        self.evaluated_before = self.evaluated

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batches.append(len(batch[0]))

    def on_validation_batch_start(self, *arguments: Any) -> None:
        self.evaluated += 1


@pytest.mark.parametrize(("limit", "batches_per_epoch"), [(None, 5), (1.0, 5), (2, 2), (99, 5), (0.5, 2), (0.01, 1)])
def test_limit_train_batches(limit: Any, batches_per_epoch: int, make_trainer: MakeTrainer) -> None:
    module = Counting()
    trainer = make_trainer(max_rounds=1, clients_per_round=1, local_epochs=2, limit_train_batches=limit)
    trainer.fit(module, federation(sizes=(18,)))
    assert len(module.batches) == 2 * batches_per_epoch
    assert trainer.run.num_steps == 2 * batches_per_epoch


@pytest.mark.parametrize(
    ("limit", "batches"), [(None, 3), (1, 1), (1.0, 3), (0.7, 2), (0, 0), (0.0, 0)], ids=lambda value: str(value)
)
def test_limit_val_batches(limit: Any, batches: int, make_trainer: MakeTrainer) -> None:
    module = Counting()
    make_trainer(max_rounds=2, limit_val_batches=limit).fit(module, federation())
    assert module.evaluated == 2 * batches


@pytest.mark.parametrize(("steps", "batches"), [(0, 0), (2, 2), (-1, 3)])
def test_num_sanity_val_steps(steps: int, batches: int, make_trainer: MakeTrainer) -> None:
    module = Counting()
    make_trainer(max_rounds=1, num_sanity_val_steps=steps).fit(module, federation())
    assert module.evaluated_before == batches
    assert module.evaluated == batches + 3


def test_a_sanity_check_changes_no_result(make_trainer: MakeTrainer) -> None:
    first = Perceptron()
    second = copy.deepcopy(first)
    trainers = [make_trainer(num_sanity_val_steps=steps) for steps in (0, -1)]
    for trainer, module in zip(trainers, (first, second), strict=True):
        trainer.fit(module, federation())
    assert (vector(first) == vector(second)).all()
    assert trainers[0].callback_metrics == trainers[1].callback_metrics


@pytest.mark.parametrize("steps", [1, 3, 7])
def test_local_steps_go_on_through_reshuffled_passes(steps: int, make_trainer: MakeTrainer) -> None:
    module = Perceptron()
    given = problem(rounds=3, epochs=steps)

    def first_steps(w: np.ndarray, batches: oracle.Batches, eta: float) -> np.ndarray:
        return oracle.sgd(w, (batch for _, batch in zip(range(steps), batches, strict=False)), eta)

    expected = oracle.fedavg(given, vector(module), first_steps)
    trainer = make_trainer(max_rounds=3, local_steps=steps, precision="64-true")
    trainer.fit(module, federation())
    np.testing.assert_allclose(vector(module), expected, rtol=0, atol=1e-10)
    assert trainer.run.num_steps == 3 * 3 * steps


def by_hand(accumulate: int = 1, clip: Callable[[np.ndarray], np.ndarray] = lambda g: g) -> oracle.Local:
    """Train by SGD over sums of `accumulate` gradients, each divided by `accumulate` as Lightning does, clipped."""

    def local(w: np.ndarray, batches: oracle.Batches, eta: float) -> np.ndarray:
        y, total, waiting = w.copy(), np.zeros_like(w), 0
        for batch in batches:
            total, waiting = total + oracle.gradient(y, *batch) / accumulate, waiting + 1
            if waiting == accumulate:
                y, total, waiting = y - eta * clip(total), np.zeros_like(w), 0
        return y - eta * clip(total) if waiting else y

    return local


@each_rule
@pytest.mark.parametrize("accumulate", [2, 3, 100])
def test_accumulate_grad_batches(accumulate: int, algorithm: Algorithm, make_trainer: MakeTrainer) -> None:
    module = Perceptron()
    expected = oracle.fedavg(problem(rounds=3), vector(module), by_hand(accumulate))
    trainer = make_trainer(max_rounds=3, accumulate_grad_batches=accumulate, precision="64-true")
    trainer.fit(module, federation(), algorithm)
    np.testing.assert_allclose(vector(module), expected, rtol=0, atol=1e-10)


CLIPS = {
    "norm": lambda g: g * min(1.0, 0.3 / np.linalg.norm(g)),
    "value": lambda g: np.clip(g, -0.3, 0.3),
}


@each_rule
@pytest.mark.parametrize("clip", CLIPS)
def test_gradient_clipping(clip: str, algorithm: Algorithm, make_trainer: MakeTrainer) -> None:
    module = Perceptron()
    expected = oracle.fedavg(problem(rounds=3), vector(module), by_hand(clip=CLIPS[clip]))
    unclipped = oracle.fedavg(problem(rounds=3), vector(module))
    assert np.abs(expected - unclipped).max() > 1e-3
    trainer = make_trainer(max_rounds=3, gradient_clip_val=0.3, gradient_clip_algorithm=clip, precision="64-true")
    trainer.fit(module, federation(), algorithm)
    np.testing.assert_allclose(vector(module), expected, rtol=0, atol=1e-6)  # torch adds 1e-6 to the norm


@pytest.mark.parametrize(("fraction", "num_clients"), [(0.5, 3), (1.0, 6), (0.001, 1), (6, 6)])
def test_clients_per_round(fraction: float, num_clients: int, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=1, clients_per_round=fraction)
    trainer.fit(Perceptron(), federation())
    assert trainer.callback_metrics["clients/selected"] == num_clients


def test_clients_without_samples_are_never_selected(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=4, clients_per_round=2)
    trainer.fit(Perceptron(), federation(sizes=(0, 4, 0, 3)))
    assert trainer.callback_metrics["clients/accepted"] == 2
    with pytest.raises(UserError, match=r"clients_per_round is 3, but the federation has 2 clients with samples"):
        make_trainer(clients_per_round=3).fit(Perceptron(), federation(sizes=(0, 4, 0, 3)))


@pytest.mark.parametrize(("fast_dev_run", "rounds"), [(True, 1), (3, 3)])
def test_fast_dev_run_tries_everything_and_leaves_no_file(
    fast_dev_run: Any, rounds: int, make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    class LogsItself(Counting):
        def on_train_epoch_end(self) -> None:
            self.logger.experiment.add_scalar("mine", 1.0, self.current_epoch)  # type: ignore[union-attr]

    module = LogsItself()
    callbacks = [ModelCheckpoint(tmp_path / "saved", monitor="val/loss")]
    flags = {**keeps_files, "max_rounds": 50, "num_sanity_val_steps": 2, "callbacks": callbacks}
    trainer = make_trainer(fast_dev_run=fast_dev_run, clients_per_round=1, **flags)
    trainer.fit(module, federation(sizes=(40,)))
    assert trainer.run.round == rounds
    assert len(module.batches) == rounds * rounds
    assert module.evaluated == rounds * min(rounds, 3)
    trainer.test(module, federation(sizes=(40,)), verbose=False)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_val_every_n_rounds_and_after_the_last(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    make_trainer(max_rounds=5, val_every_n_rounds=2, **keeps_files).fit(Perceptron(), federation())
    rows = read_rows(tmp_path)
    assert [row["round"] for row in rows if row["val/loss"]] == ["1", "3", "4"]
    assert len(rows) == 5


def test_log_every_n_rounds_and_after_the_last(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    make_trainer(max_rounds=5, log_every_n_rounds=2, **keeps_files).fit(Perceptron(), federation())
    assert [row["round"] for row in read_rows(tmp_path)] == ["1", "3", "4"]


@pytest.mark.parametrize("max_time", ["00:00:00:01", {"seconds": 1}])
@pytest.mark.matrix
def test_max_time(max_time: Any, make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]) -> None:
    class Slow(Callback):
        def on_train_epoch_end(self, *arguments: Any) -> None:
            time.sleep(0.4)

    trainer = make_trainer(max_rounds=100, max_time=max_time, callbacks=Slow(), **keeps_files)
    trainer.fit(Perceptron(), federation())
    assert 1 <= trainer.run.round <= 3
    assert len(read_rows(tmp_path)) == trainer.run.round
    assert (tmp_path / "model.ckpt").is_file()


def test_fitting_is_true_only_while_a_fit_runs(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    inside = []

    class Watch(Callback):
        def setup(self, trainer: Any, *arguments: Any, **options: Any) -> None:
            inside.append(trainer.fitting)

        def teardown(self, trainer: Any, *arguments: Any, **options: Any) -> None:
            inside.append(trainer.fitting)

    trainer = make_trainer(callbacks=Watch())
    assert not trainer.fitting
    trainer.fit(Perceptron(), federation())
    assert not trainer.fitting
    trainer.test(verbose=False)
    assert inside == [True, True, False, False]
    trainer.save_checkpoint(tmp_path / "model.ckpt", weights_only=True)
    assert "federation" not in torch.load(tmp_path / "model.ckpt", weights_only=True)


def test_a_run_that_is_saved_after_its_fit_goes_on(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    initial = Perceptron().state_dict()

    def fitted(rounds: int, ckpt_path: Path | None = None) -> tuple[FederatedTrainer, Perceptron]:
        module = Perceptron()
        module.load_state_dict(initial)
        trainer = make_trainer(max_rounds=rounds)
        trainer.fit(module, federation(), SCAFFOLD(), ckpt_path=ckpt_path)
        return trainer, module

    trainer, _ = fitted(2)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    assert (vector(fitted(4, tmp_path / "run.ckpt")[1]) == vector(fitted(4)[1])).all()
    trainer.validate(Perceptron(), federation(), verbose=False)  # another module
    for other in (trainer, make_trainer()):
        with pytest.raises(UserError, match="no fit has begun its rounds"):
            other.save_checkpoint(tmp_path / "run.ckpt")


def test_the_checkpoint_callback_names_the_last_checkpoint(
    make_trainer: MakeTrainer, keeps_files: dict[str, Any]
) -> None:
    trainer = make_trainer(max_rounds=2, **keeps_files)
    trainer.fit(Perceptron(), federation())
    path = trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    assert torch.load(path, weights_only=True)["epoch"] == 2


def test_no_rounds_at_all(make_trainer: MakeTrainer) -> None:
    module = Perceptron()
    before = vector(module)
    make_trainer(max_rounds=0).fit(module, federation())
    assert (vector(module) == before).all()


def test_detect_anomaly_names_the_operation_and_is_put_back(make_trainer: MakeTrainer) -> None:
    class Broken(Perceptron):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch) + (self.output.weight.sum() * 0).sqrt()

    with pytest.raises(RuntimeError, match=r"MulBackward0.*nan"):
        make_trainer(detect_anomaly=True).fit(Broken(), federation())
    assert not torch.is_anomaly_enabled()
    trainer = make_trainer(detect_anomaly=False)
    trainer.fit(Broken(), federation())
    assert trainer.callback_metrics["clients/rejected"] == 3


class Switches(NamedTuple):
    """Torch's global switches, `benchmark` being cuDNN's."""

    deterministic: bool
    only_warns: bool
    benchmark: bool

    @classmethod
    def now(cls) -> "Switches":
        return cls(
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.benchmark,
        )

    def set(self) -> None:
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.only_warns)
        torch.backends.cudnn.benchmark = self.benchmark


@pytest.mark.parametrize(
    "before", [Switches(False, False, False), Switches(False, False, True), Switches(True, True, True)]
)
@pytest.mark.parametrize("deterministic", [None, False, True, "warn"])
@pytest.mark.parametrize("benchmark", [None, False, True])
@pytest.mark.sampled(12)
def test_global_switches_are_lightnings_in_a_fit_and_put_back(
    before: Switches,
    deterministic: Any,
    benchmark: bool | None,
    make_trainer: MakeTrainer,
    make_stock_trainer: Callable[..., L.Trainer],
) -> None:
    flags = {"deterministic": deterministic, "benchmark": benchmark}
    inside = []

    class Watch(Callback):
        def on_train_start(self, *arguments: Any) -> None:
            inside.append(Switches.now())

    given = Switches.now()
    try:
        before.set()
        make_stock_trainer(**flags)
        expected = Switches.now()
        before.set()
        make_trainer(**flags, max_rounds=1, callbacks=Watch()).fit(Perceptron(), federation())
        assert inside == [expected]
        assert Switches.now() == before
    finally:
        given.set()


def test_a_profiler_reports_each_session_as_in_lightning(
    make_trainer: MakeTrainer,
    make_stock_trainer: Callable[..., L.Trainer],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer, stock = (
        make(profiler=SimpleProfiler(tmp_path / name, "times"))
        for make, name in ((make_trainer, "ours"), (make_stock_trainer, "stock"))
    )
    data = federation()
    for one, given in ((trainer, [data]), (stock, [DataLoader(TensorDataset(*samples(2)))] * 2)):
        module = Perceptron()
        one.fit(module, *given)
        one.validate(module, *given[-1:], verbose=False)
    assert len(trainer.profiler.recorded_durations["train_round"]) == 2
    reports = [{path.name: path.read_text()[:20] for path in (tmp_path / name).iterdir()} for name in ("ours", "stock")]
    assert reports[0] == reports[1] != {}
    trainer = make_trainer(profiler="simple", max_rounds=1)
    with caplog.at_level(logging.INFO):
        trainer.plan(Perceptron(), data)
        assert "Profiler Report" not in caplog.text, "a plan reported the times of its rehearsal"
        trainer.fit(Perceptron(), data)
    assert "FIT Profiler Report" in caplog.text


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("bf16-mixed", 0.05), ("bf16-true", 0.1), ("bf16", 0.05), (32, 0)]
)
@pytest.mark.parametrize("algorithm", [FedAvg(), FedProx(mu=0), DeviceM(local_beta=0)], ids=lambda a: a.name)
def test_precisions_give_nearly_the_same(
    precision: Any, tolerance: float, algorithm: Algorithm, make_trainer: MakeTrainer
) -> None:
    module = Perceptron()
    exact = copy.deepcopy(module)
    make_trainer(max_rounds=3).fit(exact, federation(), algorithm)
    make_trainer(max_rounds=3, precision=precision).fit(module, federation(), algorithm)
    assert next(module.parameters()).dtype == (torch.bfloat16 if precision == "bf16-true" else torch.float32)
    difference = np.abs(vector(module) - vector(exact)).max()
    assert difference <= tolerance
    assert (difference > 0) == (tolerance > 0)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
@pytest.mark.parametrize("runner", ["serial", "stacked", "lightning"])
def test_batches_have_the_numbers_of_lightnings_trainer(
    runner: str, precision: Any, make_trainer: MakeTrainer, make_stock_trainer: Callable[..., L.Trainer]
) -> None:
    """Test that mixed precision leaves batches alone: bfloat16 has no number between 256 and 258."""
    seen: set[tuple[torch.dtype, ...]] = set()

    class Sees(Perceptron):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.add(tuple(part.dtype for part in batch))
            return super().training_step(batch, batch_idx)

    make_trainer(max_rounds=1, precision=precision, runner=runner).fit(Sees(), federation())
    ours = seen.copy()
    seen.clear()
    loader = DataLoader(TensorDataset(*samples(8)), batch_size=4)
    make_stock_trainer(precision=precision).fit(Sees(), loader)
    assert ours == seen


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_configure_model_makes_numbers_of_the_precision(
    precision: Any, make_trainer: MakeTrainer, make_stock_trainer: Callable[..., L.Trainer]
) -> None:
    class Makes(Perceptron):
        def configure_model(self) -> None:
            self.tenth = torch.tensor(0.1)

    modules = Makes(), Makes()
    make_trainer(max_rounds=1, precision=precision).fit(modules[0], federation())
    make_stock_trainer(precision=precision).fit(modules[1], DataLoader(TensorDataset(*samples(8)), batch_size=4))
    assert modules[0].tenth.dtype == modules[1].tenth.dtype
    assert float(modules[0].tenth) == float(modules[1].tenth)


class TwiceByHand(Perceptron):
    """Makes two steps with each batch by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        return [super().optimizers(use_pl_optimizer)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for _ in range(2):
            loss = stepped_by_hand(self, self.loss(batch))
        return loss


@pytest.mark.parametrize(
    ("make", "algorithm"),
    [(TwiceByHand, FedAvg()), (Perceptron, MOON(mu=10, tau=0.3))],
    ids=["two steps by hand", "three models in a step"],
)
def test_mixed_precision_reads_the_weights_of_the_moment(
    make: type[Perceptron], algorithm: Algorithm, make_trainer: MakeTrainer
) -> None:
    """Test that bfloat16 copies of weights do not outlive them within a step, to the precision of bfloat16."""
    module = make()
    start, exact = vector(module), copy.deepcopy(module)
    make_trainer(max_rounds=3).fit(exact, federation(), algorithm)
    make_trainer(max_rounds=3, precision="bf16-mixed").fit(module, federation(), algorithm)
    difference = np.linalg.norm(vector(module) - vector(exact)) / np.linalg.norm(vector(exact) - start)
    assert 0 < difference < 0.05


@pytest.mark.parametrize("example", ["tensor", "tuple", "dictionary"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_takes_the_example_of_the_summary(
    precision: str, example: str, make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    inputs, module, data = torch.zeros(2, 3), Perceptron(), federation()
    module.example_input_array = {"tensor": inputs, "tuple": (inputs,), "dictionary": {"x": inputs}}[example]
    flags = {"enable_model_summary": True, "enable_progress_bar": True, "num_sanity_val_steps": 1}
    trainer = make_trainer(max_rounds=1, precision=precision, **flags)
    with caplog.at_level("INFO", "lightning.pytorch.callbacks.model_summary"):
        trainer.fit(module, data)
    assert "In sizes" in caplog.text
    for stage in (trainer.validate, trainer.test, trainer.predict):
        stage(module, data)


@pytest.mark.parametrize(
    ("stage", "remedy"),
    [("validate", "write one, or set val_fraction"), ("test", "write one"), ("predict", "write one")],
)
def test_evaluations_without_a_loader_are_refused(stage: str, remedy: str, make_trainer: MakeTrainer) -> None:
    hook = {"validate": "val"}.get(stage, stage)
    with pytest.raises(UserError, match=f"^OnlyTrains has no {hook}_dataloader: {remedy}.$"):
        getattr(make_trainer(), stage)(Perceptron(), Federated(OnlyTrains(), num_clients=2))


@pytest.mark.parametrize("algorithm", [FedAvg(), FedProx(), DeviceM()], ids=lambda a: a.name)
def test_the_same_run_gives_the_same_bits(algorithm: Algorithm, make_trainer: MakeTrainer) -> None:
    """Test with other draws from the global generators before, and with a module that draws random numbers itself."""

    class Dropping(Perceptron):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.dropout(x, 0.3, train=self.training) + 0.1 * float(np.random.rand()))  # noqa: NPY002

    first = Dropping()
    second = copy.deepcopy(first)
    make_trainer(dropout_rate=0.3).fit(first, federation(), algorithm)
    torch.rand(5)
    np.random.rand(3)  # noqa: NPY002
    make_trainer(dropout_rate=0.3).fit(second, federation(), algorithm)
    assert (vector(first) == vector(second)).all()


class Scaled(Perceptron):
    """Module with a parameter and a buffer without dimensions, such as a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.0))
        self.register_buffer("offset", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale + self.offset


def test_numbers_as_parameters_and_buffers(make_trainer: MakeTrainer) -> None:
    module = Scaled()
    trainer = make_trainer()
    trainer.fit(module, federation())
    assert module.scale.shape == ()
    assert module.scale != 1
    assert module.offset == 0.5
    assert trainer.callback_metrics["comm/uplink_bits"] == 3 * 32 * (27 + 1)


BAD_FLAGS: list[tuple[str, Any]] = [
    ("max_rounds", -1),
    ("max_rounds", 2.5),
    ("clients_per_round", 0),
    ("clients_per_round", -3),
    ("clients_per_round", 1.5),
    ("clients_per_round", 0.0),
    ("clients_per_round", float("nan")),
    ("local_epochs", 0),
    ("local_epochs", 1.5),
    ("local_steps", 0),
    ("dropout_rate", 1.0),
    ("dropout_rate", -0.1),
    ("dropout_rate", float("nan")),
    ("straggler_rate", 1.5),
    ("straggler_rate", -0.1),
    ("val_every_n_rounds", 0),
    ("log_every_n_rounds", 0),
    ("checkpoint_every_n_rounds", 0),
    ("accumulate_grad_batches", 0),
    ("limit_train_batches", -1),
    ("limit_train_batches", 1.5),
    ("limit_train_batches", 0),
    ("limit_train_batches", 0.0),
    ("clients_per_round", 1e-300),
    ("max_time", "00:00:00:00"),
    ("max_time", {"seconds": 0}),
    ("max_time", {"days": 10**30}),
    ("num_nodes", 0),
    ("limit_val_batches", -0.5),
    ("limit_test_batches", 2.0),
    ("limit_predict_batches", -7),
    ("num_sanity_val_steps", -2),
    ("gradient_clip_val", -1.0),
    ("gradient_clip_algorithm", "nrom"),
    ("fast_dev_run", -1),
    ("fast_dev_run", 0.5),
    ("max_time", "soon"),
    ("runner", "paralel"),
    ("deterministic", "wran"),
    ("profiler", "simpel"),
    ("precision", "16-mixed"),
    ("precision", "64-treu"),
    ("strategy", "fsdp"),
    ("strategy", "deepspeed_stage_2"),
    ("strategy", "ddb"),
    ("accelerator", "gqu"),
    ("devices", 0),
]


OF_LIGHTNING = signature(L.Trainer).parameters
SHARED_FLAGS = sorted(OF_LIGHTNING.keys() & signature(FederatedTrainer).parameters.keys())


@pytest.mark.parametrize("flag", SHARED_FLAGS)
def test_a_flag_takes_what_lightning_has_by_default(
    flag: str, make_trainer: MakeTrainer, make_stock_trainer: Callable[..., L.Trainer]
) -> None:
    """Test that None, which scripts pass on, is Lightning's default also where that is a number."""
    given = {flag: OF_LIGHTNING[flag].default}
    trainer, stock = make_trainer(**given), make_stock_trainer(**given)
    if isinstance(expected := getattr(stock, flag, None), (bool, int, float)):
        assert getattr(trainer, flag) == expected


@pytest.mark.parametrize(("flag", "value"), BAD_FLAGS, ids=[f"{flag}={value}" for flag, value in BAD_FLAGS])
def test_values_that_are_not_allowed_are_refused(flag: str, value: Any, make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError) as error:
        make_trainer(**{flag: value}).fit(Perceptron(), federation())
    sentence = str(error.value)
    assert flag.split("_", 1)[0] in sentence
    assert str(value) in sentence


def test_a_sharded_strategy_is_refused_as_an_object_too(make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match="strategy 'modelparallelstrategy' shards one model over accelerators"):
        make_trainer(strategy=ModelParallelStrategy(lambda module, mesh: module))


@pytest.mark.parametrize(
    ("flag", "given", "meant"),
    [
        ("profiler", "simpel", "simple"),
        ("precision", "64-treu", "64-true"),
        ("runner", "serail", "serial"),
        ("gradient_clip_algorithm", "nrom", "norm"),
    ],
)
def test_misspelt_names_find_their_nearest_match(flag: str, given: str, meant: str, make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match=f"did you mean '{meant}'"):
        make_trainer(**{flag: given})


def test_apples_mps_which_has_no_float64_is_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MPSAccelerator, "is_available", staticmethod(lambda: True))
    assert FederatedTrainer(accelerator="auto", logger=False).fabric.device.type == "cpu"
    for accelerator in ("mps", "gpu"):
        with pytest.raises(UserError, match=f"'{accelerator}' is Apple's MPS, which has no float64.*: cpu"):
            FederatedTrainer(accelerator=accelerator, logger=False)


def test_local_epochs_and_local_steps_exclude_each_other(make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match=r"local_epochs=2 and local_steps=3 exclude each other"):
        make_trainer(local_epochs=2, local_steps=3)

"""Test what a run will cost before it is trained: the bytes of metrics.csv, nothing changed, limits in sentences."""

import copy
import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import lightning as L  # noqa: N812
import pytest
import torch
from compared_runs import MakeTrainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    EarlyStopping,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from roster import COVERING, ROSTER
from toys import Convolved, Normalised, Perceptron, Served, Sizes, federation, samples

from lightning_fl import FederatedTrainer, UserError
from lightning_fl.algorithms import (
    SCAFFOLD,
    Algorithm,
    FedADP,
    FedAP,
    FedAsync,
    FedAvg,
    FedBuff,
    FedKT,
    FedProx,
    PruneFL,
)
from lightning_fl.callbacks import BackdoorProbe, ClientEvaluation, CommunicationMeter, MagnitudePruning
from lightning_fl.codecs import QSGD, STC, Changes, EntropyCoded, ErrorFeedback, Followed, TopK
from lightning_fl.data import Arrays
from lightning_fl.features.clock import ClientClock
from lightning_fl.features.privacy import ClientPrivacy
from lightning_fl.outputs.plan import Plan
from lightning_fl.plan import needed_resources, rehearsal, short_training
from lightning_fl.slots import Codec
from lightning_fl.steps import Apply, Compress

DEPENDS_ON_VALUES = ("FedADP", "FedADP-magnitude", "PruneFL", "FedAdamSSM-second", "FairnessTop-max")
"""Methods that send as many units as fit, or masks and unions of masks as long as they happen to be."""


@pytest.fixture(autouse=True)
def _no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rehearsals take as long as they need, on a busy machine too."""
    monkeypatch.setattr(rehearsal, "MOST_SECONDS", 3600.0)


def costs(trainer: FederatedTrainer) -> tuple[float, float, int]:
    """Return bytes up and down and steps of a finished run."""
    row = trainer.fit_loop.rows[-1]
    return row["comm/total_uplink_bytes"], row["comm/total_downlink_bytes"], trainer.run.num_steps


def macs(trainer: FederatedTrainer) -> float:
    """Return the multiply-accumulates of the clients' training in a finished run, and of the losses that they choose by."""
    rows = trainer.fit_loop.rows
    training = 3 * sum(row.get("clients/macs", row["model/macs"] * row["clients/samples"]) for row in rows)
    return training + sum(row["model/macs"] * row.get("clients/loss_samples", 0) for row in rows)


FIRST = {*DEPENDS_ON_VALUES, *COVERING[::6]}
"""Methods that are planned by default: those with rare answers, and some others."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FIRST else pytest.mark.matrix)
        for name in dict.fromkeys((*COVERING, *DEPENDS_ON_VALUES))
    ],
)
def test_a_plan_has_the_bytes_and_steps_of_the_run(name: str, make_trainer: MakeTrainer) -> None:
    entry, module = ROSTER[name], Perceptron()
    trainer = make_trainer(max_rounds=3, local_epochs=2)
    plan = trainer.plan(module, entry.federation(), entry.algorithm())
    trainer.fit(module, entry.federation(), entry.algorithm())
    first = trainer.fit_loop.rows[0]
    assert plan.is_exact == (name not in DEPENDS_ON_VALUES)
    assert plan.steps == trainer.run.num_steps
    assert plan.round_uplink_bytes == first["comm/uplink_bits"] / 8
    assert plan.round_downlink_bytes == first["comm/downlink_bits"] / 8
    if plan.is_exact:
        assert (plan.uplink_bytes, plan.downlink_bytes, plan.steps) == costs(trainer)
    if plan.has_fixed_work:
        assert plan.macs == macs(trainer)


@pytest.mark.parametrize(
    "flags",
    [
        {"dropout_rate": 0.4, "straggler_rate": 0.5},
        {"runner": "stacked", "clients_at_once": 2},
        {"local_steps": 3, "accumulate_grad_batches": 2},
        {"callbacks": MagnitudePruning(rate=0.4, prune_epoch=1)},
        {"callbacks": CommunicationMeter(max_uplink_bytes=1e9)},
        {"callbacks": [CommunicationMeter(max_total_bytes=1500)]},  # ends the run after its second round
        {"client_states": "disk"},
    ],
    ids=lambda flags: next(iter(flags)),
)
def test_flags_and_prunings_are_in_a_plan(flags: dict[str, Any], make_trainer: MakeTrainer) -> None:
    module, trainer = Normalised(), make_trainer(max_rounds=4, **flags)
    plan = trainer.plan(module, federation(), FedProx(mu=0.1))
    trainer.fit(module, federation(), FedProx(mu=0.1))
    assert plan.is_exact
    assert (plan.uplink_bytes, plan.downlink_bytes, plan.steps) == costs(trainer)
    assert plan.rounds == trainer.current_epoch


def test_batches_of_one_sample_are_no_steps_of_the_set_up(make_trainer: MakeTrainer) -> None:
    method = FedKT(mode="one_shot", s=1, t=2, epochs=3, batch_size=4)
    plan = make_trainer().plan(Normalised(), Served(9), method)
    # Halves of 3, 5, 4, 9, 12 and 7 samples take 13 steps an epoch, the server's nine 2, with batch normalisation.
    assert plan.steps == 3 * (13 + 6 * 2 + 2)


@pytest.mark.parametrize("codec", [QSGD(coding="elias"), ErrorFeedback(STC(0.3))], ids=["elias", "golomb"])
def test_sizes_that_depend_on_values_are_about_so(codec: Codec, make_trainer: MakeTrainer) -> None:
    plan = make_trainer(max_rounds=3).plan(Perceptron(), federation(), FedAvg(uplink=codec))
    assert not plan.is_fixed
    assert "The bytes depend on the training." in str(plan)
    assert str(plan).count("about") >= 4


@pytest.mark.parametrize(
    "method",
    [
        FedADP(),
        PruneFL(initial_passes=2),
        FedAvg(downlink=Changes()),
        FedAvg(uplink=EntropyCoded(QSGD())),
        FedAvg(uplink=ErrorFeedback(STC(0.3))),
        Algorithm(steps=[Apply(), Compress(STC(0.3))], downlink=Followed(STC(0.3))),
    ],
    ids=repr,
)
def test_bytes_that_depend_on_values_are_never_called_exact(
    method: Algorithm, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test two rehearsals of one model, which have the same bytes."""
    monkeypatch.setattr(rehearsal, "_disturb", lambda run: None)
    monkeypatch.setattr(rehearsal, "ShortTraining", lambda inner, num, seed: short_training.ShortTraining(inner, num))
    plan = make_trainer(max_rounds=1).plan(Perceptron(), Served(9), method)
    assert not plan.is_fixed


@pytest.mark.parametrize("method", [FedAvg(), FedBuff(2), FedAsync()], ids=repr)
def test_simulated_seconds_and_starts_are_those_of_the_run(method: Algorithm, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=4, clock=ClientClock(devices="phones", macs_per_second=1e5))
    plan = trainer.plan(Perceptron(), federation(), method)
    trainer.fit(Perceptron(), federation(), method)
    assert plan.simulated_seconds == pytest.approx(trainer.run.simulated_seconds)
    assert plan.round_simulated_seconds == pytest.approx(trainer.history["time/simulated_seconds"].iloc[0])
    assert (plan.uplink_bytes, plan.downlink_bytes, plan.steps) == costs(trainer)


def test_client_of_several_uploads_is_timed_once(make_trainer: MakeTrainer) -> None:
    class Counting(Perceptron):
        sizes: ClassVar[list[int]] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.sizes.append(len(batch[0]))
            return super().training_step(batch, batch_idx)

    make_trainer(max_rounds=1, clients_per_round=1).plan(Counting(), federation((8,)), FedBuff(5))
    assert Counting.sizes.count(4) == 2, "the batches of one whole training"


def test_a_callback_that_declares_it_takes_part(make_trainer: MakeTrainer) -> None:
    class Pausing(L.Callback):
        in_rehearsals = True
        rounds = 0

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            Pausing.rounds += 1

    make_trainer(max_rounds=3, callbacks=Pausing()).plan(Perceptron(), federation(), FedAvg())
    assert Pausing.rounds > 0


def test_what_goes_wrong_in_rehearsed_rounds_is_not_said(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, module = make_trainer(max_rounds=30), Perceptron(lr=1e30)
    plan = trainer.plan(module, federation(), FedAvg())
    assert plan.uplink_bytes == 30 * 3 * 26 * 4
    assert "rejected" not in caplog.text, "the rounds of a plan train on altered messages"
    trainer.fit(module, federation(), FedAvg())
    assert "rejected" in caplog.text


def test_nothing_is_changed_or_written(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    class Asked(L.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            raise AssertionError("a callback of the user's takes no part")

    module, data = Normalised(), federation()
    module.log_of_steps = []  # type: ignore[assignment]
    before, random = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    trainer = make_trainer(
        max_rounds=3,
        logger=None,
        enable_checkpointing=True,
        callbacks=[Asked(), ModelCheckpoint(dirpath=tmp_path / "best")],
    )
    attributes = vars(trainer).copy()
    plan = trainer.plan(module, data, "SCAFFOLD")
    assert vars(trainer) == attributes
    assert list(tmp_path.iterdir()) == []
    assert all(torch.equal(x, before[name]) for name, x in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert module._trainer is None
    assert plan.disk_bytes > 3 * 4 * 26
    assert json.loads(json.dumps(asdict(plan)))["uplink_bytes"] == plan.uplink_bytes


def test_a_fit_is_the_same_after_a_plan(make_trainer: MakeTrainer) -> None:
    ends = []
    module = Perceptron()
    for is_planned in (False, True):
        torch.manual_seed(0)
        trainer, twin, data = make_trainer(max_rounds=3), copy.deepcopy(module), federation()
        if is_planned:
            trainer.plan(twin, data, FedAvg())
        trainer.fit(twin, data, FedAvg())
        ends.append(twin.state_dict())
        trainer.plan(twin, data, FedAvg())  # of a module that has been trained
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_limits_are_said_in_a_sentence_each(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round sends 3 · 26 numbers, 312 bytes."""
    monkeypatch.setattr(needed_resources, "machine_bytes", lambda: 1000)
    trainer = make_trainer(
        max_rounds=5,
        callbacks=CommunicationMeter(max_uplink_bytes=700, max_total_bytes=700),
        max_time={"milliseconds": 1},
    )
    plan = trainer.plan(Perceptron(), federation(), FedAvg())
    assert "CommunicationMeter will stop the run after round 3 of 5: its limit of uplink is 700 B." in plan.warnings
    assert (
        "CommunicationMeter will stop the run after round 2 of 5: its limit of total traffic is 700 B." in plan.warnings
    )
    assert "max_time will stop the run after about round 1 of 5: it is 1 ms." in plan.warnings
    assert any("of memory, but this machine has 1.00 kB" in said for said in plan.warnings)
    assert all(said in str(plan) for said in plan.warnings)
    assert (
        not make_trainer(callbacks=CommunicationMeter(max_uplink_bytes=1e9))
        .plan(Perceptron(), federation())
        .warnings[1:]
    )


@pytest.mark.parametrize("most_seconds", [100.0, 0.0], ids=["in time", "late"])
def test_the_rounds_after_a_pruning_are_not_taken_to_be_like_it(
    most_seconds: float, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pruning asks clients, which costs bytes; the time may be over in its round."""
    monkeypatch.setattr(rehearsal, "MOST_SECONDS", most_seconds)

    def planned(num_rounds: int, **options: Any) -> Plan:
        return make_trainer(max_rounds=num_rounds).plan(Convolved(), Served(9), FedAP(prune_round=1, **options))

    fixed, trainer = planned(7, rate_mode="fixed", rate=0.6), make_trainer(max_rounds=7)
    trainer.fit(Convolved(), Served(9), FedAP(prune_round=1, rate_mode="fixed", rate=0.6))
    assert fixed.is_fixed
    assert fixed.rehearsed_rounds == (7 if most_seconds else 4)
    assert (fixed.uplink_bytes, fixed.downlink_bytes) == costs(trainer)[:2]
    assert fixed.has_fixed_work
    first, last = trainer.fit_loop.rows[0], trainer.fit_loop.rows[-1]
    assert last["model/macs"] < first["model/macs"]
    if most_seconds:
        assert fixed.macs == macs(trainer)
    found, longer = planned(7, max_sources=3), planned(8, max_sources=3)
    assert not found.is_fixed, "the data decide how much is pruned"
    for line in str(found).splitlines():
        assert "about" in line or not line.startswith(("uplink", "steps", "MACs"))
    assert longer.uplink_bytes - found.uplink_bytes <= found.round_uplink_bytes
    assert longer.downlink_bytes - found.downlink_bytes <= found.round_downlink_bytes
    assert planned(1).is_fixed, "the pruning would come after the run"


def test_time_has_that_of_prunings(make_trainer: MakeTrainer) -> None:
    class Slow(MagnitudePruning):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            time.sleep(0.1)
            super().on_train_epoch_start(trainer, pl_module)

    plan = make_trainer(max_rounds=4, callbacks=Slow(0.4, prune_epoch=1)).plan(Perceptron(), federation(), FedAvg())
    assert plan.seconds >= 0.4


@pytest.mark.parametrize("method", [FedAvg(), SCAFFOLD(), FedAvg(uplink=ErrorFeedback(TopK(0.5)))], ids=repr)
@pytest.mark.parametrize("every", [1, 2])
def test_disk_is_that_of_the_files(
    method: Algorithm, every: int, make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    class Wide(Perceptron):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.output = torch.nn.Linear(3, 2000), torch.nn.Linear(2000, 2)

    trainer = make_trainer(max_rounds=6, checkpoint_every_n_rounds=every, **keeps_files)
    plan = trainer.plan(Wide(), federation(), method)
    trainer.fit(Wide(), federation(), method)
    files = [*(tmp_path / "checkpoints").rglob("*"), tmp_path / "model.ckpt"]
    assert plan.disk_bytes == pytest.approx(sum(path.stat().st_size for path in files if path.is_file()), rel=0.15)


def test_a_long_run_goes_on_as_the_last_rehearsed_round(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsal, "MOST_SECONDS", -1.0)
    plan = make_trainer(max_rounds=1000).plan(Perceptron(), federation(), FedAvg())
    assert 1 <= plan.rehearsed_rounds <= 3
    assert not plan.is_exact
    assert plan.uplink_bytes == 1000 * 3 * 26 * 4
    assert "the others are assumed to be like the last of these" in str(plan)


def test_time_is_that_of_the_clients_that_are_not_trained(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a clock on which each batch takes an hour."""
    hour, now = 3600.0, [0.0]
    for part in (rehearsal, short_training):
        monkeypatch.setattr(part, "perf_counter", lambda: now[0])

    class Slow(Perceptron):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            now[0] += hour
            return super().training_step(batch, batch_idx)

    plans = [
        make_trainer(
            max_rounds=2, clients_per_round=1.0, local_epochs=epochs, limit_val_batches=0, runner="serial"
        ).plan(Slow(), federation(sizes=(40,) * 10), FedAvg())
        for epochs in (1, 4)
    ]
    num_steps = 10 * 10  # in a pass of all clients
    assert plans[0].round_seconds == pytest.approx(num_steps * hour, rel=0.01)
    assert plans[1].round_seconds == pytest.approx(4 * num_steps * hour, rel=0.01)
    assert plans[1].steps == 4 * plans[0].steps == 4 * 2 * num_steps
    assert plans[0].macs is not None
    assert math.isclose(plans[1].macs or 0, 4 * plans[0].macs)


def test_a_table_fits_80_columns() -> None:
    numbers = {name: 10**14 for name in Plan.__dataclass_fields__ if "bytes" in name or "steps" in name}
    rest: dict[str, Any] = {
        "setup_seconds": 1e6,
        "round_seconds": 99.0,
        "seconds": 9e7,
        "round_simulated_seconds": 99.0,
        "simulated_seconds": 9e7,
        "macs": 1e20,
        "is_fixed": False,
        "has_fixed_work": False,
    }
    plan = Plan(algorithm="FedAdamSSM", rounds=10_000, clients=1_000, rehearsed_rounds=17, **numbers, **rest)
    assert max(map(len, str(plan).splitlines()[:10])) <= 80


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((Perceptron(), federation(), "FedAvq"), ["algorithm 'FedAvq' is unknown"]),
        ((Perceptron(), [1], "FedAvg"), ["datamodule must be a FederatedDataModule"]),
        ((3, federation(), "FedAvg"), ["model must be a LightningModule"]),
    ],
)
def test_mistakes_are_those_of_a_fit(arguments: Any, words: list[str], make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError) as refusal:
        make_trainer().plan(*arguments)
    assert all(word in str(refusal.value) for word in words)


class Logging(L.Callback):
    """Callback of the user's with a column of its own."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("own/value", 1.0)


class Stepping(L.Callback):
    """Callback of the user's with a hook within a step."""

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Do nothing."""


class Averaging(Normalised):
    """Module that brings a callback."""

    def configure_callbacks(self) -> Any:
        return [StochasticWeightAveraging(0.1)]


def with_plateau(module: Any) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val/loss"}}


def held_out() -> Arrays:
    return Arrays(train=samples(40), test=samples(10, seed=1), num_clients=6, partition=Sizes(), val_fraction=0.2)


class Naming(Perceptron):
    """Module that logs in training under a name of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("mine", loss, on_step=False, on_epoch=True)
        return loss


ALIKE = ClientPrivacy(noise_multiplier=0)
SILENT = ClientPrivacy(noise_multiplier=0, side_channels="drop")
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "plateau": ({"module": lambda: Perceptron(configure=with_plateau)}, ""),
    "plateau seldom": (
        {"module": lambda: Perceptron(configure=with_plateau), "val_every_n_rounds": 2},
        "ReduceLROnPlateau conditioned on metric val/loss which is not available",
    ),
    "held out": ({"privacy": SILENT, "data": held_out}, "set data.val_fraction to 0"),
    "clock": ({"privacy": SILENT, "clock": ClientClock()}, "no expected time with a clock of clients"),
    "masks": ({"privacy": SILENT, "callbacks": MagnitudePruning(0.4)}, "no expected bits with MagnitudePruning"),
    "own callback": ({"privacy": SILENT, "callbacks": Logging()}, "does not know whether Logging logs"),
    "private": ({"privacy": SILENT, "callbacks": EarlyStopping("val/loss")}, ""),
    "clients": ({"callbacks": ClientEvaluation()}, "ClientEvaluation"),
    "images": ({"callbacks": BackdoorProbe()}, "BackdoorProbe needs batches of images"),
    "averages": ({"module": Normalised, "callbacks": StochasticWeightAveraging(0.1)}, "statistics of batch norm"),
    "backbone": ({"callbacks": BackboneFinetuning()}, "freezes the part 'backbone', which Perceptron does not have"),
    "nothing frozen": ({"callbacks": BaseFinetuning()}, "BaseFinetuning does not say what it freezes"),
    "in training": (
        {"privacy": ALIKE, "module": Naming, "callbacks": [Logging(), EarlyStopping("mine")]},
        "EarlyStopping acts on mine, which is logged while clients train",
    ),
    "module's": ({"module": Averaging}, "statistics of batch normalisation"),
    "nearly": ({"callbacks": EarlyStopping("val/los")}, "EarlyStopping monitors 'val/los', which is not logged"),
    "unknown": ({"callbacks": EarlyStopping("something")}, "EarlyStopping monitors 'something', which is not logged"),
    "logged": ({"callbacks": [Logging(), EarlyStopping("own/value")]}, ""),
    "stacked": ({"callbacks": Stepping(), "runner": "stacked"}, "Stepping"),
    "metric": ({"metric": "val/f1"}, "val/f1"),
}
"""Runs, with what they are refused for."""


@pytest.mark.parametrize("name", CASES)
def test_a_plan_refuses_what_a_fit_refuses_with_the_same_sentence(name: str, make_trainer: MakeTrainer) -> None:
    given, reason = CASES[name]
    flags = {"max_rounds": 2, **given}
    module, data = flags.pop("module", Perceptron), flags.pop("data", federation)

    def refusal(method: str) -> str:
        try:
            getattr(make_trainer(**copy.deepcopy(flags)), method)(module(), data(), FedAvg())
        except UserError as error:
            return str(error)
        return ""

    said = refusal("fit")
    assert refusal("plan") == said
    assert reason in said
    assert bool(reason) == bool(said)


def test_a_module_that_cannot_be_copied_is_one_sentence(make_trainer: MakeTrainer) -> None:
    class Uncopied(Perceptron):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("it holds a socket")

    with pytest.raises(
        UserError, match="a plan trains a copy of the module, but Uncopied cannot be copied: it holds a"
    ):
        make_trainer().plan(Uncopied(), federation())

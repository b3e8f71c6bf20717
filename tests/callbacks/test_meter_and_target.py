"""Test CommunicationMeter and TargetReached in a stock `L.Trainer` and in a federation, against counts made by hand."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import processes
import pytest
import torch
from compared_runs import equal_states
from lightning.pytorch.callbacks import ModelCheckpoint
from quiet import QUIET
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fl import FederatedTrainer, UserError
from lightning_fl.algorithms import FedAdamSSM, FedAvg, FedPAQ
from lightning_fl.callbacks import (
    CodecError,
    CommunicationMeter,
    EnergyMeter,
    FilterPruning,
    MagnitudePruning,
    SparseUpdates,
    TargetReached,
)
from lightning_fl.codecs import Dense
from lightning_fl.data import Arrays
from lightning_fl.outputs.metrics_csv import read_rows
from lightning_fl.outputs.units import significant
from lightning_fl.slots import Message, Packed, Payload, RoundContext, State

D = 4 * 1 + 1


class Counts(L.LightningModule):
    """Module that logs 0.1, 0.2, 0.3 … as its accuracy, epoch by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/accuracy", (self.current_epoch + 1) / 10)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader() -> DataLoader:
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x), batch_size=6)


def federation() -> Arrays:
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    y = torch.arange(24) % 2
    return Arrays(train=(x, y), test=(x, y), num_clients=6, batch_size=2)


def test_the_meter_counts_the_gradients_of_ordinary_training(make_stock_trainer: Callable[..., L.Trainer]) -> None:
    meter = CommunicationMeter()
    trainer = make_stock_trainer(max_epochs=3, callbacks=meter)
    trainer.fit(Counts(), loader(), loader())
    assert trainer.callback_metrics["comm/uplink_bits"] == trainer.callback_metrics["comm/downlink_bits"] == 4 * 32 * D
    assert trainer.callback_metrics["comm/total_uplink_bytes"] == 3 * 4 * 4 * D
    accumulated = make_stock_trainer(max_epochs=3, callbacks=CommunicationMeter(), accumulate_grad_batches=2)
    accumulated.fit(Counts(), loader(), loader())
    assert accumulated.callback_metrics["comm/total_uplink_bytes"] == 3 * 2 * 4 * D


def test_splitting_uploads_needs_clients(make_stock_trainer: Callable[..., L.Trainer]) -> None:
    trainer = make_stock_trainer(callbacks=CommunicationMeter(entropy=True))
    with pytest.raises(UserError, match="measures uploads of clients with entropy, but"):
        trainer.fit(Counts(), loader(), loader())


def test_the_meter_counts_on_after_a_checkpoint(make_stock_trainer: Callable[..., L.Trainer], tmp_path: Path) -> None:
    first = make_stock_trainer(max_epochs=2, callbacks=CommunicationMeter())
    first.fit(Counts(), loader(), loader())
    first.save_checkpoint(tmp_path / "half.ckpt")
    meter = CommunicationMeter()
    make_stock_trainer(max_epochs=3, callbacks=meter).fit(
        Counts(), loader(), loader(), ckpt_path=tmp_path / "half.ckpt"
    )
    assert meter.sent_bits == 3 * 4 * 32 * D


@pytest.mark.parametrize(
    ("every", "flags", "step"),
    [
        ({"every_n_train_steps": 6}, {}, 6),
        ({"every_n_train_steps": 6}, {}, 12),
        ({"every_n_epochs": 2}, {"check_val_every_n_epoch": 2}, 8),
    ],
)
def test_the_meter_counts_an_epoch_that_had_not_ended_at_the_checkpoint(
    every: dict[str, int],
    flags: dict[str, int],
    step: int,
    make_stock_trainer: Callable[..., L.Trainer],
    tmp_path: Path,
) -> None:
    """Test checkpoints within an epoch, of its last step, and after its validation, which comes before its end."""
    whole, saves = CommunicationMeter(), ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **every)
    made = make_stock_trainer(max_epochs=4, callbacks=[whole, saves], enable_checkpointing=True, **flags)
    made.fit(Counts(), loader(), loader())
    resumed = CommunicationMeter()
    trainer = make_stock_trainer(max_epochs=4, callbacks=resumed, **flags)
    trainer.fit(Counts(), loader(), loader(), ckpt_path=tmp_path / f"step={step}.ckpt")
    assert resumed.sent_bits == whole.sent_bits == 4 * 4 * 32 * D
    assert trainer.callback_metrics["comm/uplink_bits"] == 4 * 32 * D


@pytest.mark.parametrize(
    ("make", "is_federated"),
    [
        (CommunicationMeter, False),
        (lambda: SparseUpdates(0.4, error_feedback=True), False),
        (lambda: TargetReached(0.2, stop=False), True),
        (lambda: EnergyMeter("lte"), True),
        (CodecError, True),
    ],
    ids=["CommunicationMeter", "SparseUpdates", "TargetReached", "EnergyMeter", "CodecError"],
)
def test_a_callback_starts_afresh_with_another_training(
    make: Callable[[], L.Callback],
    is_federated: bool,
    make_stock_trainer: Callable[..., L.Trainer],
    make_trainer: Callable[..., FederatedTrainer],
) -> None:
    def fit(callback: L.Callback, method: Any) -> None:
        torch.manual_seed(0)
        if is_federated:
            make_trainer(max_rounds=2, callbacks=callback).fit(Counts(), federation(), method)
        else:
            make_stock_trainer(callbacks=callback).fit(Counts(), loader(), loader())

    used, fresh = make(), make()
    fit(used, FedAvg())
    fit(used, FedPAQ())
    fit(fresh, FedPAQ())
    assert equal_states(used.state_dict(), fresh.state_dict())


def test_a_callback_goes_on_with_the_same_training(make_stock_trainer: Callable[..., L.Trainer]) -> None:
    meter, target, module = CommunicationMeter(), TargetReached(0.1, stop=False), Counts()
    trainer = make_stock_trainer(max_epochs=2, callbacks=[meter, target])
    trainer.fit(module, loader(), loader())
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, loader(), loader())
    assert meter.sent_bits == 3 * 4 * 32 * D
    assert target.reached is not None
    assert target.reached["epoch"] == 0


def test_the_meter_splits_a_federation_s_bits_by_kind(
    make_trainer: Callable[..., FederatedTrainer], tmp_path: Path
) -> None:
    trainer = make_trainer(max_rounds=2, callbacks=CommunicationMeter(), logger=True)
    trainer.fit(Counts(), federation(), FedAdamSSM(alpha=0.4))
    rows = read_rows(tmp_path / "metrics.csv")[1]
    k, mask = 2, min(D, 2 * 3)
    for row in rows:
        assert float(row["comm/uplink_bits/model"]) == 3 * 32 * k
        assert float(row["comm/uplink_bits/moments"]) == 3 * 2 * 32 * k
        assert float(row["comm/uplink_bits/mask"]) == 3 * mask
        for direction in ("up", "down"):
            kinds = [float(value) for name, value in row.items() if name.startswith(f"comm/{direction}link_bits/")]
            assert sum(kinds) == float(row[f"comm/{direction}link_bits"])


def test_a_budget_ends_the_training(
    make_stock_trainer: Callable[..., L.Trainer], make_trainer: Callable[..., FederatedTrainer]
) -> None:
    an_epoch = 4 * 4 * D
    trainer = make_stock_trainer(max_epochs=9, callbacks=CommunicationMeter(max_uplink_bytes=2 * an_epoch))
    trainer.fit(Counts(), loader(), loader())
    assert trainer.current_epoch == 2
    a_round = 3 * 4 * D
    federated = make_trainer(max_rounds=9, callbacks=CommunicationMeter(max_uplink_bytes=2 * a_round + 1))
    federated.fit(Counts(), federation())
    assert federated.run.round == 3
    for limit, rounds in (({"max_downlink_bytes": 2 * a_round}, 2), ({"max_total_bytes": 2 * a_round}, 1)):
        either = make_trainer(max_rounds=9, callbacks=CommunicationMeter(**limit))
        either.fit(Counts(), federation())
        assert either.run.round == rounds
    stock = make_stock_trainer(max_epochs=9, callbacks=CommunicationMeter(max_total_bytes=2 * an_epoch))
    stock.fit(Counts(), loader(), loader())
    assert stock.current_epoch == 1
    with pytest.raises(UserError, match="max_uplink_bytes must be positive, got 0"):
        CommunicationMeter(0)


def test_a_resumed_run_whose_budget_is_spent_sends_no_more(
    make_trainer: Callable[..., FederatedTrainer], keeps_files: dict[str, Any]
) -> None:
    """Test a run that stopped in the round that spent its budget, and is resumed."""
    meter = {"max_rounds": 5, **keeps_files}
    first, again = (CommunicationMeter(max_uplink_bytes=1) for _ in range(2))
    make_trainer(callbacks=first, **meter).fit(Counts(), federation())
    resumed = make_trainer(callbacks=again, **meter)
    resumed.fit(Counts(), federation(), ckpt_path="last")
    assert resumed.run.round == 1


class Late(Counts):
    """Module that logs a metric in its own epoch hook, which runs after the callbacks'."""

    def on_train_epoch_end(self) -> None:
        self.log("train/late", float(self.current_epoch))


@pytest.mark.parametrize("value", [1, 3])  # in the last epoch, too
@pytest.mark.parametrize("stop", [True, False])
def test_a_metric_that_the_module_logs_last_may_be_watched(
    value: int,
    stop: bool,
    make_stock_trainer: Callable[..., L.Trainer],
    make_trainer: Callable[..., FederatedTrainer],
) -> None:
    target = TargetReached(value, monitor="train/late", stop=stop)
    trainer = make_stock_trainer(max_epochs=4, callbacks=[CommunicationMeter(), target], num_sanity_val_steps=2)
    trainer.fit(Late(), loader(), loader())
    assert trainer.current_epoch == (3 if stop and value == 1 else 4)
    steps = 4 * (value + 1)
    assert target.reached is not None
    assert [target.reached[name] for name in ("epoch", "step", "value")] == [value, steps, value]
    assert target.reached["comm/total_uplink_bytes"] == steps * 4 * D
    federated = make_trainer(max_rounds=4, callbacks=(target := TargetReached(value, monitor="train/late", stop=stop)))
    federated.fit(Late(), federation())
    assert federated.run.round == (value + 1 if stop else 4)
    assert target.reached is not None
    assert [target.reached[name] for name in ("epoch", "value")] == [value, value]
    assert target.reached["comm/total_uplink_bytes"] == (value + 1) * 3 * 4 * D


def test_the_checkpoint_of_an_epoch_has_what_the_module_logs_last(
    make_stock_trainer: Callable[..., L.Trainer], tmp_path: Path
) -> None:
    targets = [TargetReached(1, monitor="train/late", stop=False) for _ in range(2)]
    trainer = make_stock_trainer(
        max_epochs=2,
        callbacks=[targets[0], ModelCheckpoint(tmp_path, "last", save_on_train_epoch_end=True)],
        enable_checkpointing=True,
    )
    trainer.fit(Late(), loader())
    make_stock_trainer(max_epochs=3, callbacks=targets[1]).fit(Late(), loader(), ckpt_path=tmp_path / "last.ckpt")
    assert targets[0].reached == targets[1].reached == {"epoch": 1, "step": 8, "value": 1.0}


def test_a_federation_calls_the_hook_of_a_target_once_a_round(make_trainer: Callable[..., FederatedTrainer]) -> None:
    rounds = []

    class Noted(TargetReached):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            rounds.append(trainer.current_epoch)
            super().on_train_epoch_end(trainer, pl_module)

    make_trainer(max_rounds=2, callbacks=Noted(9.0, monitor="train/late")).fit(Late(), federation())
    assert rounds == [0, 1]


@pytest.mark.parametrize("stop", [True, False])
def test_a_target_is_noted_with_its_price(
    stop: bool,
    make_stock_trainer: Callable[..., L.Trainer],
    make_trainer: Callable[..., FederatedTrainer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr("lightning_fl.callbacks.target_reached.rank_zero_info", said.append)
    stock = TargetReached(0.3, stop=stop)
    trainer = make_stock_trainer(max_epochs=5, callbacks=[CommunicationMeter(), stock])
    trainer.fit(Counts(), loader(), loader())
    assert trainer.current_epoch == (3 if stop else 5)
    assert stock.reached is not None
    assert (stock.reached["epoch"], stock.reached["step"]) == (2, 12)
    assert stock.reached["value"] == pytest.approx(0.3)
    assert stock.reached["comm/total_uplink_bytes"] == 3 * 4 * 4 * D
    target = TargetReached(0.3, stop=stop)
    federated = make_trainer(max_rounds=5, callbacks=target)
    federated.fit(Counts(), federation())
    assert federated.run.round == (3 if stop else 5)
    assert target.reached is not None
    assert target.reached["epoch"] == 2
    assert target.reached["comm/total_uplink_bytes"] == 3 * 3 * 4 * D
    assert target.reached["comm/total_bytes"] == 2 * 3 * 3 * 4 * D
    assert 0 < target.reached["time/simulated_seconds"] <= federated.run.simulated_seconds
    seconds = significant(target.reached["time/simulated_seconds"])
    assert said[-1].endswith(f", simulated_seconds {seconds}, total_bytes {2 * 3 * 3 * 4 * D:,}.")
    kept = TargetReached(0.3)
    kept.load_state_dict(target.state_dict())
    assert kept.reached == target.reached


@pytest.fixture(params=["stock", "federated"])
def fit_on(
    request: pytest.FixtureRequest,
    make_stock_trainer: Callable[..., L.Trainer],
    make_trainer: Callable[..., FederatedTrainer],
    keeps_files: dict[str, Any],
    tmp_path: Path,
) -> Callable[..., None]:
    """Return a function that trains with callbacks up to an epoch, from the checkpoint of its last call if there is one."""
    last = tmp_path / "last.ckpt"

    def fit(callbacks: list[L.Callback], epochs: int) -> None:
        if request.param == "federated":
            trainer = make_trainer(max_rounds=epochs, callbacks=callbacks, **keeps_files)
            trainer.fit(Counts(), federation(), ckpt_path="last")
        else:
            stock = make_stock_trainer(max_epochs=epochs, callbacks=callbacks)
            stock.fit(Counts(), loader(), loader(), ckpt_path=last if last.exists() else None)
            stock.save_checkpoint(last)

    return fit


def test_each_of_several_targets_keeps_its_state_in_a_checkpoint(fit_on: Callable[..., None]) -> None:
    whole, resumed = ([TargetReached(target, stop=False) for target in (0.1, 0.2, 0.4)] for _ in range(2))
    fit_on(whole, 3)
    fit_on(resumed, 4)
    assert [target.reached for target in resumed[:2]] == [target.reached for target in whole[:2]]
    assert [target.reached and target.reached["epoch"] for target in resumed] == [0, 1, 3]


class OfItsProcess(Counts):
    """Module that logs another accuracy in each process."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/accuracy", (self.current_epoch + 1) / 10 + self.global_rank)


def reach_a_target_in_two_processes(folder: Path) -> None:
    """Train in one of the two processes."""
    target = TargetReached(0.2)
    flags = {**QUIET, "num_sanity_val_steps": 0, "max_epochs": 4, "devices": 2, "strategy": "ddp"}
    trainer = L.Trainer(callbacks=target, default_root_dir=folder, **flags)
    trainer.fit(OfItsProcess(), loader(), loader())
    assert trainer.current_epoch == 2
    assert target.reached == {"epoch": 1, "step": 4, "value": pytest.approx(0.2)}


@pytest.mark.process
def test_two_processes_that_log_different_values_stop_together(tmp_path: Path) -> None:
    processes.run(reach_a_target_in_two_processes, tmp_path, num_processes=2)


class Rounded(Counts):
    """Module with a float32 metric, like those of torchmetrics: 0.1, 0.3 and 0.9 differ from the Python floats."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/accuracy", torch.tensor(0.9, dtype=torch.float32))
        self.log("val/loss", torch.tensor(0.1, dtype=torch.float32))


@pytest.mark.parametrize(("monitor", "target", "mode"), [("val/accuracy", 0.9, "max"), ("val/loss", 0.1, "min")])
def test_a_target_that_is_reached_to_within_rounding_is_reached(
    make_stock_trainer: Callable[..., L.Trainer], monitor: str, target: float, mode: str
) -> None:
    reached = TargetReached(target, monitor, mode)  # type: ignore[arg-type]
    make_stock_trainer(max_epochs=1, callbacks=reached).fit(Rounded(), loader(), loader())
    assert reached.reached is not None
    nearly = TargetReached(target * (1.001 if mode == "max" else 0.999), monitor, mode)  # type: ignore[arg-type]
    make_stock_trainer(max_epochs=1, callbacks=nearly).fit(Rounded(), loader(), loader())
    assert nearly.reached is None


def test_less_may_be_better_and_names_are_checked(make_stock_trainer: Callable[..., L.Trainer]) -> None:
    low = TargetReached(0.15, mode="min", stop=False)
    make_stock_trainer(max_epochs=2, callbacks=low).fit(Counts(), loader(), loader())
    assert low.reached is not None
    assert low.reached["epoch"] == 0
    with pytest.warns(UserWarning, match=r"'val/acuracy' was never logged; did you mean 'val/accuracy'"):
        make_stock_trainer(max_epochs=1, callbacks=TargetReached(0.3, "val/acuracy")).fit(Counts(), loader(), loader())
    misspelt = make_stock_trainer(max_epochs=6, callbacks=TargetReached(0.3, "val/acuracy"), check_val_every_n_epoch=2)
    with pytest.raises(UserError, match=r"monitors 'val/acuracy', which is not logged; did you mean 'val/accuracy'"):
        misspelt.fit(Counts(), loader(), loader())
    assert misspelt.current_epoch == 2, "the first validation happens in the second epoch"
    with pytest.raises(UserError, match="mode 'maximum' is unknown"):
        TargetReached(0.3, mode="maximum")  # type: ignore[arg-type]


@dataclass(frozen=True)
class Expensive(Dense):
    """Codec whose messages cost 2²⁵ + 1 bits, which float32 cannot hold."""

    def encode(self, message: Message, memory: State, context: RoundContext) -> tuple[Payload, State]:
        return {name: Packed(vector, 2**25 + 1) for name, vector in message.items()}, memory


class LargeNetwork(L.LightningModule):
    """Module of more parameters than float32 can count, without memory; keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4099, 4097, bias=False, device="meta")
        self.logged: dict[str, Any] = {}

    def log(self, name: str, value: Any, **options: Any) -> None:
        self.logged[name] = value


def test_logged_counts_are_exact_beyond_what_float32_holds(make_trainer: Callable[..., FederatedTrainer]) -> None:
    class HasSent(L.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            sparse.sent_bits = 8 * (2**25 + 1)

    sparse = SparseUpdates()
    trainer = make_trainer(max_rounds=1, clients_per_round=1, callbacks=[CommunicationMeter(), sparse, HasSent()])
    trainer.fit(Counts(), federation(), FedAvg(uplink=Expensive()))
    assert (
        trainer.callback_metrics["comm/uplink_bits/model"] == 2**25 + 1 == trainer.callback_metrics["comm/uplink_bits"]
    )
    assert trainer.callback_metrics["sparse/bytes"] == sparse.sent_bits / 8
    module = LargeNetwork()
    FilterPruning().on_train_epoch_end(trainer, module)
    MagnitudePruning().on_train_epoch_end(trainer, module)
    for name in ("prune/parameters", "prune/kept"):
        assert (module.logged[name], type(module.logged[name])) == (4099 * 4097, int)


def test_bytes_of_a_stock_trainer_are_exact_beyond_what_float32_holds(
    make_stock_trainer: Callable[..., L.Trainer],
) -> None:
    class HasSent(L.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            meter.sent_bits = 8 * (2**30 + 1)

    meter = CommunicationMeter()
    trainer = make_stock_trainer(max_epochs=1, callbacks=[meter, HasSent()])
    trainer.fit(Counts(), loader())
    assert float(trainer.callback_metrics["comm/total_uplink_bytes"]) == meter.sent_bits / 8

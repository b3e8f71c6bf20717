"""Test that a run can tell nothing of its clients beside the models, and what its costs are then."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torchmetrics import MeanMetric
from toys import SIZES, Normalised, Perceptron, federation, read_rows, samples, vector

from lightning_fl import UserError
from lightning_fl.algorithms import APFL, Algorithm, Ditto, FedAdam, FedAvg, FedBN
from lightning_fl.callbacks import CommunicationMeter, SparseUpdates
from lightning_fl.codecs import Followed, OneBit
from lightning_fl.features.attacks import Adversary, SignFlip
from lightning_fl.features.privacy import AdaptiveClip, ClientPrivacy, LocalPrivacy
from lightning_fl.outputs.communication_json import read_communication
from lightning_fl.outputs.final_table import final_lines
from lightning_fl.steps import Apply, Compress


def fitted(make_trainer: MakeTrainer, algorithm: Any, folder: Path, keeps_files: dict[str, Any], **given: Any) -> Any:
    torch.default_generator.manual_seed(0)
    module = given.pop("module", Perceptron)()
    settings = {"clip": AdaptiveClip(), "noise_multiplier": 0, **given.pop("settings", {})}
    flags = {**keeps_files, "default_root_dir": folder, "max_rounds": 4, **given}
    trainer = make_trainer(privacy=ClientPrivacy(**settings), **flags)
    trainer.fit(module, federation(), algorithm)
    return module, trainer, read_rows(folder)


def test_nothing_of_clients_is_logged_and_the_models_stay(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    loud, _, shown = fitted(make_trainer, Ditto(), tmp_path / "loud", keeps_files)
    silent, trainer, hidden = fitted(
        make_trainer, Ditto(), tmp_path / "silent", keeps_files, settings={"side_channels": "drop"}
    )
    assert (vector(loud) == vector(silent)).all()
    gone = shown[0].keys() - hidden[0].keys()
    assert {"train/loss", "clients/selected", "clients/accepted", "clients/samples"} <= gone
    assert "time/round_seconds" not in (tmp_path / "silent" / "metrics.csv").read_text()
    assert {"val/loss", "val/accuracy"} <= gone
    assert all(name.startswith(("train/", "clients/", "val/")) for name in gone), gone
    assert hidden[0].keys() <= shown[0].keys()
    assert trainer.run.num_uploads == 0
    assert len({row["comm/uplink_bits"] for row in hidden}) == 1 < len({row["comm/uplink_bits"] for row in shown})
    assert "train/loss" not in trainer.callback_metrics


@pytest.mark.parametrize("flags", [{}, {"limit_val_batches": 0, "test_every_n_rounds": 1}], ids=["validated", "tested"])
@pytest.mark.parametrize(
    ("algorithm", "ending"),
    [
        (FedAvg(), ""),
        (FedBN(), None),
        (Algorithm(personal=["output"]), None),
        (Ditto(), "_server"),
        (APFL(), "_server"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_no_value_depends_on_clients_whose_uploads_do_not_count(
    make_trainer: MakeTrainer, algorithm: Algorithm, ending: str | None, flags: dict[str, Any]
) -> None:
    """Test a clip that leaves nothing of an upload, with two federations of other clients."""
    x, y = samples(sum(SIZES))
    privacy = ClientPrivacy(clip=1e-30, noise_multiplier=0, sampling="fixed", buffers="keep", side_channels="drop")
    rows, values = [], []
    for sizes, targets in ((SIZES, y), (SIZES[::-1], y + 3)):
        torch.default_generator.manual_seed(0)
        callbacks = [SparseUpdates(0.5), CommunicationMeter(per_layer=True)]
        trainer = make_trainer(privacy=privacy, callbacks=callbacks, max_rounds=2, **flags)
        trainer.fit(Normalised(), federation(sizes, train=(x, targets)), algorithm)
        rows.append(
            [{name: x for name, x in row.items() if "round_seconds" not in name} for row in trainer.fit_loop.rows]
        )
        values.append({name: float(value) for name, value in trainer.callback_metrics.items()})
    assert rows[0] == rows[1]
    assert values[0] == values[1]
    assert rows[0][0]["comm/downlink_bits/model"] > 0
    measured = {"test/loss"} if flags else {"val/loss", "val/accuracy"}
    shown = set() if ending is None else {f"{name}{ending}" for name in measured}
    assert {name for name in values[0] if name.startswith(("val/", "test/"))} == shown
    assert trainer.metric in {None, *shown}


@pytest.mark.parametrize(("channels", "said"), [("keep", "SignFlip, 2.00 attackers a round"), ("drop", "SignFlip")])
def test_the_table_says_nothing_of_attackers_that_are_not_counted(
    channels: str, said: str, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    settings = {"sampling": "every", "side_channels": channels}
    given = {"adversary": Adversary(SignFlip(), [1, 2]), "clients_per_round": 6}
    _, trainer, _ = fitted(make_trainer, FedAvg(), tmp_path, {"logger": True}, settings=settings, **given)
    assert dict(final_lines(trainer, trainer.fit_loop.rows))["attack"] == said


def test_a_plan_is_that_of_a_run_that_tells_all(make_trainer: MakeTrainer) -> None:
    plans = [
        make_trainer(privacy=ClientPrivacy(noise_multiplier=0, side_channels=channels)).plan(Perceptron(), federation())
        for channels in ("keep", "drop")
    ]
    assert plans[0].uplink_bytes == plans[1].uplink_bytes > 0


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        (FedAdam(), {"buffers": "keep"}),
        (FedAdam(), {"buffers": "clip"}),
        (FedAvg(uplink="TopK"), {"buffers": "keep", "clip": 1.0}),
        (Algorithm(steps=[Apply(), Compress(OneBit())], downlink=Followed(OneBit())), {"buffers": "keep"}),
    ],
    ids=["keep", "clip", "TopK", "Followed"],
)
def test_expected_bits_are_those_of_a_fixed_cohort(
    algorithm: Algorithm, settings: dict[str, Any], make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    bits = []
    for channels in ("keep", "drop"):
        given = {"settings": {"sampling": "fixed", "side_channels": channels, **settings}, "clients_per_round": 4}
        _, trainer, _ = fitted(
            make_trainer, algorithm, tmp_path / channels, {"logger": True}, module=Normalised, **given
        )
        bits.append(trainer.run.ledger.total_bits)
    assert bits[0] == bits[1]


def test_costs_are_those_of_a_fixed_cohort_with_drop_outs_on_average(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    given = {"clients_per_round": 4}
    fixed = {"sampling": "fixed"}
    _, _, whole = fitted(make_trainer, FedAdam(), tmp_path / "fixed", keeps_files, settings=fixed, **given)
    drop = {"side_channels": "drop"}
    _, trainer, hidden = fitted(make_trainer, FedAdam(), tmp_path / "drop", keeps_files, settings=drop, **given)
    for name in ("comm/uplink_bits", "comm/downlink_bits", "comm/total_uplink_bytes", "comm/total_downlink_bytes"):
        assert [row[name] for row in hidden] == [row[name] for row in whole]
    assert read_communication(tmp_path / "drop") == read_communication(tmp_path / "fixed")
    _, with_drop_outs, lossy = fitted(
        make_trainer, FedAdam(), tmp_path / "lossy", keeps_files, settings=drop, dropout_rate=0.25, **given
    )
    assert float(lossy[0]["comm/uplink_bits"]) == 0.75 * float(hidden[0]["comm/uplink_bits"])
    assert lossy[0]["comm/downlink_bits"] == hidden[0]["comm/downlink_bits"]
    assert (
        with_drop_outs.run.num_steps == 0.75 * trainer.run.num_steps == 0.75 * 4 * 4 * 2
    )  # clients without an answer make none
    seconds = [float(row["time/simulated_seconds"]) for row in hidden]
    assert seconds[0] > 0
    assert abs(seconds[3] - 4 * seconds[0]) < 1e-9


class Writing(Callback):
    """Callback that says that it tells nothing of clients, and does."""

    tells_of_clients = False

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.log_client(3, {"loss": 0.25})


@pytest.mark.parametrize("channels", ["keep", "drop"])
def test_no_values_of_single_clients_are_written(
    channels: Any, make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    privacy = ClientPrivacy(noise_multiplier=0, side_channels=channels)
    trainer = make_trainer(privacy=privacy, max_rounds=1, callbacks=[Writing()], **keeps_files)
    if channels == "drop":
        with pytest.raises(UserError, match=r"^log_client writes values of single clients to clients.csv"):
            trainer.fit(Perceptron(), federation(), FedAvg())
    else:
        trainer.fit(Perceptron(), federation(), FedAvg())
    assert (tmp_path / "clients.csv").is_file() == (channels == "keep")


class Telling(Perceptron):
    """Module that keeps something of its training's batches outside parameters and buffers, and validates with it."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.sums, self.total, self.numbers = [0.0], torch.zeros(()), np.zeros(1)
        self.meter, self.metric, self.unseen = SimpleNamespace(sum=0.0), MeanMetric(), (nn.Linear(1, 1),)
        nn.init.zeros_(self.unseen[0].bias)
        self.register_buffer("unsaved", torch.zeros(()), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        value = batch[0].sum()
        if self.where == "list":
            self.sums.append(float(value))
        elif self.where == "tensor":
            self.total += value
        elif self.where == "new tensor":
            self.total = self.total + value
        elif self.where == "array":
            self.numbers += float(value)
        elif self.where == "object":
            self.meter.sum += float(value)
        elif self.where == "hidden module":
            self.unseen[0].bias.data += value
        elif self.where == "unsaved buffer":
            self.unsaved += value
        else:
            self.metric.update(value)
            self.log("train/sum", self.metric)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        kept = sum(self.sums) + float(self.total + self.unsaved) + float(self.numbers[0]) + self.meter.sum
        kept += self.unseen[0].bias.item()
        if self.metric.update_count:
            kept += float(self.metric.compute())
        self.log("val/kept", kept)
        super().validation_step(batch, batch_idx)


@pytest.mark.parametrize("runner", ["serial", "lightning"])
@pytest.mark.parametrize("channels", ["keep", "drop"])
@pytest.mark.parametrize(
    "where", ["list", "tensor", "new tensor", "array", "object", "hidden module", "unsaved buffer", "metric"]
)
def test_no_attribute_of_the_module_passes_from_a_client_to_others(
    where: str, channels: Any, runner: str, make_trainer: MakeTrainer
) -> None:
    if runner == "lightning" and channels == "drop":
        pytest.skip("is refused")
    pytest.importorskip("dp_accounting", reason="needs the extra privacy")
    for privacy in (ClientPrivacy(noise_multiplier=1, delta=0.01, side_channels=channels), LocalPrivacy()):
        if channels == "keep" or isinstance(privacy, ClientPrivacy):
            trainer = make_trainer(max_rounds=2, privacy=privacy, clients_per_round=6, runner=runner)
            trainer.fit(Telling(where), federation(), FedAvg())
            assert list(trainer.history["val/kept"]) == [0, 0]
            if where == "metric":
                assert ("train/sum" in trainer.history) == (channels == "keep")


class Careful(Callback):
    """Logs what it declares to tell of clients, and what does not."""

    columns_of_clients = ("mine/",)

    def on_client_upload(self, trainer: Any, pl_module: Any, client: int, position: int, total: int) -> None:
        pl_module.log("mine/client", float(client))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("norm", float(trainer.run.params.norm()))


def test_a_callback_declares_the_columns_in_which_it_tells_of_clients(make_trainer: MakeTrainer) -> None:
    privacy = ClientPrivacy(noise_multiplier=0, side_channels="drop")
    trainer = make_trainer(max_rounds=2, callbacks=Careful(), privacy=privacy)
    trainer.fit(Perceptron(), federation())
    for row in trainer.fit_loop.rows:
        assert "norm" in row
        assert "mine/client" not in row
    with pytest.raises(UserError, match=r"EarlyStopping acts on mine/client, which tells of clients without noise"):
        make_trainer(callbacks=[Careful(), EarlyStopping("mine/client")], privacy=privacy).fit(
            Perceptron(), federation()
        )

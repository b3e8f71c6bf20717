"""Test each row of "All that leaves a client" in docs/how-to/privacy.md: the tests behind it, and those of no other file."""

from collections import Counter
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from compared_runs import MakeTrainer, equal_states
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import Logger
from tested_rows import TESTS, check_rows, check_tests, first_cells
from toys import BATCH_SIZE, SIZES, Perceptron, federation, read_rows, samples, vector

from lightning_fl.algorithms import Ditto, FedAdam, FedAvg
from lightning_fl.codecs import ErrorFeedback, OneBit
from lightning_fl.engine.population import Cohort, Population
from lightning_fl.features.privacy import AdaptiveClip, ClientPrivacy, LocalPrivacy

PAGE = TESTS.parent / "docs" / "how-to" / "privacy.md"
HEADING = "## All that leaves a client\n"

HERE, CENTRAL, LOCAL = (
    f"features/privacy/test_{name}.py" for name in ("all_that_leaves_a_client", "client_privacy", "local_privacy")
)
SIDE, REFUSALS = "features/privacy/test_side_channels.py", "features/privacy/test_refusals.py"
REFUSED = (REFUSALS, "test_what_would_make_the_claim_false_is_refused")
ROWS = {  # the tests by the row's first words
    "vectors": [
        (CENTRAL, "test_all_that_crosses_is_clipped_together"),
        (CENTRAL, "test_noise_is_normal_and_belongs_to_the_seed"),
        (LOCAL, "test_results_are_clipped_together_before_they_are_sent"),
        (LOCAL, "test_every_client_and_round_has_noise_of_its_own"),
        (LOCAL, "test_buffers_stay_the_servers_or_enter_the_sum"),
    ],
    "other numbers of a message": [
        (REFUSALS, "test_methods_of_the_roster_are_refused_with_their_reason_or_not_at_all"),
        (LOCAL, "test_what_noise_would_not_cover_is_refused"),
        REFUSED,
    ],
    "numbers of samples, as weights": [
        (LOCAL, "test_numbers_of_samples_cross_only_if_they_are_declared_public"),
        (CENTRAL, "test_alike_and_with_all_clients_it_is_the_uniform_mean"),
        (CENTRAL, "test_weights_by_samples_have_a_cap_and_a_fixed_divisor"),
    ],
    "float buffers with `buffers: keep`": [
        (LOCAL, "test_buffers_stay_the_servers_or_enter_the_sum"),
        (LOCAL, "test_counts_of_clients_stay_with_them"),
        (SIDE, "test_no_attribute_of_the_module_passes_from_a_client_to_others"),
    ],
    "attributes of the module": [(SIDE, "test_no_attribute_of_the_module_passes_from_a_client_to_others")],
    "values that a module logs while clients train": [
        (HERE, "test_what_a_module_logs_in_training_is_left_out_with_drop"),
        (REFUSALS, "test_what_acts_on_a_value_of_the_training_is_refused_when_its_name_is_known"),
        (SIDE, "test_nothing_of_clients_is_logged_and_the_models_stay"),
    ],
    "validation with clients' personal values": [
        (SIDE, "test_no_value_depends_on_clients_whose_uploads_do_not_count"),
        REFUSED,
    ],
    "which clients took part": [
        (SIDE, "test_nothing_of_clients_is_logged_and_the_models_stay"),
        (SIDE, "test_the_table_says_nothing_of_attackers_that_are_not_counted"),
    ],
    "bits and simulated time": [
        (SIDE, "test_expected_bits_are_those_of_a_fixed_cohort"),
        (SIDE, "test_costs_are_those_of_a_fixed_cohort_with_drop_outs_on_average"),
    ],
    "the duration of a training": [REFUSED],
    "values that the module logs in single steps": [(HERE, "test_loggers_get_single_steps_from_callbacks_alone")],
    "values that callbacks such as `LearningRateMonitor` send": [
        (HERE, "test_loggers_get_single_steps_from_callbacks_alone"),
        REFUSED,
    ],
    "`clients.csv`": [(SIDE, "test_no_values_of_single_clients_are_written"), REFUSED],
    "values that callbacks log, write or send": [REFUSED],
    "columns that a feature": [
        ("features/test_own_feature.py", "test_a_private_run_without_side_channels_shows_what_a_feature_declares")
    ],
    "the order of the uploads": [
        (HERE, "test_a_sum_does_not_depend_on_the_order_of_the_uploads"),
        (HERE, "test_uploads_come_in_the_order_of_the_draw_unless_they_are_stacked"),
    ],
    "checkpoints": [(HERE, "test_files_are_the_same_whoever_the_clients_are")],
    "numbers of batches that a module can read": [(HERE, "test_a_module_can_read_numbers_of_batches")],
    "the terminal": [(HERE, "test_the_progress_bar_counts_clients")],
    "values in global variables": [(HERE, "test_a_global_variable_keeps_values_of_clients")],
}


def test_each_row_has_its_tests() -> None:
    table = PAGE.read_text().partition(HEADING)[2].partition("\n## ")[0]
    check_rows(first_cells(table), ROWS)


@pytest.mark.long
def test_these_tests_exist_and_are_not_skipped() -> None:
    check_tests(ROWS)


def fitted(make_trainer: MakeTrainer, privacy: Any, module: Any = Perceptron, data: Any = None, **flags: Any) -> Any:
    torch.default_generator.manual_seed(0)
    module, algorithm = module(), flags.pop("algorithm", FedAvg())
    trainer = make_trainer(privacy=privacy, **flags)
    trainer.fit(module, federation() if data is None else data, algorithm)
    return module, trainer


def silent(**settings: Any) -> ClientPrivacy:
    return ClientPrivacy(**{"noise_multiplier": 0, "side_channels": "drop", **settings})


class Naming(Perceptron):
    """Module that logs in training under a name of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("mine", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss


@pytest.mark.parametrize("channels", ["keep", "drop"])
def test_what_a_module_logs_in_training_is_left_out_with_drop(
    channels: str, make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    trainer = fitted(make_trainer, silent(side_channels=channels), Naming, **keeps_files)[1]
    shown = [read_rows(tmp_path)[-1], trainer.callback_metrics, trainer.progress_bar_metrics]
    assert ["mine" in values for values in shown] == [channels == "keep"] * 3
    forms = {"mine_step", "mine_epoch"} & trainer.callback_metrics.keys()
    assert bool(forms) == (channels == "keep")


class Sent(Logger):
    """Logger that keeps the names of all that it gets."""

    name = version = experiment = None

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.names.update(metrics.keys())

    def log_hyperparams(self, *arguments: Any, **named: Any) -> None:
        """Do nothing."""


def test_loggers_get_single_steps_from_callbacks_alone(make_trainer: MakeTrainer) -> None:
    logger = Sent()
    flags = {"logger": logger, "log_every_n_steps": 1, "runner": "lightning", "clients_per_round": 6, "max_rounds": 1}
    privacy = silent(side_channels="keep", sampling="every")
    fitted(make_trainer, privacy, Naming, callbacks=[LearningRateMonitor("step")], **flags)
    assert logger.names["lr-SGD"] == sum(ceil(size / BATCH_SIZE) for size in SIZES)
    assert (logger.names["mine"], logger.names["mine_step"]) == (1, 0)


class Orders(Callback):
    """Callback that keeps the order in which clients' uploads come, by round."""

    def __init__(self) -> None:
        self.rounds: dict[int, list[int]] = {}

    def on_client_upload(self, trainer: Any, pl_module: Any, client: int, position: int, total: int) -> None:
        self.rounds.setdefault(trainer.current_epoch, []).append(client)


@pytest.mark.parametrize("algorithm", [FedAvg(), FedAdam()], ids=["FedAvg", "FedAdam"])
@pytest.mark.parametrize("clip", [0.05, AdaptiveClip(initial=0.05)], ids=["fixed", "adaptive"])
def test_a_sum_does_not_depend_on_the_order_of_the_uploads(
    algorithm: Any, clip: Any, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("dp_accounting", reason="needs the extra privacy")
    privacy, cohort = ClientPrivacy(clip=clip, noise_multiplier=0.4, delta=0.01), Population.cohort

    def backwards(*arguments: Any) -> Cohort:
        drawn = cohort(*arguments)
        return replace(drawn, mine=drawn.mine[::-1])

    orders = Orders(), Orders()
    flags = {"algorithm": algorithm, "clients_per_round": 5, "runner": "serial"}
    one = vector(fitted(make_trainer, privacy, callbacks=[orders[0]], **flags)[0])
    monkeypatch.setattr(Population, "cohort", backwards)
    other = vector(fitted(make_trainer, privacy, callbacks=[orders[1]], **flags)[0])
    assert orders[1].rounds == {number: clients[::-1] for number, clients in orders[0].rounds.items()}
    assert all(len(clients) > 1 for clients in orders[0].rounds.values())
    assert one == pytest.approx(other, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("runner", ["serial", "stacked"])
def test_uploads_come_in_the_order_of_the_draw_unless_they_are_stacked(runner: str, make_trainer: MakeTrainer) -> None:
    pytest.importorskip("dp_accounting", reason="needs the extra privacy")
    found = []
    for sizes in (SIZES, SIZES[::-1]):
        orders = Orders()
        flags = {"runner": runner, "clients_per_round": 6, "callbacks": [orders]}
        fitted(make_trainer, LocalPrivacy(), data=federation(sizes), **flags)
        found.append(orders.rounds)
    assert (found[0] == found[1]) == (runner == "serial")
    if runner == "stacked":
        lengths = [ceil(SIZES[::-1][client] / BATCH_SIZE) for client in found[1][0]]
        assert lengths == sorted(lengths, reverse=True)


FROM_DATA = ("data.partition.sizes", "data.samples")
"""Settings of a checkpoint that differ between the two federations: the numbers of samples, and a checksum."""


@pytest.mark.parametrize(
    ("algorithm", "keeps_states"),
    [(FedAvg(), False), (FedAvg(uplink=ErrorFeedback(OneBit())), True), (Ditto(), True)],
    ids=["FedAvg", "ErrorFeedback", "Ditto"],
)
def test_files_are_the_same_whoever_the_clients_are(
    algorithm: Any, keeps_states: bool, make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    """Test a clip that leaves nothing of an upload, with two federations of other clients."""
    x, y = samples(sum(SIZES))
    texts, models, runs, states = [], [], [], []
    for sizes, targets in ((SIZES, y), (SIZES[::-1], y + 3)):
        folder = tmp_path / str(len(texts))
        flags = {"algorithm": algorithm, "default_root_dir": folder, **keeps_files}
        privacy, data = silent(clip=1e-30, sampling="fixed"), federation(sizes, train=(x, targets))
        fitted(make_trainer, privacy, data=data, **flags)
        settings = yaml.safe_load((folder / "settings.yaml").read_text())
        assert tuple(settings.pop("data.partition.sizes")) == sizes
        names = ("metrics.csv", "communication.json", "hparams.yaml")
        texts.append([settings, *((folder / name).read_text() for name in names)])
        models.append(torch.load(folder / "model.ckpt"))
        run = torch.load(folder / "checkpoints" / "last.ckpt")["federation"]
        for name in FROM_DATA:
            del run["settings"][name]
        states.append([run["run"].pop(name) for name in ("clients", "client_memory")])
        del run["run"]["features"]["privacy"]["noise_key"]  # which follows from all settings
        runs.append(run)
    assert texts[0] == texts[1]
    assert equal_states(models[0], models[1])
    assert equal_states(runs[0], runs[1])
    assert any(states[0]) == keeps_states


class Reading(Perceptron):
    """Module that reads numbers of batches before the first round, and after each."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[int] = []

    def configure_optimizers(self) -> Any:
        self.read.append(self.trainer.estimated_stepping_batches)
        return super().configure_optimizers()

    def on_train_epoch_end(self) -> None:
        self.read.append(self.trainer.num_training_batches)


def test_a_module_can_read_numbers_of_batches(make_trainer: MakeTrainer) -> None:
    module = fitted(make_trainer, silent(sampling="every"), Reading, clients_per_round=6, max_rounds=1)[0]
    batches = [ceil(size / BATCH_SIZE) for size in SIZES]
    assert module.read == [max(batches), sum(batches)]


def test_the_progress_bar_counts_clients(make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]) -> None:
    fitted(make_trainer, silent(), enable_progress_bar=True)
    assert "clients/s=" in capsys.readouterr().err


SEEN: list[float] = []


class Global(Perceptron):
    """Module that keeps something of its training's batches in a global variable, and validates with it."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        SEEN.append(float(batch[0].sum()))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/kept", float(len(SEEN)))


def test_a_global_variable_keeps_values_of_clients(make_trainer: MakeTrainer) -> None:
    SEEN.clear()
    trainer = fitted(make_trainer, silent(), Global)[1]
    assert list(trainer.history["val/kept"])[-1] == len(SEEN) > 0

"""Test what users write in Python: names for classes, Lightning's flags, the table at the end, the history, reprs."""

import pickle
import re
import subprocess
import sys
from inspect import Parameter, signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateMonitor
from toys import Perceptron, federation, read_rows, vector

from lightning_fl import FederatedTrainer, UserError
from lightning_fl.algorithms import Algorithm, FedAvg, FedProx
from lightning_fl.callbacks import CommunicationMeter
from lightning_fl.codecs import Cast, ErrorFeedback, TopK
from lightning_fl.data import Digits
from lightning_fl.modules import ImageClassifier
from lightning_fl.outputs.final_table import FinalTable, History, final_table
from lightning_fl.report.records import read_run

# -------------------------------------------------------------------------------------------- an algorithm by its name


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ("FedAvg", None),
        ({"class_path": "FedProx", "init_args": {"mu": 0.5}}, FedProx(mu=0.5)),
        ({"class_path": "lightning_fl.algorithms.FedProx", "init_args": {"mu": 0.5}}, FedProx(mu=0.5)),
        (
            {
                "class_path": "FedAvg",
                "init_args": {
                    "uplink": {
                        "class_path": "ErrorFeedback",
                        "init_args": {"codec": {"class_path": "lightning_fl.codecs.TopK"}},
                    },
                    "downlink": {"class_path": "Cast"},
                },
            },
            FedAvg(uplink=ErrorFeedback(TopK()), downlink=Cast()),
        ),
    ],
)
def test_an_algorithm_may_be_given_by_name(make_trainer: MakeTrainer, given: Any, same: Any) -> None:
    start, results = Perceptron(), []
    for algorithm in (given, same):
        module = Perceptron()
        module.load_state_dict(start.state_dict())
        make_trainer(max_rounds=2).fit(module, federation(), algorithm=algorithm)
        results.append(vector(module))
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("FedPorx", r"algorithm 'FedPorx' is unknown; did you mean 'FedProx'\? Allowed: .*SCAFFOLD"),
        ("FedMedian", "algorithm 'FedMedian' is unknown; here it is FedAvg with aggregator CoordinateMedian"),
        ("own.FedAgree", "algorithm 'own.FedAgree' is unknown; it cannot be imported"),
        (
            {"class_path": "FedAvg", "init_args": {"uplink": "own.TpK"}},
            "uplink 'own.TpK' is unknown; it cannot be imported",
        ),
        ({"class_path": "FedProx", "init_args": {"mi": 1}}, r"FedProx has no parameter 'mi'; allowed: .*mu, personal"),
        (
            {"class_path": "FedProx", "init_args": 3},
            "init_args of FedProx must be a mapping with its parameters, got 3",
        ),
        ({"class_path": "FedProx", "mu": 3}, "class_path and init_args, got class_path, mu"),
        ({"mu": 3}, "class_path and init_args, got mu"),
        (FedProx, r"algorithm is the class FedProx: give an object, FedProx\(…\), or its name"),
        (
            {"class_path": "FedAvg", "init_args": {"downlink": {"class_path": "Csat"}}},
            r"downlink 'Csat' is unknown; did you mean 'Cast'\?",
        ),
        (
            {"class_path": "FedAvg", "init_args": {"downlink": {"class_path": "Cast", "init_args": {"bit": 16}}}},
            "Cast has no parameter 'bit'",
        ),
        (
            {"class_path": "FedAvg", "init_args": {"downlink": {"class_path": "Apply"}}},
            "downlink 'Apply' is unknown",
        ),
        (
            {"class_path": "FedAvg", "init_args": {"downlink": {"class_path": "Cast", "bits": 16}}},
            "downlink as a mapping has the keys class_path and init_args, got class_path, bits",
        ),
        (3, "algorithm must be an Algorithm, its name, or a mapping with class_path and init_args, got 3"),
    ],
)
def test_what_is_no_algorithm_is_refused(make_trainer: MakeTrainer, given: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        make_trainer().fit(Perceptron(), federation(), algorithm=given)


# ------------------------------------------------------------------------------------------- what Lightning's users type


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        (
            "max_epochs",
            "max_epochs is a flag of lightning.Trainer that FederatedTrainer does not have: .*use max_rounds",
        ),
        ("sync_batchnorm", "clients are trained apart"),
        ("val_check_interval", "val_every_n_rounds"),
        ("rounds", "FederatedTrainer has no flag 'rounds'; here it is max_rounds"),
        ("seed", "FederatedTrainer has no flag 'seed'; here it is seed_everything"),
        ("max_round", "FederatedTrainer has no flag 'max_round'; did you mean 'max_rounds'"),
        ("quick", "FederatedTrainer has no flag 'quick'; allowed: accelerator, "),
        ("num_clients", r"'num_clients': give it to the data module, as in Federated\(datamodule, num_clients=…\)\."),
        ("val_fraction", "'val_fraction': give it to the data module"),
        ("algorithm", r"'algorithm': give it to fit, as in trainer\.fit\(model, datamodule, algorithm=…\)\."),
    ],
)
def test_flags_that_are_not_there_are_refused_in_a_sentence(flag: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        FederatedTrainer(**{flag: 3})


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            {"callbacks": [CommunicationMeter]},
            r"callbacks must be .*, got CommunicationMeter: give CommunicationMeter\(…\)",
        ),
        ({"callbacks": "CommunicationMeter"}, "callbacks must be .*, got CommunicationMeter: give"),
        ({"logger": "csv"}, "logger must be true, false or objects of Lightning's loggers, got 'csv'"),
        ({"clock": {"devices": "phones"}}, r"clock must be SimulatedClock\(…\) or ClientClock\(…\) .* got {'devices'"),
        ({"clock": None}, "clock must be .* got None"),
        ({"loss_guard": {"clients": 3}}, r"loss_guard must be LossGuard\(…\) .* got {'clients': 3}"),
        ({"loss_guard": None}, "loss_guard must be .*off without arguments.* got None"),
    ],
)
def test_what_is_no_clock_or_guard_is_refused(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        FederatedTrainer(**flags)


def test_the_signature_is_that_of_the_flags() -> None:
    parameters = signature(FederatedTrainer).parameters
    assert {"max_rounds", "callbacks", "metric"} <= parameters.keys()
    assert not any(parameter.kind == Parameter.VAR_KEYWORD for parameter in parameters.values())


@pytest.mark.process
def test_packages_are_found_after_importing_the_library_alone() -> None:
    code = (
        "import sys, lightning_fl; assert 'torch' not in sys.modules; print(lightning_fl.algorithms.FedProx.__name__, "
        "lightning_fl.data.Digits.__name__, lightning_fl.callbacks.__name__, lightning_fl.modules.__name__, "
        "'algorithms' in dir(lightning_fl), hasattr(lightning_fl, 'nothing'))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["FedProx", "Digits", "lightning_fl.callbacks", "lightning_fl.modules", "True", "False"]


# ------------------------------------------------------------------------------------------------ after the training


def test_a_fit_ends_with_the_table_of_the_command_line(
    make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer()
    trainer.fit(Perceptron(), federation())
    shown = capsys.readouterr().out
    assert shown == f"{final_table(trainer, trainer.fit_loop.rows)}\n"
    assert "rounds    2\n" in shown
    trainer.fit(Perceptron(), federation(), verbose=False)
    assert capsys.readouterr().out == ""


@pytest.fixture
def _without_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)


@pytest.mark.usefixtures("_without_pandas")
@pytest.mark.parametrize("every", [1, 2])
def test_the_history_has_the_rows_of_metrics_csv(make_trainer: MakeTrainer, tmp_path: Path, every: int) -> None:
    monitors = [LearningRateMonitor("epoch")]
    trainer = make_trainer(max_rounds=3, logger=True, log_every_n_rounds=every, callbacks=monitors)
    assert trainer.history == []
    trainer.fit(Perceptron(), federation())
    rows = read_rows(tmp_path)
    assert all({"lr-SGD", "step"} <= row.keys() for row in trainer.history)
    assert len(trainer.history) == len(rows) == (3 if every == 1 else 2)
    for row, written in zip(trainer.history, rows, strict=True):
        assert {name: pytest.approx(float(value)) for name, value in written.items() if value} == {
            name: value for name, value in row.items() if name != "time/round_seconds"
        }


@pytest.mark.usefixtures("_without_pandas")
def test_the_history_needs_no_files_and_is_that_of_the_last_fit(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    for _ in range(2):
        trainer.fit(Perceptron(), federation())
        assert [row["round"] for row in trainer.history] == [0, 1]


@pytest.mark.usefixtures("_without_pandas")
def test_a_resumed_run_has_its_earlier_history_too(make_trainer: MakeTrainer, keeps_files: dict[str, Any]) -> None:
    make_trainer(max_rounds=2, **keeps_files).fit(Perceptron(), federation())
    resumed = make_trainer(max_rounds=3, **keeps_files)
    resumed.fit(Perceptron(), federation(), ckpt_path="last")
    assert [(row["round"], row["step"]) for row in resumed.history] == [(0, 0), (1, 1), (2, 2)]
    assert all(row["val/loss"] > 0 for row in resumed.history)


class Notes(Callback):
    """Logs what is no number, as loggers of Lightning allow."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.logger.log_metrics({"phase": "<warm>", "is_warm": trainer.current_epoch < 2})


@pytest.mark.usefixtures("_without_pandas")
def test_a_run_goes_on_after_a_callback_has_logged_texts(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    for num_rounds in (2, 3):
        trainer = make_trainer(max_rounds=num_rounds, logger=True, enable_checkpointing=True, callbacks=[Notes()])
        trainer.fit(Perceptron(), federation(), ckpt_path="last" if num_rounds == 3 else None)
    assert [(row["phase"], row["is_warm"]) for row in trainer.history] == [("<warm>", 1), ("<warm>", 1), ("<warm>", 0)]
    assert "<td>&lt;warm&gt;</td>" in trainer.history._repr_html_()
    assert read_run(tmp_path).column("val/loss").tolist() == [row["val/loss"] for row in trainer.history]


def test_the_history_is_a_data_frame_where_pandas_is_there(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer()
    trainer.fit(Perceptron(), federation())

    class DataFrame(list):  # type: ignore[type-arg]
        def _repr_html_(self) -> str:
            return "<table>of pandas</table>"

    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=DataFrame))
    assert isinstance(trainer.history, DataFrame)
    assert len(trainer.history) == 2
    assert re.match(r"<table>of pandas</table><svg.*</svg>", trainer.history._repr_html_(), re.S)


def test_the_history_is_copied_and_pickled_as_a_plain_data_frame(make_trainer: MakeTrainer) -> None:
    pandas = pytest.importorskip("pandas")
    trainer = make_trainer()
    trainer.fit(Perceptron(), federation())
    frame = trainer.history
    for other in (pickle.loads(pickle.dumps(frame)), frame[["round"]], frame.copy()):
        assert type(other) is pandas.DataFrame
        assert other["round"].tolist() == [0, 1]


def test_table_and_history_show_themselves_in_a_notebook(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=12)
    assert History([], None)._repr_html_() == "no rounds"
    trainer.fit(Perceptron(), federation())
    rows = list(trainer.fit_loop.rows)
    history = History(rows, trainer.metric)
    assert history == rows
    html = history._repr_html_()
    assert html.count("<tr>") == 12, "head, ten rows, and one for those left out"
    assert "12 rows × " in html
    table = final_table(trainer, rows)
    assert "<tr><th style='text-align:left'>rounds</th><td style='text-align:left'>12</td></tr>" in table._repr_html_()
    for shown in (html, table._repr_html_()):
        assert re.search(r"<svg.*>val/accuracy</text>.*</svg>", shown, re.S)
        assert "<?xml" not in shown
    assert "<svg" not in final_table(trainer, [])._repr_html_(), "no rows, no curve"


@pytest.mark.long
def test_words_from_outside_cannot_change_the_page() -> None:
    table = FinalTable([("a<b", "runs/<i>")], [{"round": 0, "<b>": 0.5}], "<b>")
    for shown in (table._repr_html_(), History(table.rows, "<b>")._repr_html_()):  # type: ignore[arg-type]
        assert "<i>" not in shown
        assert "<b>" not in shown


# -------------------------------------------------------------------------------------------------------------- reprs


@pytest.mark.parametrize(
    ("thing", "shown"),
    [
        (FedAvg(), "FedAvg()"),
        (FedProx(mu=0.5), "FedProx(mu=0.5)"),
        (
            Algorithm(uplink=TopK(alpha=0.1), personal=["head"]),
            "Algorithm(uplink=TopK(alpha=0.1, index_bits='ceil', values=None), personal=['head'])",
        ),
    ],
)
def test_an_algorithm_shows_what_it_was_given(thing: Any, shown: str) -> None:
    assert repr(thing) == shown


def test_a_trainer_shows_what_it_runs(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer()
    assert repr(trainer) == f"FederatedTrainer(max_rounds=2, clients_per_round=3, default_root_dir={str(tmp_path)!r})"


# ------------------------------------------------------------------------------------------- networks that do not fit


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            {"network": "lenet5"},
            r"ImageClassifier takes 3×32×32 images, but Digits has 1×8×8: give it in_channels=1 and image_size=8",
        ),
        ({"network": "linear", "in_channels": 1}, "1×32×32 images, but Digits has 1×8×8"),
        (
            {"network": "linear", "in_channels": 1, "image_size": 8, "num_classes": 4},
            "ImageClassifier has 4 classes, but Digits has 10: give it num_classes=10",
        ),
    ],
)
def test_a_network_that_does_not_fit_the_data_is_refused(
    make_trainer: MakeTrainer, model: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        make_trainer().fit(ImageClassifier(**model), Digits(num_clients=5))


def test_a_network_that_fits_is_not_refused(make_trainer: MakeTrainer) -> None:
    small = {"in_channels": 1, "image_size": 8}
    make_trainer(max_rounds=1).fit(ImageClassifier("linear", num_classes=12, **small), Digits(num_clients=5))
    any_size = torch.nn.Sequential(torch.nn.Conv2d(1, 10, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    make_trainer(max_rounds=1).fit(ImageClassifier(any_size), Digits(num_clients=5))


@pytest.mark.parametrize(
    ("call", "given", "said"),
    [
        ("fit", "train_dataloaders", "fit has no argument 'train_dataloaders': .*lightning_fl.data.Federated"),
        ("test", "dataloaders", r"'dataloaders': lightning.Trainer\(\).test\(model, dataloaders\) takes the trained"),
        (
            "fit",
            "algoritm",
            r"fit has no argument 'algoritm'; did you mean 'algorithm'\? Allowed: algorithm, ckpt_path,",
        ),
    ],
)
def test_arguments_that_are_not_there_are_refused_in_a_sentence(
    make_trainer: MakeTrainer, call: str, given: str, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        getattr(make_trainer(), call)(Perceptron(), **{given: None})


def test_a_loader_instead_of_data_is_refused_with_the_way_out(make_trainer: MakeTrainer) -> None:
    loader = torch.utils.data.DataLoader(torch.zeros(4, 3))
    with pytest.raises(UserError, match=r"got DataLoader: .*; lightning.Trainer\(\).predict takes the trained model"):
        make_trainer().predict(Perceptron(), loader)
    for given in ([loader], [loader, loader]):  # as in `lightning.Trainer`
        with pytest.raises(UserError, match=r"got DataLoader: .*Federated.* of a LightningDataModule with this loader"):
            make_trainer().fit(Perceptron(), *given)

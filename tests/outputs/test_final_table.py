"""Test the table at the end of `fit`: it covers the whole run, and no other run."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from compared_runs import MakeTrainer
from toys import Perceptron, Served

from lightning_fl.cli import main
from lightning_fl.outputs.final_table import final_lines

pytestmark = pytest.mark.usefixtures("types_of_a_new_process")

Fit = Callable[..., dict[str, str]]


@pytest.fixture
def fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Fit:
    """Return a function that fits a linear model on digits with three clients a round in `run`, and returns the table."""
    monkeypatch.chdir(tmp_path)
    words = ["--model=ImageClassifier", "--model.network=linear", "--data=Digits", "--data.num_clients=5"]
    words += ["--trainer.max_rounds=3", "--trainer.clients_per_round=3", "--trainer.default_root_dir=run"]
    words += [
        "--trainer.accelerator=cpu",
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
    ]

    def command(*more: str) -> dict[str, str]:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["lightning-fl", "fit", *words, *more])
        main()
        return dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())

    return command


@pytest.mark.parametrize("without", ["--trainer.logger=false", "--trainer.fast_dev_run=true"])
def test_a_run_without_a_curve_says_nothing_of_the_run_before_it(fit: Fit, without: str) -> None:
    assert "best" in fit()["accuracy"]
    again = fit(without, "--trainer.enable_checkpointing=false", "--model.learning_rate=1e-9")
    assert re.fullmatch(r"(0\.\d{4}) \(best \1 after round 1\)", again["accuracy"]), "nothing has changed since round 1"
    assert "curve" not in again


@pytest.mark.matrix
def test_a_run_of_no_rounds_names_no_curve(fit: Fit) -> None:
    assert "curve" not in fit("--trainer.max_rounds=0")
    fit()
    assert "curve" not in fit("--trainer.max_rounds=0"), "the curve is that of the run before"


def test_a_resumed_run_knows_its_best_from_before(fit: Fit) -> None:
    still = "--model.learning_rate=1e-9"  # the accuracy stays that of round 1
    assert fit(still)["accuracy"].endswith("after round 1)")
    assert fit(still, "--ckpt_path=last", "--trainer.max_rounds=4")["accuracy"].endswith("after round 1)")


def test_a_best_value_of_the_logged_rounds_alone_says_so(make_trainer: MakeTrainer) -> None:
    """Let the value fall, so that the first round without a row is the best, and the first with one is the best of these."""

    class Falling(Perceptron):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/accuracy", 1 / (self.trainer.current_epoch + 1))

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test/accuracy", 0.5)

    for every, best in ((1, "1.0000 after round 1)"), (3, "0.3333 after round 3, of the logged ones)")):
        trainer, data = make_trainer(max_rounds=4, log_every_n_rounds=every, test_every_n_rounds=1), Served(9)
        data.val_fraction = 0.2
        trainer.fit(Falling(), data)
        lines = dict(final_lines(trainer, trainer.fit_loop.rows))
        assert lines["accuracy"] == f"0.2500 (best {best}"
        assert lines["at best validation"].endswith(f"(after {best.partition('after ')[2]}")


@pytest.mark.matrix
def test_rejected_uploads_are_counted_in_the_table(fit: Fit) -> None:
    assert "rejected" not in fit()
    boom = ["--model.learning_rate=1e38", "--trainer.max_rounds=2"]
    assert fit(*boom)["rejected"] == "6 of 6 uploads, in 2 of 2 rounds: not finite"
    # Rounds without a row and rounds before a resumption count too.
    more = ["--model.learning_rate=1e38", "--ckpt_path=last", "--trainer.log_every_n_rounds=4"]
    assert fit(*more, "--trainer.max_rounds=4")["rejected"] == "12 of 12 uploads, in 4 of 4 rounds: not finite"
    unseen = fit(*boom, "--trainer.logger=false", "--trainer.enable_checkpointing=false")
    assert unseen["rejected"].startswith("6 of 6 uploads")


def test_the_first_round_without_an_upload_is_said_once(fit: Fit, caplog: pytest.LogCaptureFixture) -> None:
    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records if "were rejected" in record.getMessage()]

    fit("--trainer.max_rounds=1")
    assert said() == []
    fit("--trainer.max_rounds=3", "--model.learning_rate=1e38")
    (sentence,) = said()
    assert sentence.startswith("Round 1: all uploads (3) were rejected (not finite), so the model did not change. ")
    assert "learning rate" in sentence


def test_a_loss_that_exploded_is_a_reason(fit: Fit, says_lost: Callable[..., Any]) -> None:
    server = ["--data.client_fraction=0.8", "--data.server_fraction=0.1"]  # the server's samples give the initial loss
    with says_lost(r"\(not finite or loss exploded\)"):
        guarded = fit(*server, "--trainer.loss_guard.clients=2", "--model.learning_rate=100")
    assert guarded["rejected"] == "9 of 9 uploads, in 3 of 3 rounds: not finite or loss exploded"


def test_no_bytes_but_zero_read_as_zero(fit: Fit) -> None:
    assert fit()["uplink"] == "23.4 kB"
    one_client = fit("--data.image_size=8", "--trainer.max_rounds=1", "--trainer.clients_per_round=1")
    assert one_client["downlink"] == "2.60 kB"

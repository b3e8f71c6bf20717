"""Test that a run which was stopped before its last round stays stopped when it is resumed, until something lets it go on."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from compared_runs import MakeTrainer
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint
from toys import Perceptron, Served, federation, read_rows

from lightning_fl import FederatedTrainer
from lightning_fl.callbacks import CommunicationMeter, TargetReached
from lightning_fl.outputs import checkpoint_file
from lightning_fl.outputs.final_table import final_lines

PLANNED = 4


class Stops(L.Callback):
    """Callback that stops a run after some rounds, and counts them down in its own argument."""

    def __init__(self, rounds: int = 2, hook: str = "on_train_epoch_end") -> None:
        self.left, self.rounds = rounds, rounds
        setattr(self, hook, self._count)

    def _count(self, trainer: Any, pl_module: Any) -> None:
        self.left -= 1
        if self.left == 0:
            trainer.should_stop = True


class StopsItself(Perceptron):
    """Module that stops its training in the second round."""

    def on_train_epoch_end(self) -> None:
        if self.trainer.current_epoch == 1:
            self.trainer.should_stop = True


def stop_second(trainer: Any, _: Any) -> None:
    if trainer.current_epoch == 1:
        trainer.should_stop = True


def never_better(**options: Any) -> EarlyStopping:
    return EarlyStopping("val/loss", **{"patience": 1, "min_delta": 1e9, **options})


STOPPING: dict[str, tuple[Callable[[], Any], str]] = {
    "EarlyStopping": (never_better, "EarlyStopping: val/loss"),
    "TargetReached": (lambda: [Rising(), TargetReached(1.0, "val/rising")], "TargetReached: val/rising"),
    "CommunicationMeter": (lambda: CommunicationMeter(max_uplink_bytes=400), "CommunicationMeter"),
    "own": (Stops, "Stops"),
    "at the start": (lambda: Stops(hook="on_train_epoch_start"), "Stops"),
    "after the validation": (lambda: Stops(hook="on_validation_end"), "Stops"),
    "function": (lambda: LambdaCallback(on_train_epoch_end=stop_second), "should_stop was set"),
    "two at once": (lambda: [ModelCheckpoint(filename="own"), Stops(), never_better()], "Stops"),
}


class Rising(L.Callback):
    """Callback that logs the number of the round, from 0."""

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("val/rising", float(trainer.current_epoch))


@pytest.fixture
def fit(make_trainer: MakeTrainer, tmp_path: Path) -> Callable[..., FederatedTrainer]:
    """Return a function that fits in a folder, or resumes the run in it."""

    def fit(callbacks: Any = (), module: Any = None, folder: str = "run", **flags: Any) -> FederatedTrainer:
        given = {"max_rounds": PLANNED, "logger": True, "enable_checkpointing": True, **flags}
        trainer = make_trainer(callbacks=callbacks, default_root_dir=tmp_path / folder, **given)
        resumes = (tmp_path / folder / "checkpoints" / "last.ckpt").is_file()
        torch.manual_seed(0)
        trainer.fit(module or Perceptron(), federation(), ckpt_path="last" if resumes else None)
        assert len(read_rows(tmp_path / folder)) == trainer.run.round
        return trainer

    return fit


def rounds_in_table(trainer: FederatedTrainer) -> str:
    return dict(final_lines(trainer, trainer.fit_loop.rows))["rounds"]


@pytest.mark.parametrize("name", STOPPING)
def test_a_stopped_run_stays_stopped_and_says_who_stopped_it(
    name: str, fit: Callable[..., FederatedTrainer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, shown = STOPPING[name]
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        trainer = fit(make())
        assert rounds_in_table(trainer) == f"2 of 4 ({shown})"
        who = shown.replace(": ", " (") + ")" * (": " in shown)
        who = who.replace("should_stop was set", "Something that set should_stop")
        assert f"{who} stopped the run after round 2 of 4." in caplog.messages
        written = (tmp_path / "run" / "checkpoints" / "last.ckpt").read_bytes()
        for _ in range(2):
            caplog.clear()
            trainer = fit(make())
            assert rounds_in_table(trainer) == f"2 of 4 ({shown})"
            assert any(f"Nothing is left to do: {who} stopped the run after round 2 of 4" in m for m in caplog.messages)
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").read_bytes() == written
    if name != "CommunicationMeter":  # which knows that the budget is spent
        assert fit(make(), max_rounds=PLANNED + 1).run.round > 2, "a larger max_rounds lets it go on"


def test_a_stopped_run_that_lacks_rounds_of_min_rounds_goes_on_and_says_so(
    fit: Callable[..., FederatedTrainer], caplog: pytest.LogCaptureFixture
) -> None:
    make, _ = STOPPING["own"]
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        fit(make())
        caplog.clear()
        assert fit(make(), min_rounds=3).run.round == 3
    assert "Nothing is left to do" not in caplog.text
    assert "stopped the run after round 2 of 4; it goes on, because min_rounds or min_steps is more." in caplog.text


def test_a_stop_that_waits_for_min_rounds_is_kept_within_a_round(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    class Saves(L.Callback):
        def on_client_upload(self, trainer: Any, *arguments: Any) -> None:
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(tmp_path / "within.ckpt")

    for callbacks, path in (([Saves()], None), ([], tmp_path / "within.ckpt")):
        trainer = make_trainer(
            callbacks=[Rising(), TargetReached(0.0, "val/rising"), *callbacks], max_rounds=PLANNED, min_rounds=3
        )
        trainer.fit(Perceptron(), federation(), ckpt_path=path)
        assert rounds_in_table(trainer) == "3 of 4 (TargetReached: val/rising)"


@pytest.mark.parametrize("name", ["CommunicationMeter", "own", "at the start", "after the validation", "function"])
@pytest.mark.parametrize("every", [(1, 3), (3, 1), (3, 3)], ids=lambda every: f"every {every}")
def test_the_last_round_is_evaluated_wherever_a_run_is_stopped(
    name: str, every: tuple[int, int], make_trainer: MakeTrainer
) -> None:
    """Compare the last row with that of a run which ends there as planned."""
    if name == "after the validation" and every[0] > 1:
        pytest.skip("there is none in the first two rounds")
    rows = []
    for callbacks, max_rounds in ((STOPPING[name][0](), PLANNED), ([], 2)):
        flags = {"val_every_n_rounds": every[0], "test_every_n_rounds": every[1]}
        trainer, data = make_trainer(callbacks=callbacks, max_rounds=max_rounds, **flags), Served(9)
        data.val_fraction = 0.2
        torch.manual_seed(0)
        trainer.fit(Perceptron(), data)
        rows.append({key: value for key, value in trainer.fit_loop.rows[-1].items() if key != "time/round_seconds"})
        assert trainer.run.round == 2
        assert float(trainer.callback_metrics["val/loss"]) == rows[-1]["val/loss"]
    assert rows[0] == rows[0] | rows[1], "but for what a callback logs"
    assert {"val/loss", "test/loss"} <= rows[0].keys()


def test_a_module_may_stop_the_run(fit: Callable[..., FederatedTrainer]) -> None:
    for _ in range(2):
        assert rounds_in_table(fit(module=StopsItself())) == "2 of 4 (StopsItself)"
    assert fit(module=Perceptron()).run.round == PLANNED


@pytest.mark.parametrize(
    ("first", "then", "rounds"),
    [
        (never_better, list, 4),
        (never_better, lambda: never_better(patience=2), 3),
        (never_better, lambda: never_better(min_delta=0.0), 4),
        (Stops, lambda: Stops(1), 3),
        (Stops, never_better, 4),
        (lambda: [Rising(), TargetReached(1.0, "val/rising")], lambda: [Rising(), TargetReached(2.0, "val/rising")], 3),
        (
            lambda: [Rising(), TargetReached(1.0, "val/rising")],
            lambda: [Rising(), TargetReached(1.0, "val/rising", stop=False)],
            4,
        ),
    ],
    ids=["left out", "more patience", "less to gain", "own", "another callback", "another target", "without a stop"],
)
def test_a_stopped_run_goes_on_if_what_stopped_it_has_changed(
    first: Callable[[], Any], then: Callable[[], Any], rounds: int, fit: Callable[..., FederatedTrainer], caplog: Any
) -> None:
    assert fit(first()).run.round == 2
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        assert fit(then()).run.round == rounds
    assert any("it goes on" in message for message in caplog.messages)


def test_a_stopped_run_that_went_on_is_as_one_in_one_go(fit: Callable[..., FederatedTrainer]) -> None:
    fit(never_better())
    in_two, in_one = fit(), fit(folder="other")
    assert torch.equal(in_two.run.params, in_one.run.params)
    assert rounds_in_table(in_two) == "4"


def test_a_changed_argument_of_a_callback_is_said(fit: Callable[..., FederatedTrainer], caplog: Any) -> None:
    fit(never_better(patience=9), max_rounds=1)
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        trainer = fit(never_better(patience=1))
    assert trainer.run.round == 2
    assert any("trainer.callbacks.0.patience 9 → 1" in message for message in caplog.messages)


class Interrupts(L.Callback):
    """Callback that interrupts the run in its second round, also while another stops it."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.should_stop = True
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "inside.ckpt")
            raise KeyboardInterrupt


def test_an_interrupted_run_goes_on(fit: Callable[..., FederatedTrainer], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(Interrupts())
    inside = checkpoint_file.load(tmp_path / "run" / "inside.ckpt")["federation"]
    assert (inside["run"]["round"], inside["stop"]) == (1, None), "the stop comes again with its round"
    assert fit().run.round == PLANNED


def test_a_run_killed_after_its_last_checkpoint_stays_stopped(fit: Callable[..., FederatedTrainer]) -> None:
    class Dies(L.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        fit([Stops(), Dies()])
    assert fit(Stops()).run.round == 2


def test_a_run_out_of_time_goes_on_with_more_of_it(
    fit: Callable[..., FederatedTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a clock on which each round takes a minute."""
    clock: Iterator[float] = iter(range(0, 10**6, 60))
    monkeypatch.setattr("lightning.pytorch.callbacks.timer.time.monotonic", lambda: float(next(clock)))
    done = fit(max_time={"minutes": 2}).run.round
    assert done < PLANNED
    trainer = fit(max_time={"minutes": 2})
    assert rounds_in_table(trainer) == f"{done} of 4 (max_time)"
    assert fit(max_time={"minutes": 2}, max_rounds=9).run.round == done
    assert fit(max_time={"hours": 9}).run.round == PLANNED


@pytest.mark.parametrize("stopper", [Stops(2), never_better(), None], ids=["callback", "early stopping", "module"])
def test_nothing_stops_a_run_before_its_least_rounds(
    stopper: L.Callback | None, make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    module = Perceptron() if stopper else StopsItself()
    trainer = make_trainer(max_rounds=9, min_rounds=5, callbacks=[stopper] if stopper else [], val_every_n_rounds=1)
    trainer.fit(module, federation())
    assert trainer.run.round == 5
    assert "would stop the run after round 2; it goes on until min_rounds 5." in caplog.text


def test_least_rounds_are_those_of_lightnings_trainer(
    make_trainer: MakeTrainer, make_stock_trainer: Callable[..., L.Trainer]
) -> None:
    stock = StopsItself()
    stock_trainer = make_stock_trainer(max_epochs=9, min_epochs=5)
    data = federation(sizes=(12,))
    data.setup("fit")
    stock_trainer.fit(stock, data.train_dataloader(), data.val_dataloader())
    trainer = make_trainer(max_rounds=9, min_rounds=5, clients_per_round=1)
    trainer.fit(StopsItself(), federation(sizes=(12,)))
    assert (
        (trainer.current_epoch, trainer.min_epochs) == (stock_trainer.current_epoch, stock_trainer.min_epochs) == (5, 5)
    )

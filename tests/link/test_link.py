"""Test that the ledger counts every bit sent, as exact integers; tests/algorithms/test_algorithms.py has those of each method."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compared_runs import MakeTrainer, bits_of
from lightning.pytorch import Callback
from toys import Halves, Normalised, Perceptron, federation, read_rows

from lightning_fl import UserError
from lightning_fl.algorithms import Algorithm, EfficientAdam, OneBitAdam
from lightning_fl.codecs import Cast, Dense, ErrorFeedback, TopK
from lightning_fl.engine.population import Population
from lightning_fl.link.ledger import Ledger
from lightning_fl.link.link import Link
from lightning_fl.slots import KINDS, Packed, RoundContext, State, kind_of
from lightning_fl.state.run_state import Run
from lightning_fl.vectors.layout import Layout

D, K = 26, 3
CONTEXT = RoundContext(Layout(("a",), ((4,),)), Layout((), ()), num_clients=6)


def test_float_buffers_cross_as_well_and_counters_do_not(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=1)
    trainer.fit(Normalised(), federation())
    assert bits_of(trainer, "up") == bits_of(trainer, "down") == {"model": 32 * (D + 6) * K, "buffers": 32 * 6 * K}


@pytest.mark.parametrize(("precision", "width"), [("64-true", 64), ("bf16-true", 16), ("bf16-mixed", 32)])
def test_the_width_is_that_of_the_numbers(precision: str, width: int, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=1, precision=precision)
    trainer.fit(Normalised(), federation())
    expected = {"model": width * (D + 6) * K, "buffers": width * 6 * K}
    assert bits_of(trainer, "up") == bits_of(trainer, "down") == expected


def test_a_lossy_codec_refuses_moments_of_another_size_than_the_model() -> None:
    link = Link(RoundContext(Layout(("a",), ((26,),)), Layout((), ()), num_clients=6), TopK(0.1), Dense())
    message = {"model": torch.ones(26), "moments/few": torch.ones(5)}
    with pytest.raises(
        UserError, match=r"'moments/few' of a message has shape \(5,\), but TopK encodes .* size, \(26,\)"
    ):
        link.send_up(0, message)
    for codec in (Dense(), Cast(), ErrorFeedback(Cast())):
        assert link.send_up(0, message, codec=codec)["moments/few"].tolist() == [1.0] * 5


def test_clients_that_drop_out_receive_and_do_not_send(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    arriving: list[int] = []
    original = Population.answering

    def spy(self: Population, run: Run, selected: list[int]) -> list[int]:
        there = original(self, run, selected)
        if len(arriving) == run.round:
            arriving.append(len(there))
        return there

    monkeypatch.setattr(Population, "answering", spy)
    make_trainer(max_rounds=6, clients_per_round=6, dropout_rate=0.5, **keeps_files).fit(Perceptron(), federation())
    rows = read_rows(tmp_path)
    assert len(set(arriving)) > 1
    assert 0 < sum(arriving) < 36
    assert [int(row["comm/downlink_bits"]) for row in rows] == [32 * D * 6] * 6
    assert [int(row["comm/uplink_bits"]) for row in rows] == [32 * D * there for there in arriving]
    assert [int(row["clients/accepted"]) for row in rows] == arriving
    assert [int(row["clients/dropped"]) for row in rows] == [6 - there for there in arriving]
    assert int(rows[-1]["comm/total_uplink_bytes"]) == 4 * D * sum(arriving)


def test_cumulative_bytes_go_on_after_resuming(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    make_trainer(max_rounds=2, **keeps_files).fit(Perceptron(), federation())
    make_trainer(max_rounds=5, **keeps_files).fit(Perceptron(), federation(), ckpt_path="last")
    rows = read_rows(tmp_path)
    for direction in ("uplink", "downlink"):
        totals = [int(row[f"comm/total_{direction}_bytes"]) for row in rows]
        assert totals == [4 * D * K * done for done in range(1, 6)]


class Nudge(Callback):
    """Callback that changes the model before round 5."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 5:
            with torch.no_grad():
                pl_module.hidden.weight += 1


@pytest.mark.parametrize("callbacks", [[], [Nudge()]], ids=["unchanged", "nudged"])
@pytest.mark.parametrize("make", [EfficientAdam, lambda: OneBitAdam(warmup=2)])
def test_followers_load_nothing_after_a_round_without_an_answer(
    make: Callable[[], Algorithm],
    callbacks: list[Callback],
    make_trainer: MakeTrainer,
    tmp_path: Path,
    keeps_files: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Population, "answering", lambda self, run, selected: [] if run.round in (0, 4) else selected)
    for num_rounds, ckpt_path in ((3, None), (5, "last"), (7, "last")):
        trainer = make_trainer(max_rounds=num_rounds, callbacks=callbacks, **keeps_files)
        trainer.fit(Normalised(), federation(), make(), ckpt_path=ckpt_path)
    bits = [int(row["comm/downlink_bits"]) for row in read_rows(tmp_path)]
    assert bits[1] == 0
    assert bits[3] == bits[4] == bits[6] > 0
    whole = 6 * 32 * sum(parameter.numel() for parameter in Normalised().parameters())
    assert bits[5] == (bits[4] + whole if callbacks else 0), "clients cannot work out what a callback did"


def test_packed_bits_may_leave_a_fraction_of_a_byte() -> None:
    ledger = Ledger()
    ledger.book("up", {"mask": Packed(torch.zeros(2, dtype=torch.uint8), 11)}, recipients=3)
    assert ledger.bits("up") == 33
    assert ledger.total_bytes("up") == 33 / 8
    ledger.open_round()
    assert ledger.bits("up") == 0
    assert ledger.total_bytes("up") == 33 / 8


def test_a_message_is_named_after_its_kind() -> None:
    assert kind_of("moments/control") == "moments"
    with pytest.raises(ValueError, match="'control'"):
        kind_of("control")


def test_a_clients_codec_memory_moves_only_with_accepted_uploads() -> None:
    memory: dict[int, State] = {}
    link = Link(CONTEXT, Halves(), Dense(), Ledger(), memory, {})
    one = {"model": torch.ones(4)}
    assert link.send_up(5, one)["model"].tolist() == [0.5] * 4
    assert memory == {}
    link = Link(CONTEXT, Halves(), Dense(), link.ledger, memory)
    assert link.commit(5) == {}, "an upload that was not accepted is forgotten"
    link.send_up(5, one)
    memory[5] = link.commit(5)
    assert link.send_up(5, one)["model"].tolist() == [0.75] * 4
    assert link.send_up(6, one)["model"].tolist() == [0.5] * 4, "each client has its own memory"
    assert link.ledger.bits("up") == 16


def test_the_servers_codec_memory_moves_with_every_broadcast() -> None:
    memory: State = {}
    link = Link(CONTEXT, Dense(), Halves(), Ledger(), {}, memory)
    for expected in (0.5, 0.75, 0.875):
        assert link.broadcast([1, 2, 3], {"model": torch.ones(4)})["model"].tolist() == [expected] * 4
    assert link.ledger.bits("down") == 3 * 3 * 4


def test_bits_beside_the_messages_are_charged_to_each_client() -> None:
    link = Link(CONTEXT, Dense(), Dense(), timed=[1])
    link.charge("up", [0, 1, 2], {"scalars": 32, "keys": 8})
    assert link.ledger.bits("up") == 3 * 40
    assert link.bits_by_client[1] == (40, 0)


def test_a_ledger_counts_whole_bytes_exactly_and_its_copy_goes_on_alone() -> None:
    ledger = Ledger()
    ledger.add({"up": {"model": 2**60}})
    before = ledger.state_dict()
    ledger.add({"up": {"model": 8, "mask": 16}, "down": {"model": 9}})
    assert (ledger.total_bytes("up"), ledger.total_bytes("down")) == (2**57 + 3, 1.125)
    assert ledger.since(before["round_bits"])["up"] == dict.fromkeys(KINDS, 0) | {"model": 8, "mask": 16}
    copy = Ledger()
    copy.load_state_dict(before)
    assert copy == Ledger(before["round_bits"], before["total_bits"])
    assert (copy.bits("up"), copy.bits("down")) == (2**60, 0)
    ledger.catch_up.add({"model": 5}, [1])
    copy.load_state_dict(ledger.state_dict())
    assert copy == ledger

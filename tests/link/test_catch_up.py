"""Test that clients that were away load what they have missed, to the bit, against a loop over all clients."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from compared_runs import MakeTrainer, agree, fits, ran, recorded_times
from lightning.pytorch import Callback
from torch.utils._pytree import tree_leaves
from toys import Normalised, Perceptron, federation, vector

from lightning_fl import UserError
from lightning_fl.algorithms import Algorithm
from lightning_fl.callbacks import MagnitudePruning
from lightning_fl.codecs import STC, Dense, ErrorFeedback, Followed, TopK
from lightning_fl.features.clock.client_clock import ClientClock
from lightning_fl.link.catch_up import CatchUp
from lightning_fl.slots import KINDS, Codec
from lightning_fl.steps import Apply, Compress

WHOLE, BUFFERS = 32 * 32, 6 * 32
"""Bits of the model of 32 numbers, and of its 6 buffers."""


def both_ways(codec: Codec, catch_up: bool | None = True) -> Algorithm:
    """Return STC both ways, or another sparse codec."""
    return Algorithm(
        uplink=ErrorFeedback(codec), steps=[Apply(), Compress(codec)], downlink=Followed(codec, catch_up=catch_up)
    )


class Watch(Callback):
    """Callback that records the selected clients of each round, its bits down, and the update that the next broadcast sends."""

    def __init__(self) -> None:
        self.rounds: list[tuple[list[int], dict[str, int], dict[str, int]]] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.selected = trainer.fit_loop.engine.population.select(trainer.run)
        self.num_uploads = trainer.run.num_uploads

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        run = trainer.run
        update = dict(zip(KINDS, run.server["1:Compress"]["scalars/bits"].tolist(), strict=True))
        if run.num_uploads == self.num_uploads:  # nobody has answered: nothing changes
            update = dict.fromkeys(KINDS, 0)
        self.rounds.append((self.selected, copy.deepcopy(run.ledger.round_bits["down"]), update))


def by_hand(watch: Watch, numbers: list[int]) -> int:
    """Check the bits down of each round; returns how often a client that had been there before loaded the whole model.

    Args:
        watch: what was recorded.
        numbers: numbers of the model by round, of which a mask leaves fewer; it goes along to clients that do not have it.
    """
    owed = [dict.fromkeys(KINDS, 0) for _ in range(6)]
    seen, masked, num_capped = set[int](), set[int](), 0
    update = dict.fromkeys(KINDS, 0) | {"model": WHOLE}  # the first broadcast
    for (selected, bits, of_next), count in zip(watch.rounds, numbers, strict=True):
        for client in owed:
            for kind in KINDS:
                client[kind] += update[kind]
        expected = dict.fromkeys(KINDS, 0) | {"buffers": 2 * BUFFERS}
        for client in selected:
            is_whole = sum(owed[client].values()) > 32 * count
            num_capped += is_whole and client in seen
            for kind, missed in ({"model": 32 * count} if is_whole else owed[client]).items():
                expected[kind] += missed
            expected["mask"] += 32 if count < 32 and client not in masked else 0
            owed[client] = dict.fromkeys(KINDS, 0)
        assert bits == expected
        seen |= {*selected}
        masked |= {*selected} if count < 32 else set()
        update = of_next
    return num_capped


@pytest.mark.parametrize(("codec", "num_capped"), [(STC(0.2), 0), (TopK(0.4), 1)], ids=["STC", "TopK"])
@pytest.mark.parametrize("dropout_rate", [0.0, 0.4])
def test_clients_load_what_they_have_missed(
    codec: Codec, num_capped: int, dropout_rate: float, make_trainer: MakeTrainer
) -> None:
    watch = Watch()
    trainer = make_trainer(max_rounds=9, clients_per_round=2, dropout_rate=dropout_rate, callbacks=[watch])
    trainer.fit(Normalised(), federation(), both_ways(codec))
    assert by_hand(watch, [32] * 9) >= num_capped
    assert {
        client for selected, _, _ in watch.rounds for client in selected
    } == trainer.run.ledger.catch_up.loaded.keys()


@pytest.mark.parametrize("missed", [0, 1, 2, 3, 9])
def test_a_client_that_was_away_loads_the_sum_or_the_model(missed: int) -> None:
    catch_up, update = CatchUp(), {"model": 150, "mask": 50, "scalars": 100}
    catch_up.add({"model": WHOLE}, [0, 1])
    for _ in range(missed):
        catch_up.add(update, [0])
    found = {kind: bits for kind, bits in catch_up.bits([1], update, WHOLE).items() if bits}
    sums = {kind: (missed + 1) * bits for kind, bits in update.items()}
    assert found == (sums if missed < 3 else {"model": WHOLE})
    assert sum(catch_up.bits([0], update, WHOLE).values()) == 300
    assert sum(catch_up.bits([7], update, WHOLE).values()) == WHOLE, "a newcomer loads the whole model"
    assert catch_up.loaded.keys() == {0, 1}


def test_the_state_grows_with_the_clients_not_with_the_rounds() -> None:
    catch_up, sizes = CatchUp(), []
    for round_index in range(40):
        catch_up.add({"model": 150, "mask": 50}, [round_index % 3])
        sizes.append(len(tree_leaves(catch_up.state_dict())))
    assert sizes[2] == sizes[-1]


def test_the_state_of_an_earlier_version_is_read() -> None:
    totals, expected, read = [dict.fromkeys(KINDS, 0)], CatchUp(), CatchUp()
    for bits, client in ((96, 0), (20, 1), (30, 0)):
        totals.append(totals[-1] | {"model": totals[-1]["model"] + bits})
        expected.add({"model": bits}, [client])
    read.load_state_dict({"totals": totals, "loaded": {0: 3, 1: 2}})
    assert read == expected


def test_with_all_clients_in_each_round_it_costs_the_same(make_trainer: MakeTrainer) -> None:
    models, totals = [], []
    start = Normalised().state_dict()
    for catch_up in (None, True):
        module = Normalised()
        module.load_state_dict(start)
        trainer = make_trainer(max_rounds=4, clients_per_round=6)
        trainer.fit(module, federation(), both_ways(STC(0.2), catch_up))
        models.append(vector(module).tolist())
        totals.append(trainer.run.ledger.total_bits)
    assert models[0] == models[1]
    assert totals[0] == totals[1]


def test_stacked_clients_load_the_same(make_trainer: MakeTrainer) -> None:
    pair = fits(make_trainer, Normalised(), federation, both_ways(STC(0.2)), clients_per_round=2)
    ledgers = [trainer.run.ledger.state_dict() for _, trainer in pair]
    assert ledgers[0]["total_bits"]["down"] == ledgers[1]["total_bits"]["down"]
    assert ledgers[0]["catch_up"] == ledgers[1]["catch_up"]


class StoppedError(Exception):
    """A failure in the middle of a round."""


class Fails(Callback):
    """Callback that fails in round 3, after an upload."""

    def on_client_upload(self, trainer: Any, pl_module: Any, *arguments: Any) -> None:
        if trainer.current_epoch == 3:
            raise StoppedError


def test_a_broken_run_goes_on_with_the_same_bits(make_trainer: MakeTrainer, keeps_files: dict[str, Any]) -> None:
    start, ends, ledgers = Normalised().state_dict(), [], []
    for broken in (False, True):
        module = Normalised()
        module.load_state_dict(start)
        flags: dict[str, Any] = {"max_rounds": 6, "clients_per_round": 2, "precision": "64-true"}
        if broken:
            with pytest.raises(StoppedError):
                make_trainer(**flags, **keeps_files, callbacks=[Fails()]).fit(module, federation(), both_ways(STC(0.2)))
            trainer = make_trainer(**flags, **keeps_files)
            trainer.fit(module, federation(), both_ways(STC(0.2)), ckpt_path="last")
        else:
            trainer = make_trainer(**flags)
            trainer.fit(module, federation(), both_ways(STC(0.2)))
        ends.append(vector(module).tolist())
        ledgers.append(trainer.run.ledger.state_dict())
    assert ends[0] == ends[1]
    assert ledgers[0] == ledgers[1]


def test_a_mask_goes_to_clients_that_are_there(make_trainer: MakeTrainer) -> None:
    watch = Watch()
    pruning = MagnitudePruning(rate=0.4, prune_epoch=2)
    trainer = make_trainer(max_rounds=6, clients_per_round=2, callbacks=[pruning, watch])
    trainer.fit(Normalised(), federation(), both_ways(STC(0.2)))
    kept = int(trainer.run.mask.sum())
    assert kept < 32
    by_hand(watch, [32] * 2 + [kept] * 4)


class Shifts(Callback):
    """Callback that changes the server's model after round 2."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            with torch.no_grad():
                next(pl_module.parameters()).add_(1.0)


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("catch_up", [None, True])
def test_a_model_that_a_callback_changed_is_sent_whole(
    catch_up: bool | None, resumes: bool, make_trainer: MakeTrainer
) -> None:
    method, watch, rounds = both_ways(STC(0.2), catch_up), Watch(), [2, 4] if resumes else [4]
    flags: dict[str, Any] = {"clients_per_round": 6, "enable_checkpointing": True}
    for number in rounds:
        trainer = make_trainer(max_rounds=number, callbacks=[Shifts(), watch], **flags)
        trainer.fit(Normalised(), federation(), method, ckpt_path=None if number == rounds[0] else "last")
    changes = [sum(update.values()) for _, _, update in watch.rounds]
    sent = [sum(bits.values()) - bits["buffers"] for _, bits, _ in watch.rounds]
    changed = WHOLE if catch_up else WHOLE + changes[1]  # who catches up loads a whole model at most
    assert sent == [6 * WHOLE, 6 * changes[0], 6 * changed, 6 * changes[2]]


def test_other_entries_and_the_uplink_are_refused() -> None:
    with pytest.raises(UserError, match="adds up changes of the model, 'model/change', and 'moments/momentum' is none"):
        Followed(Dense(), "moments/momentum", catch_up=True)
    with pytest.raises(UserError, match="Followed fits the downlink only"):
        Algorithm(uplink=Followed(Dense(), catch_up=True))


@pytest.mark.slow
def test_two_processes_charge_the_same(tmp_path: Path) -> None:
    method = (
        'Algorithm --algorithm.steps [{"class_path":"Apply"},{"class_path":"Compress","init_args":{"codec":"STC"}}] '
        "--algorithm.downlink Followed --algorithm.downlink.codec STC --algorithm.downlink.catch_up true "
        "--trainer.max_rounds 3 --model.network lenet5"
    )
    one = ran(tmp_path / "one", algorithm=method)
    agree(one, ran(tmp_path / "two", algorithm=method, num_processes=2))
    down = [float(row["comm/downlink_bits"]) for row in one[0]]
    assert down[0] > down[1] > 0
    assert torch.tensor(down).isfinite().all()


def test_updates_as_large_as_the_model_keep_their_kinds() -> None:
    catch_up = CatchUp()
    catch_up.add({"model": 60, "mask": 4}, [0])
    assert catch_up.bits([1], {"model": 28, "mask": 4}, whole=96)["mask"] == 8
    assert catch_up.bits([1], {"model": 29, "mask": 4}, whole=96) == {"model": 96}


@pytest.mark.parametrize(("make", "buffers"), [(Perceptron, 0), (Normalised, BUFFERS)])
def test_each_client_is_charged_what_it_loads(
    make: type[Perceptron], buffers: int, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = recorded_times(monkeypatch)
    trainer = make_trainer(max_rounds=6, clients_per_round=2, clock=ClientClock())
    trainer.fit(make(), federation(), both_ways(STC(0.2)))
    for row, times in zip(trainer.fit_loop.rows, found, strict=True):
        assert sum(down for _, down in times.bits.values()) == row["comm/downlink_bits"]
    assert trainer.run.ledger.round_bits["down"]["buffers"] == 2 * buffers

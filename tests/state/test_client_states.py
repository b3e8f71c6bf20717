"""Test client states: in memory and on disk alike, complete or absent, in checkpoints, over processes."""

import copy
import gc
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from compared_runs import MakeTrainer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lightning.pytorch import Callback
from roster import problem
from toys import SIZES, Perceptron, Remembering, federation, samples, vector

from lightning_fl import FederatedTrainer, UserError
from lightning_fl.outputs import checkpoint_file
from lightning_fl.slots import State
from lightning_fl.state.client_states import ClientStatesOnDisk

PLACES = ("memory", "disk")


def same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def all_same(a: Any, b: Any) -> bool:
    return dict(a).keys() == dict(b).keys() and all(same(a[client], b[client]) for client in a)


def state_of(seed: int) -> State:
    """Return a state with many kinds of entries: vectors, a single number, none, half precision, packed bits, other lengths."""
    generator = torch.Generator().manual_seed(seed)
    whole = {
        "control": torch.randn(5, generator=generator),
        "turns": torch.randint(9, (), generator=generator),
        "nothing": torch.zeros(0),
        "half": torch.randn(3, generator=generator).bfloat16(),
        "mask": torch.randn(2, 3, generator=generator) > 0,
    }
    longer = {"control": torch.randn(7, generator=generator)}
    return [whole, longer, {}, {"control": whole["control"], "turns": whole["turns"]}][seed % 4]


def test_a_state_written_ahead_is_set_without_being_written_again(tmp_path: Path) -> None:
    states = ClientStatesOnDisk(tmp_path)
    states[0], states[1] = state_of(0), state_of(4)
    before = states.snapshot()
    first, again, lost = (states.ahead(state_of(seed)) for seed in (8, 12, 16))
    assert same(dict(first), state_of(8))
    assert all_same(states, {0: state_of(0), 1: state_of(4)}), "a state is not set before the round ends"
    sizes = {path: path.stat().st_size for path in tmp_path.iterdir()}
    states[0], states[1] = first, again
    states.drop_ahead()
    assert {path: path.stat().st_size for path in tmp_path.iterdir()} == sizes
    assert all_same(states, {0: state_of(8), 1: state_of(12)})
    assert all_same(before, {0: state_of(0), 1: state_of(4)}), "those before the round can be read until the next"
    states[2] = state_of(20)  # in the row of the state that was lost
    assert {path: path.stat().st_size for path in tmp_path.iterdir()} == sizes
    assert all_same(states, {0: state_of(8), 1: state_of(12), 2: state_of(20)})
    assert len(lost) == len(state_of(16))


@pytest.mark.long
@settings(max_examples=60)
@example([("set", 0, 0), ("round", 0, 0), ("set", 0, 4), ("set", 1, 8)])
@given(
    st.lists(st.tuples(st.sampled_from(["set", "delete", "round"]), st.integers(0, 4), st.integers(0, 40)), max_size=25)
)
def test_on_disk_is_a_mapping_like_any_other(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]]
) -> None:
    """Check also that a snapshot does not change until the second `release_replaced`, which is one whole round."""
    states = ClientStatesOnDisk(tmp_path_factory.mktemp("states"))
    expected: dict[int, State] = {}
    began, expected_began = states.snapshot(), dict(expected)
    for what, client, seed in steps:
        if what == "set":
            states[client] = state_of(seed)
            expected[client] = state_of(seed)
        elif what == "delete" and client in expected:
            del states[client], expected[client]
        elif what == "round":
            began, expected_began = states.snapshot(), dict(expected)
            states.release_replaced()
        assert all_same(states, expected)
        assert all_same(began, expected_began)
        assert all_same(states.as_saved(), expected)
        assert all_same(began.as_saved(), expected_began)


def test_rows_that_were_replaced_are_used_again(tmp_path: Path) -> None:
    states = ClientStatesOnDisk(tmp_path)
    for seed in range(20):
        for client in range(3):
            states[client] = {"control": torch.full((1000,), float(seed))}
        states.release_replaced()
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size == 2 * 3 * 4000, "the file has one row a client, and as many for the current round"


def test_what_is_read_is_a_copy(tmp_path: Path) -> None:
    states = ClientStatesOnDisk(tmp_path)
    states[3] = {"control": torch.ones(2)}
    states[3]["control"] += 1
    assert states[3]["control"].tolist() == [1, 1]


@pytest.mark.parametrize("place", PLACES)
def test_a_rule_and_a_codec_with_states_match_their_oracle(place: str, make_trainer: MakeTrainer) -> None:
    module = Perceptron()
    expected, sums = oracle.remembering(problem(rounds=6, epochs=2), vector(module))
    trainer = make_trainer(max_rounds=6, local_epochs=2, precision="64-true", client_states=place)
    trainer.fit(module, federation(), Remembering())
    np.testing.assert_allclose(vector(module), expected, rtol=0, atol=1e-10)
    assert trainer.run.clients.keys() == sums.keys()
    for client, total in sums.items():
        np.testing.assert_allclose(trainer.run.clients[client]["sum"].numpy(), total, rtol=0, atol=1e-10)
    turns = sum(int(state["turns"]) for state in trainer.run.clients.values())
    assert turns == 6 * 3


class Poisoned(Perceptron):
    """Module whose loss is NaN on samples with a first feature beyond 100, once `poisonous`."""

    poisonous = False

    def loss(self, batch: Any) -> torch.Tensor:
        poison = torch.where((batch[0][:, 0].max() > 100) & self.poisonous, torch.nan, 1.0)
        return super().loss((batch[0].clamp(max=100), batch[1])) * poison


@pytest.mark.parametrize("place", PLACES)
def test_a_client_whose_upload_is_rejected_keeps_what_it_had(place: str, make_trainer: MakeTrainer) -> None:
    x, y = samples(sum(SIZES))
    data = federation()
    data.setup("fit")
    x[data.client_indices[3][0]] = 1000.0
    kept: list[tuple[dict[int, State], dict[int, State]]] = []

    class Watch(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            kept.append((copy.deepcopy(dict(trainer.run.clients)), copy.deepcopy(dict(trainer.run.client_memory))))
            pl_module.poisonous = True

    trainer = make_trainer(max_rounds=2, clients_per_round=6, callbacks=Watch(), client_states=place)
    trainer.fit(Poisoned(), federation(train=(x, y)), Remembering())
    for before, after in zip(*kept, strict=True):
        assert [client for client in before if same(before[client], after[client])] == [3]


@pytest.mark.parametrize("first", PLACES)
@pytest.mark.parametrize("second", PLACES)
def test_a_run_resumes_bit_for_bit_in_memory_and_on_disk(
    first: str, second: str, make_trainer: MakeTrainer, keeps_files: dict[str, Any]
) -> None:
    start = Perceptron()
    whole, half, resumed = (copy.deepcopy(start) for _ in range(3))
    uninterrupted = make_trainer(max_rounds=6)
    uninterrupted.fit(whole, federation(), Remembering())
    make_trainer(max_rounds=3, client_states=first, **keeps_files).fit(half, federation(), Remembering())
    trainer = make_trainer(max_rounds=6, client_states=second, **keeps_files)
    trainer.fit(resumed, federation(), Remembering(), ckpt_path="last")
    assert same(whole.state_dict(), resumed.state_dict())
    assert all_same(uninterrupted.run.clients, trainer.run.clients)
    assert all_same(uninterrupted.run.client_memory, trainer.run.client_memory)


@pytest.mark.parametrize("place", PLACES)
def test_a_checkpoint_of_the_middle_of_a_round_is_that_of_its_beginning(
    place: str, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    """Test also a round that fails after all uploads have been received."""
    start = Perceptron()
    whole = copy.deepcopy(start)
    make_trainer(max_rounds=5).fit(whole, federation(), Remembering())

    class Fails(Callback):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            trainer.save_checkpoint(tmp_path / "late.ckpt")

    class Saves(Fails):
        def on_client_upload(self, trainer: Any, pl_module: Any, client: int, place: int, total: int) -> None:
            if trainer.current_epoch == 3 and place == 2:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    trainer = make_trainer(max_rounds=5, client_states=place, callbacks=Saves())
    end_round = "lightning_fl.flat_module.optimizers.schedules.Schedules.end_round"
    with pytest.MonkeyPatch.context() as patch:

        def fail(self: Any, done: int) -> None:
            if done == 4:
                raise RuntimeError("power failure")

        patch.setattr(end_round, fail)
        with pytest.raises(RuntimeError, match="power failure"):
            trainer.fit(copy.deepcopy(start), federation(), Remembering())
    for name in ("middle", "late"):
        assert checkpoint_file.load(tmp_path / f"{name}.ckpt")["epoch"] == 3
        resumed = copy.deepcopy(start)
        make_trainer(max_rounds=5).fit(resumed, federation(), Remembering(), ckpt_path=tmp_path / f"{name}.ckpt")
        assert same(whole.state_dict(), resumed.state_dict()), name


def test_a_saved_file_holds_each_state_once(tmp_path: Path) -> None:
    states = ClientStatesOnDisk(tmp_path / "states")
    for client in range(50):
        states[client] = {"control": torch.full((10_000,), float(client)), "turns": torch.tensor(client)}
    path = tmp_path / "last.ckpt"
    checkpoint_file.save_atomically({"state_dict": {}, "federation": {"run": {"clients": states.as_saved()}}}, path)
    assert path.stat().st_size < 1.02 * 50 * 40_000
    assert all_same(checkpoint_file.load(path)["federation"]["run"]["clients"], states)


def test_what_callbacks_get_of_a_checkpoint_is_their_own(tmp_path: Path) -> None:
    """Check that writing to a loaded checkpoint does not change its file, which is memory-mapped."""
    path = tmp_path / "any.ckpt"
    torch.save({"state_dict": {"w": torch.zeros(3)}, "callbacks": {"c": [(torch.zeros(2), 1)]}}, path)
    loaded = checkpoint_file.load(path)
    loaded["state_dict"]["w"] += 1
    loaded["callbacks"]["c"][0][0].add_(1)
    again = checkpoint_file.load(path)
    assert again["state_dict"]["w"].sum() == again["callbacks"]["c"][0][0].sum() == 0
    path.chmod(0o444)
    assert checkpoint_file.load(path)["state_dict"]["w"].sum() == 0


@pytest.mark.parametrize("own_folder", [False, True])
def test_the_files_go_with_the_run(own_folder: bool, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    place = tmp_path / "scratch"
    place.mkdir()
    parent = place if own_folder else tmp_path

    def fitted() -> FederatedTrainer:
        trainer = make_trainer(client_states=place if own_folder else "disk")
        trainer.fit(Perceptron(), federation(), Remembering())
        return trainer

    trainer = fitted()
    (made,) = parent.glob("client-states-*")
    assert len(dict(trainer.run.clients)) > 0, "the states must still be readable"
    trainer.fit(Perceptron(), federation(), Remembering())
    gc.collect()
    assert not made.exists()


def test_a_misspelt_place_is_refused(make_trainer: MakeTrainer) -> None:
    with pytest.raises(
        UserError, match=r"client_states 'dsik' is not a folder; did you mean 'disk'\? .*memory, or a folder"
    ):
        make_trainer(client_states="dsik")

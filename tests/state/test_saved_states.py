"""Test clients' states in files beside checkpoints: only changed ones are written, and the last two checkpoints are whole."""

import copy
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch
from compared_runs import MakeTrainer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lightning.pytorch import Callback
from toys import Perceptron, Remembering, federation, vector

from lightning_fl import UserError
from lightning_fl.slots import State
from lightning_fl.state.client_states import ClientStates, ClientStatesOnDisk, Column
from lightning_fl.state.saved_states import FOLDER, KINDS, SavedStates, read_states


def state_of(seed: int) -> State:
    """Return a state with entries of several lengths and types, or none."""
    generator = torch.Generator().manual_seed(seed)
    control, longer = torch.randn(5, generator=generator), torch.randn(7, generator=generator)
    whole = {"control": control, "turns": torch.tensor(seed), "half": control.bfloat16(), "mask": control > 0}
    return [whole, {"control": longer}, {}, {"none": torch.zeros(0), "control": control}][seed % 4]


def equal(saved: Any, expected: dict[int, State]) -> bool:
    return list(saved) == list(expected) and all(
        saved[c].keys() == state.keys() and all(torch.equal(saved[c][name], state[name]) for name in state)
        for c, state in expected.items()
    )


class Files:
    """Run's client states with the references of the last two complete checkpoints."""

    def __init__(self, parent: Path, on_disk: bool) -> None:
        self.path = parent / "last.ckpt"
        self.states = ClientStatesOnDisk(parent / "scratch") if on_disk else ClientStates()
        self.saved = SavedStates(parent)
        self.complete: list[tuple[dict[str, Any], dict[int, State]]] = []

    def write(self, completes: bool) -> None:
        """Write a checkpoint; a kill comes before its last step unless it `completes`."""
        run_state = self.saved.write({"clients": self.states.snapshot(), "client_memory": ClientStates()})
        if completes:
            now = {client: self.states[client] for client in self.states}
            self.complete = [*self.complete[-1:], (run_state, now)]
            self.saved.release()

    def check(self) -> None:
        """Check that both complete checkpoints are whole."""
        for run_state, expected in self.complete:
            assert equal(read_states(run_state, self.path)["clients"], expected)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.integers(0, 4), st.integers(0, 40)),
        st.tuples(st.just("delete"), st.integers(0, 4), st.just(0)),
        st.tuples(st.sampled_from(["round", "write", "killed"]), st.just(0), st.just(0)),
    ),
    max_size=30,
)


@pytest.mark.long
@pytest.mark.parametrize("on_disk", [False, True])
@settings(max_examples=60)
@example([("set", 0, 0), ("write", 0, 0), ("set", 0, 4), ("killed", 0, 0), ("set", 0, 8), ("killed", 0, 0)])
@example([step for seed in range(9) for step in (("set", 0, 4 * seed), ("round", 0, 0), ("write", 0, 0))])
@given(STEPS)
def test_the_last_two_checkpoints_are_always_whole(
    on_disk: bool, tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]]
) -> None:
    files = Files(tmp_path_factory.mktemp("checkpoints"), on_disk)
    for what, client, seed in steps:
        if what == "set":
            files.states[client] = state_of(seed)
        elif what == "delete" and client in files.states and on_disk:
            del files.states[client]
        elif what == "round":
            files.states.release_replaced()
        elif what in ("write", "killed"):
            files.write(completes=what == "write")
        files.check()


def test_only_changed_states_are_written_and_rows_are_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    write = Column.write

    def noted(column: Column, row: int, tensor: torch.Tensor) -> None:
        written.append(row)
        write(column, row, tensor)

    files = Files(tmp_path, on_disk=False)
    for client in range(50):
        files.states[client] = {"control": torch.zeros(1000)}
    files.write(completes=True)
    monkeypatch.setattr(Column, "write", noted)
    for turn in range(10):
        for client in range(turn, turn + 3):
            files.states[client] = {"control": torch.full((1000,), float(turn))}
        files.write(completes=True)
    assert len(written) == 30
    files.check()
    (file,) = tmp_path.rglob("*.rows")
    assert file.stat().st_size <= (50 + 3 * 3) * 4000, (
        "each client has a row, and two checkpoints and the next have 3 more"
    )


@pytest.mark.parametrize("damage", ["bit", "cut", "gone"])
def test_damaged_files_are_refused_before_a_round_is_trained(
    damage: str, make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    make_trainer(max_rounds=1, **keeps_files).fit(Perceptron(), federation(), Remembering())
    file = sorted((tmp_path / "checkpoints" / FOLDER).rglob("*.rows"))[0]
    content = bytearray(file.read_bytes())
    if damage == "bit":
        content[0] ^= 1
        file.write_bytes(content)
    elif damage == "cut":
        file.write_bytes(content[:-1])
    else:
        file.unlink()
    module = Perceptron()
    before = vector(module)
    with pytest.raises(
        UserError, match=r"\.rows with client states of the checkpoint .*last\.ckpt (is damaged|cannot be)"
    ):
        make_trainer(max_rounds=2, **keeps_files).fit(module, federation(), Remembering(), ckpt_path="last")
    assert (vector(module) == before).all()


def test_a_checkpoint_elsewhere_contains_its_states(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    class Saves(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(tmp_path / "elsewhere" / f"{trainer.current_epoch}.ckpt")

    start = Perceptron()
    whole, resumed = copy.deepcopy(start), copy.deepcopy(start)
    make_trainer(max_rounds=4, callbacks=Saves()).fit(whole, federation(), Remembering())
    assert {path.suffix for path in (tmp_path / "elsewhere").rglob("*")} == {".ckpt"}
    path = tmp_path / "elsewhere" / "1.ckpt"
    make_trainer(max_rounds=4).fit(resumed, federation(), Remembering(), ckpt_path=path)
    assert (vector(whole) == vector(resumed)).all()


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_each_leg_of_a_run_has_files_of_its_own(
    place: str, make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    """Check also that both checkpoints of a resumed run resume, while one of them refers to the leg before."""
    start, states = Perceptron(), tmp_path / "checkpoints" / FOLDER
    whole = copy.deepcopy(start)
    make_trainer(max_rounds=6).fit(whole, federation(), Remembering())
    flags: dict[str, Any] = {"client_states": place, **keeps_files}

    def go_on(rounds: int, ckpt_path: Any = "last") -> Perceptron:
        module = copy.deepcopy(start)
        make_trainer(max_rounds=rounds, **flags).fit(module, federation(), Remembering(), ckpt_path=ckpt_path)
        return module

    go_on(2, None)
    assert [path.name for path in states.iterdir()] == ["1"]
    go_on(3)
    assert sorted(path.name for path in states.iterdir()) == ["1", "2"], "previous.ckpt refers to the first"
    copied = tmp_path / "copy"
    copied.mkdir()
    for path in sorted((tmp_path / "checkpoints").rglob("*")):
        target = copied / path.relative_to(tmp_path / "checkpoints")
        target.mkdir() if path.is_dir() else target.write_bytes(path.read_bytes())
    from_previous = copy.deepcopy(start)
    make_trainer(max_rounds=6).fit(from_previous, federation(), Remembering(), ckpt_path=copied / "previous.ckpt")
    assert (vector(from_previous) == vector(whole)).all()
    assert (vector(go_on(6)) == vector(whole)).all()
    assert [path.name for path in states.iterdir()] == ["3"]
    loaded: dict[str, Any] = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["federation"]["run"]
    assert loaded["client_files"] == f"{FOLDER}/3"
    assert all(set(loaded[kind]) == {"clients", "columns"} for kind in KINDS)


class WithScaler(Perceptron):
    """Module that saves an object of a class in its checkpoints."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["scaler"] = Decimal("0.5")


def test_files_of_a_checkpoint_with_objects_stay(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    make_trainer(max_rounds=2, **keeps_files).fit(WithScaler(), federation(), Remembering())
    resumed = make_trainer(max_rounds=3, **keeps_files)
    resumed.fit(WithScaler(), federation(), Remembering(), ckpt_path="last", weights_only=False)
    states = tmp_path / "checkpoints" / FOLDER
    assert sorted(path.name for path in states.iterdir()) == ["1", "2"], "previous.ckpt refers to the first"

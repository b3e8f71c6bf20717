"""Test how clients' states travel between host and GPU, with an imitation of CUDA's page-locked memory, copies and events."""

import copy
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compared_runs import MakeTrainer
from roster import ROSTER
from torch import Tensor
from toys import Perceptron

from lightning_fl.algorithms import Algorithm
from lightning_fl.codecs import ErrorFeedback, TopK
from lightning_fl.state.staging import StagedStates, Staging

staging_module = importlib.import_module("lightning_fl.state.staging")
CPU = torch.device("cpu")


class Cuda:
    """CUDA in the memory of the host: copies that are not waited for happen when an event behind them is waited for.

    Attributes:
        pinned: sizes in bytes of the memory that was page-locked.
        waits: number of waits for an event.
    """

    def __init__(self) -> None:
        self.pinned: list[int] = []
        self.waits = 0
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._copy = Tensor.copy_

    def copy_(self, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if not non_blocking:
            return self._copy(to, source)
        self._copies.append((to, source))
        return to

    def pin_memory(self, tensor: Tensor) -> Tensor:
        self.pinned.append(tensor.nbytes)
        return tensor

    def finish(self, count: int | None = None) -> None:
        """Do the copies that have been started, or the first ones of all."""
        for number, pair in enumerate(self._copies[:count]):
            if pair is not None:
                self._copy(*pair)
                self._copies[number] = None  # type: ignore[call-overload]

    def event(self) -> Any:
        cuda = self

        class Event:
            def record(self) -> None:
                self.count = len(cuda._copies)

            def synchronize(self) -> None:
                cuda.waits += 1
                cuda.finish(self.count)

        return Event()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    imitation = Cuda()
    monkeypatch.setattr(staging_module, "pins", lambda device: True)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: imitation.pin_memory(tensor))
    monkeypatch.setattr(Tensor, "copy_", lambda to, source, *rest, **how: imitation.copy_(to, source, *rest, **how))
    monkeypatch.setattr(torch.cuda, "Event", imitation.event)
    return imitation


def states(count: int) -> list[dict[str, Tensor]]:
    """Return different states with entries of several dtypes and shapes, one of them empty and one not contiguous."""
    made = []
    for k in range(count):
        entries = [torch.arange(7) + k, torch.full((3, 2), k + 0.5).double().T, torch.tensor(k % 2 == 0), torch.ones(0)]
        entries += [torch.full((5,), k, dtype=torch.bfloat16), torch.tensor(10 * k)]
        made.append({f"entry/{i}": entry for i, entry in enumerate(entries)})
    return made


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one
    )


def test_no_state_is_lost_although_buffers_are_used_again(cuda: Cuda) -> None:
    """Check that a buffer is filled again only after the device has read it, and that the host waits once for a state."""
    staging, sent = Staging(), states(5)
    there = [staging.to_device(state, CPU) for state in sent]
    assert len(cuda.pinned) == 2
    assert cuda.waits == 3, "for the copies from the buffers that the first, second and third state have used"
    cuda.finish()
    assert all(map(same, there, sent))
    cuda.waits = 0
    back = [staging.to_host(state) for state in there]
    assert len(cuda.pinned) == 3
    assert cuda.waits == 5 + 4, "for each copy, and before the buffer is used again, when it has ended long ago"
    assert all(map(same, back, sent))
    assert not {x.data_ptr() for x in back[0].values() if x.numel()} & {x.data_ptr() for x in back[1].values()}


def test_a_buffer_grows_and_does_not_shrink(cuda: Cuda) -> None:
    staging = Staging()
    for size in (4, 100, 4, 100):
        assert staging.to_host({"a": torch.ones(size)})["a"].shape == (size,)
    assert cuda.pinned == [64, 448]


def test_a_cpu_pins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", None)
    monkeypatch.setattr(torch.cuda, "Event", None)
    staging, (state,) = Staging(), states(1)
    moved = staging.to_device(state, CPU)
    assert same(moved, state)
    assert moved["entry/0"].data_ptr() != state["entry/0"].data_ptr()
    assert staging.to_host(state)["entry/0"] is state["entry/0"]


def test_states_are_copied_when_they_are_asked_for() -> None:
    kept = dict(enumerate(states(2)))
    staged = StagedStates(kept, Staging(), CPU)
    assert list(staged) == [0, 1]
    assert same(staged[1], kept[1])
    staged[1]["entry/0"].zero_()
    assert same(staged[1], states(2)[1])
    assert staged.get(2, {}) == {}


FEDERATIONS: dict[str, Any] = {
    "SCAFFOLD": ROSTER["SCAFFOLD"].algorithm,
    "error feedback": lambda: Algorithm(uplink=ErrorFeedback(TopK(0.3))),
}


@pytest.mark.parametrize("runner", ["serial", "stacked"])
@pytest.mark.parametrize("client_states", ["memory", "disk"])
@pytest.mark.parametrize("name", FEDERATIONS)
def test_a_run_pins_three_buffers_and_ends_as_without(
    name: str, client_states: str, runner: str, make_trainer: MakeTrainer, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cuda, "copy_", lambda self, to, source, non_blocking=False: self._copy(to, source))
    start, ends = Perceptron(), []
    flags: Any = {"max_rounds": 4, "clients_per_round": 4, "runner": runner, "client_states": client_states}
    for pinned in (True, False):
        monkeypatch.setattr(staging_module, "pins", lambda device, pinned=pinned: pinned)
        module = copy.deepcopy(start)
        make_trainer(**flags).fit(module, ROSTER["SCAFFOLD"].federation(), FEDERATIONS[name]())
        ends.append(module.state_dict())
    assert len(cuda.pinned) == 3
    assert all(torch.equal(value, ends[1][key]) for key, value in ends[0].items())

"""Test what becomes of each kind of buffer: averaged, the largest value, kept by the client, or refused."""

from typing import Any, NamedTuple

import pytest
import torch
from compared_runs import MakeTrainer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from toys import Perceptron, Served, federation

from lightning_fl import UserError
from lightning_fl.algorithms import APFL, Algorithm, DeviceM, FedAvg, FedDU, FedLDF

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
SIZES = (4, 8, 12)
BATCHES, MEAN = max(SIZES) // 4, sum(size * size / 4 for size in SIZES) / sum(SIZES)
"""Batches of the largest client, and the mean over samples of the clients' numbers of batches."""


class Kind(NamedTuple):
    """Buffer of a dtype and shape; `changes` if each training step adds 1 to it, `tied` if two parts share it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    persistent: bool
    nested: bool
    tied: bool
    changes: bool


KINDS = st.builds(
    Kind,
    st.sampled_from((*FLOATS, *INTEGERS, torch.complex64)),
    st.sampled_from([(), (1,), (0,), (3,), (2, 2)]),
    *[st.booleans()] * 4,
)


class Buffered(Perceptron):
    """Module with a buffer of each of some kinds."""

    def __init__(self, kinds: list[Kind]) -> None:
        super().__init__()
        self.kinds = kinds
        self.queue = nn.Module()
        self.names = []
        for index, kind in enumerate(kinds):
            home = self.queue if kind.nested else self
            buffer = torch.zeros(kind.shape, dtype=kind.dtype)
            home.register_buffer(f"b{index}", buffer, persistent=kind.persistent)
            if kind.tied:
                self.output.register_buffer(f"b{index}", buffer, persistent=kind.persistent)
            self.names.append(f"queue.b{index}" if kind.nested else f"output.b{index}" if kind.tied else f"b{index}")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for name, kind in zip(self.names, self.kinds, strict=True):
            if kind.changes:
                buffer = self.get_buffer(name)
                buffer.logical_or_(torch.ones_like(buffer)) if kind.dtype == torch.bool else buffer.add_(1)
        return self.loss(batch)


def is_refused(kind: Kind) -> bool:
    several = torch.Size(kind.shape).numel() > 1
    return kind.dtype.is_complex or (several and kind.changes and kind.persistent and kind.dtype in INTEGERS)


@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(kinds=st.lists(KINDS, min_size=1, max_size=8), clean=st.booleans())
def test_each_buffer_is_averaged_counted_kept_or_refused(
    kinds: list[Kind], clean: bool, make_trainer: MakeTrainer
) -> None:
    kinds = [kind for kind in kinds if not (clean and is_refused(kind))]
    module = Buffered(kinds)
    trainer = make_trainer(max_rounds=1, runner="serial")
    if any(map(is_refused, kinds)):
        with pytest.raises(UserError, match=r"'(queue\.|output\.)?b[0-9]+' of Buffered"):
            trainer.fit(module, federation(sizes=SIZES))
        return
    trainer.fit(module, federation(sizes=SIZES))
    for name, kind in zip(module.names, kinds, strict=True):
        after = 0.0
        if kind.changes and kind.persistent:
            after = MEAN if kind.dtype in FLOATS else 1 if kind.dtype == torch.bool else BATCHES
        expected = torch.full(kind.shape, after, dtype=torch.float64)
        buffer = module.get_buffer(name)
        assert buffer.dtype == kind.dtype
        torch.testing.assert_close(buffer.double(), expected, rtol=1e-2, atol=0)


class Causal(Perceptron):
    """Module with a mask of attention, and a buffer that nothing has measured yet."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
        self.register_buffer("unknown", torch.full((2,), torch.nan))


@pytest.mark.parametrize("runner", ["serial", "stacked"])
@pytest.mark.parametrize("algorithm", [FedAvg(), FedLDF(3)], ids=["FedAvg", "FedLDF"])
def test_buffers_of_infinities_stay(algorithm: Algorithm, runner: str, make_trainer: MakeTrainer) -> None:
    """Test that the module trains as without them."""
    trained = []
    for make in (Perceptron, Causal):
        torch.manual_seed(0)
        module = make()
        trainer = make_trainer(runner=runner, max_rounds=2, clients_per_round=6)
        trainer.fit(module, federation(), algorithm)
        assert trainer.history["clients/rejected"].sum() == 0
        trained.append(torch.cat([parameter.detach().flatten() for parameter in module.parameters()]))
    torch.testing.assert_close(*trained)
    assert torch.equal(module.mask, Causal().mask)
    assert module.unknown.isnan().all()


class Queue(Perceptron):
    """Module with a queue of labels and its position."""

    def __init__(self, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("labels", torch.zeros(6, dtype=torch.long), persistent=persistent)
        self.register_buffer("position", torch.zeros((), dtype=torch.long), persistent=persistent)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        labels = batch[1].argmax(1)
        where = (self.position + torch.arange(len(labels))) % 6
        self.labels[where] = labels + 1
        self.position.copy_((self.position + len(labels)) % 6)
        return self.loss(batch)


@pytest.mark.parametrize("algorithm", [FedAvg(), FedDU()], ids=lambda a: a.name)
def test_a_queue_of_labels_is_refused_with_a_remedy(algorithm: Algorithm, make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match=r"'labels' of Queue.*persistent=False.*Algorithm\(personal=\['labels'\]\)"):
        make_trainer().fit(Queue(), Served(9), algorithm)
    make_trainer().fit(Queue(persistent=False), Served(9), algorithm)


@pytest.mark.parametrize("persistent", [True, False])
def test_a_client_keeps_the_buffers_that_are_named(persistent: bool, make_trainer: MakeTrainer) -> None:
    module = Queue(persistent)
    trainer = make_trainer(max_rounds=3, clients_per_round=2)
    trainer.fit(module, federation(sizes=(4, 4)), Algorithm(personal=["labels", "position"]))
    for client in range(2):
        own = trainer.run.clients[client]
        assert int(own["personal/counters/position"]) == 3 * 4 % 6
        assert (own["personal/counters/labels"] > 0).all(), "three batches of four fill a queue of six"
    assert not module.labels.any(), "the exported model has the initial queue"


@pytest.mark.parametrize("dtype", [torch.long, torch.float32], ids=str)
@pytest.mark.parametrize("replaces", [True, False])
def test_clients_of_a_stack_share_no_unsaved_buffer(
    dtype: torch.dtype, replaces: bool, make_trainer: MakeTrainer
) -> None:
    class Counting(Perceptron):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros((), dtype=dtype), persistent=False)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if replaces:
                self.steps = self.steps + 1
            else:
                self.steps.add_(1)
            self.log("steps", self.steps.float(), reduce_fx="max")
            return self.loss(batch)

    data = federation(sizes=(4,) * 12)
    with pytest.raises(
        UserError, match="'steps', registered with persistent=False, which clients of a stack would share"
    ):
        make_trainer(runner="stacked").fit(Counting(), data)
    trainer = make_trainer(max_rounds=1, clients_per_round=12)
    trainer.fit(Counting(), data)
    assert trainer.callback_metrics["steps"] == 1


@pytest.mark.parametrize("method", [FedAvg(), DeviceM(variant="mime"), APFL()], ids=lambda a: a.name)
def test_gradients_of_other_models_leave_unsaved_buffers_alone(method: Algorithm, make_trainer: MakeTrainer) -> None:
    class Counting(Perceptron):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(()), persistent=False)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.steps += 1
            self.log("steps", self.steps, reduce_fx="max")
            return self.loss(batch)

    trainer = make_trainer(max_rounds=1, clients_per_round=1, local_epochs=2, runner="serial")
    trainer.fit(Counting(), federation(sizes=(12,), batch_size=4), method)
    assert trainer.callback_metrics["steps"] == 6


def test_a_buffer_that_falls_is_said_to_be_no_counter(make_trainer: MakeTrainer) -> None:
    class Falling(Perceptron):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("left", torch.tensor(9))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.left -= 1
            return self.loss(batch)

    module = Falling()
    with pytest.warns(UserWarning, match="'left' of Falling.* became smaller .* keeps the largest value"):
        make_trainer().fit(module, federation())
    assert module.left == 9


class Reset(Perceptron):
    """Module that counts the batches of a round, from the count that a hook sets."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.register_buffer("batches", torch.tensor(0))
        self.register_buffer("rounds", torch.tensor(0))
        self.hook = hook

    def count(self, hook: str) -> None:
        if hook == self.hook:
            self.rounds += 1
            self.batches.zero_()

    def on_train_epoch_start(self) -> None:
        self.count("on_train_epoch_start")

    def on_train_epoch_end(self) -> None:
        self.count("on_train_epoch_end")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batches += 1
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_train_epoch_end"])
def test_integers_that_a_hook_changes_between_rounds_stay_changed(hook: str, make_trainer: MakeTrainer) -> None:
    module = Reset(hook)
    make_trainer(max_rounds=3, runner="serial", clients_per_round=3).fit(module, federation(SIZES, batch_size=4))
    assert module.rounds == 3
    assert module.batches == (BATCHES if hook == "on_train_epoch_start" else 0)


class Annealed(Perceptron):
    """Module whose loss has a factor in a buffer that is not saved, which a hook sets and the training spoils."""

    def __init__(self, in_place: bool, spoils: bool) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(1.0), persistent=False)
        self.in_place, self.spoils = in_place, spoils

    def on_train_epoch_start(self) -> None:
        now = torch.tensor(0.5**self.current_epoch)
        if self.in_place:
            self.factor.copy_(now)
        else:
            self.factor = now

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("factor", self.factor)
        loss = self.factor.clone() * super().training_step(batch, batch_idx)
        if self.spoils:
            self.factor.fill_(100.0)
        return loss


@pytest.mark.parametrize(("runner", "spoils"), [("serial", False), ("serial", True), ("stacked", False)])
@pytest.mark.parametrize("in_place", [True, False])
def test_clients_begin_with_what_a_hook_makes_of_buffers_that_are_not_saved(
    in_place: bool, runner: str, spoils: bool, make_trainer: MakeTrainer
) -> None:
    trainer = make_trainer(max_rounds=3, runner=runner, clients_per_round=3)
    trainer.fit(Annealed(in_place, spoils), federation((4, 4, 4), batch_size=4))
    assert [row["factor"] for row in trainer.fit_loop.rows] == [1.0, 0.5, 0.25]

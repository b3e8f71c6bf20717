"""Test the batches of a stack: those that each client reads alone, but from one gather a pass; and the gathers of a client."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from toys import Perceptron, federation, samples

from lightning_fl.clients.client_job import local_batches
from lightning_fl.clients.local_schedule import ClientWork, LocalSchedule
from lightning_fl.clients.stack_batches import (
    GatheredBatches,
    Member,
    SeparateBatches,
    StackBatches,
    stack_batches,
    whole_pass,
)
from lightning_fl.data.datasets.augment import crop_and_flip
from lightning_fl.data.samples.tensor_samples import Normalize, TensorSamples, TensorSelection

IMAGES, LABELS = torch.randint(256, (40, 3, 4, 4), dtype=torch.uint8), torch.arange(40)
NORMALIZE = Normalize(torch.full((3,), 0.5), torch.full((3,), 0.25))


class Operations(TorchDispatchMode):
    """Counts torch's operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("runner", ["serial", "stacked"])
def test_a_pass_is_one_gather_of_a_client_or_of_a_stack(runner: str, make_trainer: MakeTrainer) -> None:
    """Count what three more passes of four clients gather: inputs and targets, once a pass, however many batches it has."""
    counts = []
    for passes in (1, 4):
        trainer = make_trainer(
            max_rounds=1, local_epochs=passes, clients_per_round=4, runner=runner, limit_val_batches=0
        )
        with Operations() as operations:
            trainer.fit(Perceptron(), federation(sizes=(8, 8, 8, 8)))
        counts.append(operations.counts)
    more = counts[1] - counts[0]
    assert more["index_select"] == 3 * 2 * (4 if runner == "serial" else 1)
    assert more["stack"] == 0, "batches of a stack are views"


@pytest.mark.parametrize("runner", ["serial", "stacked"])
def test_one_pass_needs_no_other_copy(runner: str, make_trainer: MakeTrainer) -> None:
    """Check that samples which need not be converted are gathered for their passes alone."""
    gathered: list[int] = []

    class Counted(TensorSamples):
        def gather(self, indices: np.ndarray) -> list[Tensor]:
            gathered.append(len(indices))
            return super().gather(indices)

    data = federation(sizes=(8, 8, 8), train=samples(24))
    data.setup("fit")
    data.train.__class__ = Counted
    trainer = make_trainer(max_rounds=1, local_epochs=1, clients_per_round=3, runner=runner, limit_val_batches=0)
    trainer.fit(Perceptron(), data)
    assert gathered[-3:] == [8, 8, 8] if runner == "serial" else gathered[-1] == 24


def members(sizes: Sequence[int], steps: Sequence[int], schedule: LocalSchedule, data: TensorSamples) -> list[Member]:
    """Return clients with these numbers of samples, those with the most steps first."""
    parts = np.split(np.random.default_rng(0).permutation(len(data))[: sum(sizes)], np.cumsum(sizes)[:-1])
    ordered = sorted(zip(parts, steps, strict=True), key=lambda one: -one[1])
    return [
        Member(k, ClientWork(data.select(part), schedule.pass_batches(len(part)), count, (k, 0), True), {})
        for k, (part, count) in enumerate(ordered)
    ]


def prepare(batch: Any) -> Any:
    return [tensor.double() if tensor.is_floating_point() else tensor for tensor in batch]


def of_kind(some: Sequence[Member], schedule: LocalSchedule, gathered: bool, most_bytes: int = 2**30) -> StackBatches:
    module = SimpleNamespace(
        transfer=lambda batch, resident: prepare(batch), hooks=SimpleNamespace(changes_batches=not gathered)
    )
    module.fabric = SimpleNamespace(device=torch.device("cpu"))
    found = stack_batches(module, some, schedule)  # type: ignore[arg-type]
    assert isinstance(found, GatheredBatches if gathered else SeparateBatches)
    if isinstance(found, GatheredBatches):
        found._most_samples = min(found._most_samples, most_bytes // found._joined.bytes_of_a_sample)
    return found


@pytest.mark.long
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 7)), min_size=1, max_size=4).filter(
        lambda x: any(n for _, n in x)
    ),
    st.integers(1, 5),
    st.sampled_from([{}, {"accumulate": 2}, {"full_batch": True}, {"limit_batches": 1}]),
    st.sampled_from([1, 10**3, 2**30]),
    st.sampled_from([None, NORMALIZE, lambda images: images.exp()]),
)
def test_a_stack_reads_what_its_clients_read_alone(
    clients: list[tuple[int, int]],
    batch_size: int,
    options: dict[str, Any],
    most_bytes: int,
    transform: Any,
) -> None:
    """Compare bit for bit, whatever the clients' sizes and steps, the schedule, the bound of memory and the data."""
    sizes, steps = zip(*clients, strict=True)
    schedule = LocalSchedule(batch_size, None, 7, **options)
    data = TensorSamples(IMAGES, LABELS, transform=transform)
    data.place(torch.device("cpu"))
    some = members(sizes, steps, schedule, data)
    alone, together = of_kind(some, schedule, False), of_kind(some, schedule, True, most_bytes)
    for step in range(max(steps)):
        num_left = sum(member.work.num_steps > step for member in some)
        for batches in (alone, together):
            batches.advance(num_left)
        assert alone.num_batches == together.num_batches
        for one, other in zip(alone.groups(), together.groups(), strict=True):
            assert (one.rows, one.size, one.batch_index, one.factors) == (
                other.rows,
                other.size,
                other.batch_index,
                other.factors,
            )
            for x, y in zip(one.leaves, other.leaves, strict=True):
                assert torch.equal(x, y)
        for (x, i), (y, j) in zip(alone.contents(), together.contents(), strict=True):
            assert i == j
            assert all(torch.equal(a, b) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("sizes", [(5, 9, 2), (1, 1), (4,)])
@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_a_whole_pass_is_that_of_each_client(sizes: tuple[int, ...], batch_size: int) -> None:
    """Check samples in their order, without those of batches that are left out, and the factors of their mean."""
    schedule = LocalSchedule(batch_size, 1, None, limit_batches=2)
    some = members(sizes, (1,) * len(sizes), schedule, TensorSamples(IMAGES, LABELS))
    found = []
    for changes_batches in (True, False):
        module: Any = SimpleNamespace(
            transfer=lambda batch, resident: prepare(batch), hooks=SimpleNamespace(changes_batches=changes_batches)
        )
        module.fabric = SimpleNamespace(device=torch.device("cpu"))
        found.append(list(whole_pass(module, some, schedule)))
    for one, other in zip(*found, strict=True):
        assert (one.rows, one.size, one.batch_index, one.factors) == (
            other.rows,
            other.size,
            other.batch_index,
            other.factors,
        )
        assert all(torch.equal(x, y) for x, y in zip(one.leaves, other.leaves, strict=True))
    assert sum(group.size * len(group.rows) for group in found[1]) == sum(min(n, 2 * batch_size) for n in sizes)
    assert not list(whole_pass(module, [replace(m, work=replace(m.work, batches_per_epoch=0)) for m in some], schedule))


def test_a_gather_reads_no_more_than_the_clients_have_or_the_bound_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    gather = TensorSelection.gather
    monkeypatch.setattr(
        TensorSelection,
        "gather",
        lambda self, positions=None, *rest: rows.append(len(positions)) or gather(self, positions, *rest),
    )
    schedule, data = LocalSchedule(2, None, 12), TensorSamples(torch.rand(20, 3), torch.rand(20, 2))
    some = members((12, 6), (12, 12), schedule, data)
    for most_bytes, largest in ((2**30, 18), (8 * 20, 8), (1, 4)):
        rows.clear()
        batches = of_kind(some, schedule, True, most_bytes)
        for _ in range(12):
            batches.advance(2)
        assert max(rows) <= largest
        assert sum(rows) == 12 * 2 * 2
        assert len(rows) == -(-48 // (largest // 4 * 4))


@given(st.integers(1, 20), st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_a_schedule_knows_the_last_batch_of_each_step(
    num_samples: int, batch_size: int, accumulate: int, repeat: int, full_batch: bool
) -> None:
    schedule = LocalSchedule(batch_size, 3, None, accumulate=accumulate, repeat=repeat, full_batch=full_batch)
    work = schedule.work(TensorSamples(IMAGES, LABELS).select(np.arange(num_samples)), (0, 0), True)
    in_pass = work.batches_per_epoch
    for batch in islice(local_batches(work, schedule, prepare), 3 * in_pass * repeat):
        assert batch.ends_step == schedule.ends_step(batch.batch_index, in_pass)


@pytest.mark.parametrize(
    ("options", "changes_batches", "repeat"),
    [({"augment": crop_and_flip}, False, 1), ({}, True, 1), ({}, False, 2)],
    ids=["augmented", "hooks", "repeated"],
)
def test_clients_read_by_themselves_what_differs_from_batch_to_batch(
    options: dict[str, Any], changes_batches: bool, repeat: int
) -> None:
    schedule = LocalSchedule(2, None, 2, repeat=repeat)
    some = members((4, 4), (2, 2), schedule, TensorSamples(torch.rand(8, 3, 4, 4), LABELS[:8], **options))
    module: Any = SimpleNamespace(transfer=prepare, hooks=SimpleNamespace(changes_batches=changes_batches))
    assert isinstance(stack_batches(module, some, schedule), SeparateBatches)


def test_batches_that_are_read_again_are_those_that_were_read() -> None:
    """Check that what a module changes in place is not seen when the gradient at the received model is computed."""
    schedule = LocalSchedule(2, None, 1)
    batches = of_kind(members((4,), (1,), schedule, TensorSamples(IMAGES, LABELS)), schedule, True)
    batches.advance(1)
    before = [leaf.clone() for group in batches.groups() for leaf in group.leaves]
    for group in batches.groups(keep=True):
        for leaf in group.leaves:
            leaf.zero_()
    assert all(torch.equal(x, y) for x, y in zip(before, [x for g in batches.groups() for x in g.leaves], strict=True))

"""Test that trainings beside the federation's leave no trace in what a module keeps, whatever object keeps it."""

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer
from torch import Tensor, nn
from torchmetrics import MeanMetric
from toys import Perceptron, Served

from lightning_fl.algorithms import APFL, SCAFFOLD, DeviceM, Ditto, FedAvg, FedDU, PFedMe
from lightning_fl.callbacks import ClientEvaluation
from lightning_fl.checks import evaluation_mode
from lightning_fl.checks.evaluation_mode import keeping_attributes
from lightning_fl.checks.own_objects import own_objects
from lightning_fl.errors import UserError
from lightning_fl.flat_module.plain_attributes import RestorableAttributes


class AverageMeter:
    """The class of countless repositories."""

    def __init__(self) -> None:
        self.total, self.count, self.values = 0.0, 0, []

    def update(self, value: Any, count: int) -> None:
        self.total += value * count
        self.count += count
        self.values.append(value)


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


@dataclass(frozen=True)
class Frozen:
    counts: dict[str, int]


class Sums(dict[str, float]):
    def update(self, *_: Any) -> None:  # type: ignore[override]
        raise NotImplementedError


class Counted(Perceptron):
    """Counts the samples of its training in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.losses, self.recent, self.counter = 0, [], deque(maxlen=3), Counter(seen=0)
        self.tensor, self.tensors, self.array = torch.zeros(()), {"seen": torch.zeros(())}, np.zeros(1)
        self.meter, self.meters, self.nested = AverageMeter(), [AverageMeter()], SimpleNamespace(meter=AverageMeter())
        self.slotted, self.frozen, self.sums = Slotted(), Frozen({"seen": 0}), Sums(seen=0.0)
        self.unregistered, self.unseen = {"mean": MeanMetric()}, [nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))]
        nn.init.zeros_(self.unseen[0][0].weight)
        self.generators = np.random.default_rng(0), random.Random(0), torch.Generator().manual_seed(0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        size, loss = len(batch[0]), super().training_step(batch, batch_idx)
        self.count += size
        self.losses.append(loss.detach())
        self.recent.append(loss.item())
        self.counter["seen"] += size
        self.tensor += size
        self.tensors["seen"] += size
        self.array += size
        for meter in (self.meter, *self.meters, self.nested.meter):
            meter.update(loss.item(), size)
        self.slotted.count += size
        self.frozen.counts["seen"] += size
        self.sums["seen"] += size
        self.unregistered["mean"].update(loss.detach(), size)
        self.unseen[0][0].weight.data += size
        self.unseen[0][1].num_batches_tracked = self.unseen[0][1].num_batches_tracked + size
        numpys, pythons, torchs = self.generators
        for _ in range(size):
            numpys.random(), pythons.random(), torch.rand(1, generator=torchs)
        return loss

    def seen(self) -> list[float]:
        """Return the number of samples by each count."""
        meters = (self.meter, *self.meters, self.nested.meter)
        counts = (self.count, self.counter["seen"], self.tensor, self.tensors["seen"], self.array[0])
        others = (self.slotted.count, self.frozen.counts["seen"], self.sums["seen"], self.unregistered["mean"].weight)
        hidden = (self.unseen[0][0].weight.detach(), self.unseen[0][1].num_batches_tracked)
        return [float(count) for count in (*counts, *(meter.count for meter in meters), *others, *hidden)]

    def drawn(self) -> list[float]:
        numpys, pythons, torchs = self.generators
        return [numpys.random(), pythons.random(), torch.rand(1, generator=torchs).item()]


def drawn_after(count: int) -> list[float]:
    """Return what the generators of the module draw after so many samples."""
    module = Counted()
    for _ in range(count):
        module.drawn()
    return module.drawn()


METHODS: dict[str, Callable[[], Any]] = {
    "FedAvg": FedAvg,
    "Ditto": Ditto,
    "APFL": APFL,
    "PFedMe": lambda: PFedMe(strength=1.0, inner_steps=1),
    "SCAFFOLD": SCAFFOLD,
    "Mime": lambda: DeviceM(variant="mime"),
    "FedDU": FedDU,
}


@pytest.mark.trains
@pytest.mark.parametrize("tuned", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_only_the_federations_own_steps_count(method: str, tuned: bool, make_trainer: MakeTrainer) -> None:
    module = Counted()
    callbacks = [ClientEvaluation(1, finetune_epochs=1, finetune_lr=0.1, file=False)] if tuned else []
    trainer = make_trainer(max_rounds=2, clients_per_round=6, runner="serial", callbacks=callbacks)
    data = Served(9)
    data.val_fraction = 0.3 if tuned else 0.0
    trainer.fit(module, data, METHODS[method]())
    samples, steps = 2 * int(data.client_sizes.sum()), 2 * sum(-(-int(size) // 4) for size in data.client_sizes)
    assert set(module.seen()) == {samples}
    assert len(module.losses) == len(module.meter.values) == steps
    assert len(module.recent) == 3
    assert module.drawn() == drawn_after(samples)


@pytest.mark.trains
def test_stacks_name_what_an_object_counts(make_trainer: MakeTrainer) -> None:
    class Metered(Perceptron):
        def __init__(self) -> None:
            super().__init__()
            self.meters = {"seen": AverageMeter()}

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.meters["seen"].count += len(batch[0])
            return super().training_step(batch, batch_idx)

    module = Metered()
    with pytest.raises(UserError, match=r"training_step changes .meters\['seen'\].count. of the module"):
        make_trainer(runner="stacked").fit(module, Served(9))
    assert module.meters["seen"].count == 0


def test_objects_are_the_same_and_have_the_same_content() -> None:
    module = Counted()
    meter, values, tensor = module.meter, module.meter.values, module.tensors["seen"]
    with keeping_attributes([module]):
        module.training_step((torch.zeros(4, 3), torch.zeros(4, 2)), 0)
        assert set(module.seen()) == {4}
        module.meter.new, module.extra = 1, AverageMeter()
        del module.meter.total
        module.slotted.count = -1
    assert set(module.seen()) == {0}
    assert module.meter is meter
    assert vars(meter) == {"total": 0.0, "count": 0, "values": []}
    assert meter.values is values
    assert module.tensors["seen"] is tensor
    assert not hasattr(module, "extra")


def test_changes_of_objects_are_named_and_restored() -> None:
    module = Counted()
    before = RestorableAttributes(module)
    assert before.changed() == []
    module.meters[0].count, module.nested.meter.total, module.slotted.count = 1, 2.0, 3
    module.meter.new = 4
    module.unseen[0][0].weight.data += 5
    assert before.restore() == ["meter.new", "meters[0].count", "nested.meter.total", "slotted.count", "unseen[0]"]
    assert set(module.seen()) == {0}
    assert not hasattr(module.meter, "new")


def test_a_large_tensor_that_changes_in_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation_mode, "MOST_COPIED", 10)
    module = nn.Module()
    module.table = torch.zeros(11)
    with keeping_attributes([module]):
        module.table.sum()
    with (
        pytest.raises(UserError, match=r"'table' of the module, a tensor of 11 numbers, changes in place"),
        keeping_attributes([module]),
    ):
        module.table += 1
    network = nn.Linear(11, 1)
    bias, module.hidden = network.bias.detach().clone(), SimpleNamespace(network=network)
    with pytest.raises(UserError, match=r"module in 'hidden.network'.*, changes in a"), keeping_attributes([module]):
        nn.utils.vector_to_parameters(torch.full((12,), 9.0), network.parameters())
    assert torch.equal(network.bias, bias)  # which fits


def test_parameters_and_objects_of_libraries_are_left_alone() -> None:
    module = Perceptron()
    module.all_parameters, module.every = list(module.parameters()), {"tensors": [*module.buffers()]}
    module.data = torch.utils.data.TensorDataset(torch.zeros(3))
    module.itself, module.layers = [module], [[*module.children()]]
    found = own_objects(vars(module).items(), module.modules())
    assert found == {}
    parameters = list(module.all_parameters)
    with keeping_attributes([module]):
        assert all(one is other for one, other in zip(module.all_parameters, parameters, strict=True))

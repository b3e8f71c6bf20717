"""Test what a run says of attributes that training changes and no message carries, and that trials of stacks restore them."""

import math
from typing import Any

import pytest
import torch
from compared_runs import MakeTrainer
from torch import Tensor, nn
from torch.nn.utils import prune
from toys import Perceptron, federation, vector

from lightning_fl.algorithms import FedAvg
from lightning_fl.clients import choose_runner
from lightning_fl.clients.choose_runner import describe_runner
from lightning_fl.errors import UserError
from lightning_fl.flat_module.plain_attributes import RestorableAttributes


class Keeping(Perceptron):
    """Module that keeps what its training sees."""

    def __init__(self, *kept: str) -> None:
        super().__init__()
        self.kept = kept
        self.count, self.total, self.losses, self.last = 0, torch.zeros(()), [], {"size": 0}
        self.cache, self.best, self.unseen = None, math.nan, [nn.Linear(1, 1)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.cache is None:  # made once: no client finds it other than the one before has left it
            self.cache = torch.ones(3)
        for name in self.kept:
            getattr(self, f"keep_{name}")(batch)
        return super().training_step(batch, batch_idx)

    def keep_count(self, batch: Any) -> None:
        self.count += 1

    def keep_total(self, batch: Any) -> None:
        self.total += 1

    def keep_losses(self, batch: Any) -> None:
        self.losses.append(self.loss(batch).detach())

    def keep_last(self, batch: Any) -> None:
        self.last["size"] = len(batch[0])

    def keep_unseen(self, batch: Any) -> None:
        self.unseen[0].weight.data += 1


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr("lightning_fl.flat_module.plain_attributes.rank_zero_info", lines.append)
    return lines


@pytest.mark.trains
@pytest.mark.parametrize(
    ("kept", "names"),
    [
        (("count",), "'count'"),
        (("total",), "'total'"),
        (("losses",), "'losses'"),
        (("last",), "'last'"),
        (("unseen",), "'unseen[0]'"),
        (("losses", "count"), "'count' and 'losses'"),
    ],
)
def test_what_clients_pass_on_is_said_once(
    make_trainer: MakeTrainer, said: list[str], kept: tuple[str, ...], names: str
) -> None:
    make_trainer(max_rounds=2, runner="serial").fit(Keeping(*kept), federation())
    (line,) = said
    assert line.startswith(f"Clients pass {names} of the module on to the next client as training leaves ")


class Layered(Keeping):
    """Module with a layer before its own, and a list of all parameters."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.all_parameters = list(self.parameters())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.layer(x)[0] if isinstance(self.layer, nn.LSTM) else self.layer(x))


@pytest.mark.trains
@pytest.mark.parametrize(
    "layer",
    [
        nn.LSTM(3, 3),
        nn.BatchNorm1d(3),
        nn.Dropout(0.5),
        nn.utils.weight_norm(nn.Linear(3, 3)),
        prune.l1_unstructured(nn.Linear(3, 3), "weight", 0.5),
    ],
    ids=["lstm", "batch norm", "dropout", "weight norm", "pruned"],
)
def test_nothing_is_said_of_layers_and_parameters(make_trainer: MakeTrainer, said: list[str], layer: nn.Module) -> None:
    make_trainer(max_rounds=2, runner="serial").fit(Layered(layer), federation())
    assert said == []


@pytest.mark.trains
def test_a_single_client_passes_on_to_itself(make_trainer: MakeTrainer, said: list[str]) -> None:
    make_trainer(max_rounds=1, clients_per_round=1).fit(Keeping("count"), federation(sizes=(5,)))
    assert said == []
    make_trainer(max_rounds=2, clients_per_round=1).fit(Keeping("count"), federation(sizes=(5,)))
    assert len(said) == 1


@pytest.mark.trains
@pytest.mark.parametrize("name", ["count", "total", "losses"])
def test_trials_of_stacks_restore_attributes(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Check that `auto` trains as `serial` does, and leaves the same attribute, and that `stacked` names it."""
    monkeypatch.setattr(choose_runner, "LEAST_CLIENTS_ON_CPU", 1)
    ends = []
    for runner in ("serial", "auto"):
        torch.manual_seed(0)
        module, trainer = Keeping(name), make_trainer(max_rounds=2, runner=runner)
        trainer.fit(module, federation(), FedAvg())
        assert describe_runner(trainer.fit_loop.engine.runner)["wanted"] == "serial"
        value = getattr(module, name)
        ends.append((vector(module).tolist(), len(value) if isinstance(value, list) else float(value)))
    assert ends[0] == ends[1]
    with pytest.raises(UserError, match=f"'{name}' of the module"):
        make_trainer(runner="stacked").fit(Keeping(name), federation())


def test_attributes_are_restored_in_place() -> None:
    module = Keeping()
    before = RestorableAttributes(module)
    assert before.changed() == []
    total = module.total
    module.total += 3
    module.count, module.new = 2, "text"
    module.last["size"] = 7
    del module.best
    assert before.restore() == ["best", "count", "last", "new", "total"]
    assert (module.total is total, float(total), module.count, module.last) == (True, 0, 0, {"size": 0})
    assert math.isnan(module.best)
    assert not hasattr(module, "new")

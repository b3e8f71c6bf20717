"""Test modules whose parameters get other storage in `forward`, as cuDNN gives it to recurrent layers on a GPU."""

import copy
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from compared_runs import MakeTrainer
from roster import ROSTER
from torch import Tensor, nn
from toys import Perceptron, federation

from lightning_fl import UserError
from lightning_fl.algorithms import SCAFFOLD, Algorithm, FedAvg, FedDF, FedProx
from lightning_fl.data import Arrays
from lightning_fl.flat_module.flat_module import FlatModule


class Wandering(Perceptron):
    """Perceptron that gives its weights other storage in every call, also in training."""

    def forward(self, x: Tensor) -> Tensor:
        for parameter in self.parameters():
            parameter.data = parameter.data.clone()
        return super().forward(x)


@pytest.mark.parametrize("name", ["FedAvg", "FedDUM", "SCAFFOLD", "PFedMe", "FedDF", "FedKT", "APFL", "EfficientAdam"])
def test_parameters_that_move_train_as_others_do(name: str, make_trainer: MakeTrainer) -> None:
    entry, ends = ROSTER[name], []
    start = Perceptron()
    for cls in (Perceptron, Wandering):
        module = cls()
        module.load_state_dict(start.state_dict())
        make_trainer(max_rounds=2, local_epochs=2, runner="serial").fit(module, entry.federation(), entry.algorithm())
        ends.append(module.state_dict())
    for parameter, value in ends[0].items():
        assert torch.equal(value, ends[1][parameter]), parameter


def momentum(module: L.LightningModule) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def adam(module: L.LightningModule) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=0.01)


@pytest.mark.parametrize("configure", [momentum, adam])
def test_every_optimiser_steps_parameters_that_move(configure: Any, make_trainer: MakeTrainer) -> None:
    ends, start = [], Perceptron()
    for cls in (Perceptron, Wandering):
        module = cls(configure=configure)
        module.load_state_dict(start.state_dict())
        make_trainer(local_epochs=2).fit(module, federation(), FedProx(mu=0.1))
        ends.append(module.state_dict())
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def test_a_stack_trains_parameters_that_move_or_refuses_them(make_trainer: MakeTrainer) -> None:
    ends, start = [], Perceptron()
    for cls in (Perceptron, Wandering):
        module = cls()
        module.load_state_dict(start.state_dict())
        try:
            make_trainer(runner="stacked").fit(module, federation())
        except UserError as error:
            assert cls is Wandering
            assert "runner 'stacked' cannot train Wandering" in str(error)  # noqa: PT017
            return
        ends.append(module.state_dict())
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


class Recurrent(L.LightningModule):
    """Recurrent layer whose `forward` compacts its weights, as many published modules do."""

    def __init__(self, layer: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.recurrent, self.head = layer(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.recurrent.flatten_parameters()
        return self.head(self.recurrent(x)[0][:, -1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch[0])
        self.log("val/loss", nn.functional.cross_entropy(logits, batch[1]))
        self.log("val/accuracy", (logits.argmax(1) == batch[1]).double().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def sequences() -> Arrays:
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(60, 5, 3, generator=generator), torch.randint(0, 2, (60,), generator=generator)
    return Arrays(train=(x, y), test=(x[:10], y[:10]), num_clients=4, batch_size=5, server_fraction=0.2)


def flatten_as_cuda_does(layer: nn.RNNBase) -> None:
    """Give all weights of a layer one new storage."""
    weights = layer._flat_weights
    compact = torch.cat([weight.detach().flatten() for weight in weights])
    for weight, part in zip(weights, compact.split([weight.numel() for weight in weights]), strict=True):
        weight.data = part.view(weight.shape)


@pytest.mark.parametrize(
    ("algorithm", "layer"),
    [
        (FedAvg(), nn.GRU),
        (SCAFFOLD(), nn.LSTM),
        (FedDF(max_steps=3, batch_size=8), nn.LSTM),
        (Algorithm(personal=["head.weight", "recurrent.weight_ih_l0"]), nn.LSTM),
    ],
    ids=["FedAvg", "SCAFFOLD", "FedDF", "personal"],
)
def test_recurrent_layers_train_as_on_a_cpu(
    algorithm: Algorithm, layer: Any, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends, losses, start = [], [], Recurrent(layer)
    for moves in (False, True):
        module = Recurrent(layer)
        module.load_state_dict(start.state_dict())
        with monkeypatch.context() as patched:
            if moves:
                patched.setattr(nn.RNNBase, "flatten_parameters", flatten_as_cuda_does)
            trainer = make_trainer(runner="serial")
            trainer.fit(module, sequences(), copy.deepcopy(algorithm))
        ends.append(module.state_dict())
        losses.append(float(trainer.callback_metrics["train/loss"]))
    assert losses[0] == losses[1]
    assert not torch.equal(start.recurrent.weight_hh_l0, ends[0]["recurrent.weight_hh_l0"])
    for name, value in ends[0].items():
        assert torch.equal(value, ends[1][name]), name


def test_recurrent_layers_get_their_own_method_back(make_trainer: MakeTrainer) -> None:
    module, inside = Recurrent(), []
    load = FlatModule.load

    def watched(flat_module: FlatModule, *model: Any) -> None:
        inside.append("flatten_parameters" in vars(module.recurrent))
        load(flat_module, *model)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(FlatModule, "load", watched)
        make_trainer(max_rounds=1).fit(module, sequences())
    assert all(inside)
    assert "flatten_parameters" not in vars(module.recurrent)

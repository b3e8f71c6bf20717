"""Test that convolutions are computed with their channels innermost where no code of the user's sees it, and nowhere else."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compared_runs import RUNNERS, MakeTrainer
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from toys import vector

from lightning_fl.algorithms import FedAvg, FedDU
from lightning_fl.data import Arrays
from lightning_fl.errors import UserError
from lightning_fl.flat_module.convolution_chains import ConvolutionChains
from lightning_fl.trainer.memory_format import prefers_channels_last


class Flat(nn.Module):
    """The layer by which many networks flatten, which needs contiguous images."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.size(0), -1)


class Classifier(LightningModule):
    """Two convolutions, which every form below reads in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 5, 2), nn.Tanh())
        self.last = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.flatten(self.features(x), 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx))
        self.log("val/accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class ViewsAfterConvolutions(Classifier):
    """The classic tutorial's network."""

    def forward(self, x: Tensor) -> Tensor:
        first, relu, pool, second, tanh = self.features
        x = pool(relu(first(x)))
        assert x.view(x.size(0), -1).shape[1] == 16
        return self.last(tanh(second(x)).view(x.size(0), -1))


class ViewsASequence(Classifier):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.features(x).view(x.size(0), -1))


class FlattensInASequence(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.features.append(Flat())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.features(x))


class Nested(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(self.features[:3], nn.Sequential(*self.features[3:], Flat()))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.features(x))


class ViewsBatches(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0 * batch[0].view(len(batch[0]), -1).sum()


class ViewsParameters(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        penalty = sum(parameter.view(-1).square().sum() for parameter in self.parameters())
        return super().training_step(batch, batch_idx) + 0.01 * penalty


class ViewsGradients(Classifier):
    def on_after_backward(self) -> None:
        norms = [parameter.grad.view(-1).norm() for parameter in self.parameters() if parameter.grad is not None]
        assert len(norms) == 6

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.on_after_backward()


class StandardisesWeights(Classifier):
    def forward(self, x: Tensor) -> Tensor:
        first: Any = self.features[0]
        rows = first.weight.view(len(first.weight), -1)
        weight = ((rows - rows.mean(1, keepdim=True)) / rows.std(1, keepdim=True)).view_as(first.weight)
        x = nn.functional.conv2d(x, weight, first.bias)
        return self.last(self.features[1:](x).view(len(x), -1))


class HooksALayer(Classifier):
    """Reads the maps of a layer inside the chain."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        with self.features[1].register_forward_hook(lambda layer, x, y: self.norms.append(y.view(len(y), -1).norm())):
            logits = super().forward(x)
        return logits + 0 * self.norms.pop()


class HooksATensor(Classifier):
    def forward(self, x: Tensor) -> Tensor:
        maps = self.features(x)
        if maps.requires_grad:
            maps.register_hook(lambda gradient: gradient.view(len(gradient), -1).view_as(gradient))
        return self.last(maps.view(len(maps), -1))


FORMS = (
    ViewsAfterConvolutions,
    ViewsASequence,
    FlattensInASequence,
    Nested,
    ViewsBatches,
    ViewsParameters,
    ViewsGradients,
    StandardisesWeights,
    HooksALayer,
    HooksATensor,
)


def images(num_clients: int = 3) -> Arrays:
    generator = torch.Generator().manual_seed(1)
    x, labels = torch.randn(48, 3, 6, 6, generator=generator), torch.arange(48) % 4
    return Arrays(
        train=(x, labels), test=(x[:9], labels[:9]), num_clients=num_clients, batch_size=5, server_fraction=0.2
    )


@pytest.fixture
def formats(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """List that gets for every convolution of images True if it reads their channels innermost."""
    seen: list[bool] = []
    plain = nn.Conv2d.forward

    def forward(self: nn.Conv2d, x: Tensor) -> Tensor:
        seen.append(x.stride(1) == 1)
        return plain(self, x)

    monkeypatch.setattr(nn.Conv2d, "forward", forward)
    return seen


@pytest.mark.trains
@pytest.mark.parametrize("method", [FedAvg, FedDU])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_code_sees_the_layout_of_lightning(
    form: type[Classifier], method: Callable[[], Any], make_trainer: MakeTrainer
) -> None:
    """Also in the server's training, validation, test and prediction."""
    torch.manual_seed(0)
    start, trained = form(), []
    assert prefers_channels_last(start, torch.device("cpu"))
    for channels_last in (None, False):
        module = copy.deepcopy(start)
        trainer = make_trainer(max_rounds=2, channels_last=channels_last, metric="val/accuracy", num_sanity_val_steps=1)
        trainer.fit(module, images(), method())
        trainer.predict(module, images())
        trained.append(vector(module))
    assert abs(trained[0] - vector(start)).max() > 1e-3
    assert abs(trained[0] - trained[1]).max() < 1e-5


@pytest.mark.trains
@RUNNERS
@pytest.mark.parametrize("form", [ViewsASequence, FlattensInASequence, Nested, ViewsBatches, ViewsParameters])
def test_both_runners_train_the_same(form: type[Classifier], runner: Any, make_trainer: MakeTrainer) -> None:
    torch.manual_seed(0)
    start = form()
    trained = []
    for flags in ({"runner": runner}, {"runner": "serial", "channels_last": False}):
        module = copy.deepcopy(start)
        make_trainer(max_rounds=2, **flags).fit(module, images())
        trained.append(vector(module))
    assert abs(trained[0] - trained[1]).max() < 1e-5


@pytest.mark.trains
def test_the_flag_decides(make_trainer: MakeTrainer, formats: list[bool]) -> None:
    def innermost(module: Classifier, **flags: Any) -> bool:
        formats.clear()
        make_trainer(max_rounds=1, runner="serial", **flags).fit(module, images())
        return any(formats)

    class Wide(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(nn.Conv2d(3, 65, 3), nn.ReLU(), nn.Conv2d(65, 5, 4))

    assert innermost(Classifier())
    assert not innermost(Classifier(), channels_last=False)
    assert not innermost(Wide())
    assert innermost(Wide(), channels_last=True)
    with pytest.raises(UserError, match="channels_last 'yes' is unknown"):
        make_trainer(channels_last="yes")


@pytest.mark.parametrize("channels", [1, 3])
def test_a_chain_has_the_gradients_of_its_layers(channels: int, formats: list[bool]) -> None:
    """With one channel, which torch takes for both formats, too."""
    chain = nn.Sequential(nn.Conv2d(channels, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 5, 2), nn.Tanh()).double()
    x = torch.randn(6, channels, 8, 8, dtype=torch.double)
    plain = chain(x)
    expected = torch.autograd.grad(plain.square().sum(), list(chain.parameters()))
    formats.clear()
    with ConvolutionChains(chain):
        result = chain(x)
    assert formats == [True, True]
    assert result.is_contiguous()
    torch.testing.assert_close(result, plain, rtol=0, atol=1e-12)
    for ours, theirs in zip(
        torch.autograd.grad(result.square().sum(), list(chain.parameters())), expected, strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_dropout_draws_the_mask_of_torch() -> None:
    sequence = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Dropout(0.5), nn.ReLU(), nn.Conv2d(4, 4, 2), nn.Dropout2d(0.5)
    ).double()
    x = torch.randn(5, 3, 8, 8, dtype=torch.double)
    torch.manual_seed(3)
    expected = sequence(x)
    torch.manual_seed(3)
    with ConvolutionChains(sequence):
        torch.testing.assert_close(sequence(x), expected, rtol=0, atol=1e-12)


def test_a_layer_that_returns_others_than_images_ends_a_chain() -> None:
    sequence = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2, return_indices=True))
    x = torch.randn(5, 3, 8, 8)
    pooled, indices = sequence(x)
    with ConvolutionChains(sequence):
        again, indices_again = sequence(x)
    torch.testing.assert_close(again, pooled)
    assert torch.equal(indices, indices_again)
    assert again.is_contiguous()
    assert indices_again.is_contiguous()


def test_what_the_user_has_laid_out_innermost_stays_so() -> None:
    sequence = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    x = torch.randn(5, 3, 8, 8).to(memory_format=torch.channels_last)
    with ConvolutionChains(sequence):
        assert sequence(x).stride() == sequence(x.clone()).stride()
        assert sequence(x).is_contiguous(memory_format=torch.channels_last)


def test_a_module_is_as_before_after_an_error() -> None:
    sequence = nn.Sequential(nn.Conv2d(3, 4, 3))
    chains = ConvolutionChains(sequence)
    with pytest.raises(RuntimeError, match="expected input"), chains:
        sequence(torch.randn(5, 2, 8, 8))
    assert "forward" not in vars(sequence)

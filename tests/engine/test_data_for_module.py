"""Test that labels and images which a module cannot compute with are named before training, and its own errors by client."""

import warnings
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from compared_runs import MakeTrainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fl.algorithms import Ditto, FedDUS
from lightning_fl.data import Arrays, Federated, FederatedDataModule, TensorSamples
from lightning_fl.errors import UserError
from lightning_fl.modules import ImageClassifier

X, Y = torch.rand(40, 1, 8, 8), torch.arange(40) % 4
STRAY = torch.where(torch.arange(40) == 17, 77, Y)


def classifier() -> ImageClassifier:
    return ImageClassifier("linear", num_classes=4, in_channels=1, image_size=8)


class Loaders(L.LightningDataModule):
    def __init__(self, train: Tensor = Y, test: Tensor = Y) -> None:
        super().__init__()
        self.parts = TensorDataset(X, train), TensorDataset(X, test)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.parts[0], batch_size=5, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.parts[1], batch_size=5)

    test_dataloader = val_dataloader


class WithoutClasses(FederatedDataModule):
    """Data whose number of classes is unknown, although their labels are not."""

    def __init__(self, train: Tensor, test: Tensor) -> None:
        super().__init__(num_clients=8)
        self.parts = train, test

    def load(self) -> tuple[TensorSamples, TensorSamples]:
        train, test = (TensorSamples(X, labels) for labels in self.parts)
        return train, test


@pytest.mark.filterwarnings("ignore:.*largest label is 77", "ignore:.*label that no training sample has")
@pytest.mark.parametrize("where", ["train", "test"])
@pytest.mark.parametrize("kind", ["arrays", "arrays with classes", "federated", "federated with classes", "own"])
def test_one_label_out_of_range_is_refused_before_training(kind: str, where: str, make_trainer: MakeTrainer) -> None:
    train, test = (STRAY, Y) if where == "train" else (Y, STRAY)
    classes = {"num_classes": 4} if "classes" in kind else {}
    if kind == "own":
        data: FederatedDataModule = WithoutClasses(train, test)
    elif kind.startswith("arrays"):
        data = Arrays(train=(X, train), test=(X, test), num_clients=8, **classes)
    else:
        data = Federated(Loaders(train, test), num_clients=8, **classes)
    trained = classifier()
    before = [parameter.clone() for parameter in trained.parameters()]
    with pytest.raises(UserError, match=r"77|has 78: give it num_classes=78"):
        make_trainer(clients_per_round=1).fit(trained, data)
    assert all(torch.equal(one, two) for one, two in zip(trained.parameters(), before, strict=True))


def test_a_label_out_of_range_is_refused_in_a_test(make_trainer: MakeTrainer) -> None:
    with pytest.raises(
        UserError, match=r"1 of 40 labels of the test samples are none of the 4 classes .* 77, of sample 17"
    ):
        make_trainer().test(classifier(), Federated(Loaders(test=STRAY), num_clients=8))


class Own(L.LightningModule):
    """A user's module with four outputs."""

    num_classes = 4

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.layer(batch[0].flatten(1)), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/accuracy", self.training_step(batch, batch_idx).detach().clamp(max=1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore:.*largest label is 77", "ignore:.*label that no training sample has")
@pytest.mark.parametrize("runner", ["serial", "stacked"])
def test_an_error_in_a_client_s_step_names_the_client(runner: str, make_trainer: MakeTrainer) -> None:
    """Test wrong shapes in the batches of one client."""

    class Failing(Own):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            narrow = self.trainer.current_epoch == 1
            return F.cross_entropy(self.layer(batch[0].flatten(1)[:, 1:] if narrow else batch[0].flatten(1)), batch[1])

    data = Arrays(train=(X, Y), test=(X, Y), num_clients=1, batch_size=5)
    with pytest.raises(RuntimeError) as caught:
        make_trainer(clients_per_round=1, runner=runner).fit(Failing(), data)
    said = _said(caught.value)
    assert "Client 0 was training in round 1." in said or "Clients 0 were training at once in round 1." in said
    assert ("trainer.runner serial trains one client after the other" in said) == (runner == "stacked")
    assert "training_step read batch 0: float32 (5, 1, 8, 8), int64 (5,)." in said


def _said(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def test_the_server_s_and_a_second_model_s_training_are_named(make_trainer: MakeTrainer) -> None:
    class Counting(Own):
        """Fail after `most` calls of the step in one round."""

        calls, most = 0, 0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.calls += 1
            if self.calls > self.most:
                raise IndexError("Target 77 is out of bounds.")
            return super().training_step(batch, batch_idx)

    for algorithm, most, expected in (
        (FedDUS(), 4, "The server was training in round 0."),
        (Ditto(), 8, "Client 0 was training its own model in round 0."),
    ):
        held = {"client_fraction": 0.5, "server_fraction": 1.0 - 1e-9} if most == 4 else {}
        data = Arrays(train=(X, Y), test=(X, Y), num_clients=1, batch_size=5, **held)
        module = Counting()
        module.most = most
        with pytest.raises(IndexError) as caught:
            make_trainer(clients_per_round=1, runner="serial").fit(module, data, algorithm=algorithm)
        assert expected in _said(caught.value)


def test_an_error_in_validation_names_the_batch(make_trainer: MakeTrainer) -> None:
    class Unnumbered(Own):
        num_classes = None  # type: ignore[assignment]

    with pytest.raises(IndexError) as caught:
        make_trainer(clients_per_round=1).fit(Unnumbered(), Federated(Loaders(test=STRAY), num_clients=8))
    assert "validation_step read batch 3: float32 (5, 1, 8, 8), int64 (5,)." in _said(caught.value)


@pytest.mark.filterwarnings("ignore:.*largest label is 77")
def test_a_user_s_module_with_classes_is_warned(make_trainer: MakeTrainer) -> None:

    class Forgiving(Own):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/accuracy", 0.5, batch_size=5)

    trainer = make_trainer(max_rounds=1, clients_per_round=1)
    with pytest.warns(
        UserWarning, match="1 of 40 labels of the validation samples are none of the 4 classes of Forgiving"
    ):
        trainer.fit(Forgiving(), Federated(Loaders(test=STRAY), num_clients=8))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer.fit(Own(), Federated(Loaders(), num_clients=8))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.complex64, torch.int64])
def test_images_of_another_dtype_than_the_classifier_s_are_refused(
    dtype: torch.dtype, make_trainer: MakeTrainer
) -> None:
    x = X.to(dtype)
    data = Arrays(train=(x, Y), test=(x, Y), num_clients=8)
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(
        UserError, match=f"images of Arrays are {name}, but ImageClassifier computes in float32: convert"
    ):
        make_trainer().fit(classifier(), data)
    if dtype == torch.float64:
        make_trainer(max_rounds=1, precision="64-true").fit(classifier(), data)


def test_a_network_of_the_user_s_may_read_any_dtype(make_trainer: MakeTrainer) -> None:
    network = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(8, 4))
    tokens = torch.arange(80).view(40, 2) % 10
    data = Arrays(train=(tokens, Y), test=(tokens, Y), num_clients=4)
    make_trainer(max_rounds=1).fit(ImageClassifier(network, num_classes=4), data)


def test_both_parts_have_one_dtype() -> None:
    with pytest.raises(
        UserError, match="train has the types float32, int64, but test has float64, int64: make them equal"
    ):
        Arrays(train=(X, Y), test=(X.double(), Y), num_clients=2).setup()


@pytest.mark.skipif(torch.cuda.is_available() or torch.backends.mps.is_available(), reason="has a GPU")
@pytest.mark.parametrize("accelerator", ["gpu", "cuda", "mps"])
def test_a_missing_accelerator_names_the_cpu(accelerator: str, make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match=f"accelerator '{accelerator}' finds no device .*: set accelerator cpu"):
        make_trainer(accelerator=accelerator)

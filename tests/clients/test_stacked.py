"""Test clients trained at once: the same result as one after the other, and an error for modules that cannot be stacked."""

import copy
import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer, assert_same, fits, resumed_like_whole
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.callbacks import TQDMProgressBar
from roster import ROSTER
from torch import Tensor, nn
from toys import Convolved, Measuring, Perceptron, Remembering, Statistics, Tied, federation, samples, vector

from lightning_fl import FederatedTrainer
from lightning_fl.algorithms import DeviceM, FedAvg, FedProx
from lightning_fl.data import Digits, Dirichlet, Federated
from lightning_fl.errors import UserError
from lightning_fl.modules import ImageClassifier

stacked_module = importlib.import_module("lightning_fl.clients.stacked")  # the package has a function of that name
choose_runner = importlib.import_module("lightning_fl.clients.choose_runner")
describe_runner = choose_runner.describe_runner


@pytest.mark.parametrize("name", [name for name, entry in ROSTER.items() if "stacked" in entry.runners])
@pytest.mark.sampled(6)
def test_every_algorithm_gives_the_same_answer(name: str, make_trainer: MakeTrainer) -> None:
    """Test stacks of three and two clients with unequal steps, drop-outs and stragglers."""
    flags = {
        "local_epochs": 2,
        "clients_at_once": 3,
        "clients_per_round": 5,
        "dropout_rate": 0.2,
        "straggler_rate": 0.3,
    }
    assert_same(fits(make_trainer, Perceptron(), ROSTER[name].federation, ROSTER[name].algorithm(), **flags), 1e-5)


@pytest.mark.parametrize("algorithm", [FedAvg(), FedProx(mu=0.5), DeviceM(local_beta=0.5)], ids=lambda a: a.name)
@pytest.mark.parametrize(
    "flags",
    [
        {"local_epochs": 2},
        {"local_steps": 5},
        {"local_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.3},
        {"local_epochs": 2, "limit_train_batches": 2, "gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    ],
    ids=lambda flags: " ".join(flags),
)
def test_every_plan_gives_the_same_answer(algorithm: Any, flags: dict[str, Any], make_trainer: MakeTrainer) -> None:
    assert_same(fits(make_trainer, Perceptron(), federation, algorithm, **flags), 1e-6)


def params_of(module: Any) -> Any:
    return module.parameters()


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "momentum": lambda m: torch.optim.SGD(params_of(m), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda m: torch.optim.Adam(params_of(m), lr=0.05, amsgrad=True),
    "AdamW": lambda m: torch.optim.AdamW(params_of(m), lr=0.05),
    "NAdam": lambda m: torch.optim.NAdam(params_of(m), lr=0.05),
    "RAdam": lambda m: torch.optim.RAdam(params_of(m), lr=0.05),
    "Adamax": lambda m: torch.optim.Adamax(params_of(m), lr=0.05),
    "RMSprop": lambda m: torch.optim.RMSprop(params_of(m), lr=0.01, momentum=0.5, centered=True),
    "Adadelta": lambda m: torch.optim.Adadelta(params_of(m), lr=1.0),
    "Rprop": lambda m: torch.optim.Rprop(params_of(m), lr=0.01),
    "ASGD": lambda m: torch.optim.ASGD(params_of(m), lr=0.05),
    "groups": lambda m: torch.optim.SGD(
        [{"params": m.output.parameters(), "lr": 0.02, "weight_decay": 0.1}, {"params": m.hidden.parameters()}],
        lr=0.1,
        momentum=0.5,
    ),
}


@pytest.mark.parametrize(
    ("algorithm", "name"),
    [*((FedAvg(), name) for name in OPTIMIZERS), (FedProx(mu=0.5), "momentum"), (FedProx(mu=0.5), "groups")],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_elementwise_optimisers_step_every_client_by_itself(
    name: str, algorithm: Any, make_trainer: MakeTrainer
) -> None:
    module = Perceptron(configure=OPTIMIZERS[name])
    assert_same(fits(make_trainer, module, federation, algorithm, local_epochs=3), 1e-5)


def stepwise(module: Any) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2)
    within = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    between = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    return [optimizer], [{"scheduler": within, "interval": "step"}, {"scheduler": between, "interval": "epoch"}]


@pytest.mark.parametrize("algorithm", [FedAvg(), DeviceM(local_beta=0.5)], ids=lambda a: a.name)
def test_schedules_inside_a_round(algorithm: Any, make_trainer: MakeTrainer) -> None:
    assert_same(
        fits(make_trainer, Perceptron(configure=stepwise), federation, algorithm, local_epochs=2, clients_per_round=6)
    )


def digits(**options: Any) -> Callable[[], Digits]:
    return lambda: Digits(**{"num_clients": 12, "image_size": 16, "batch_size": 16, **options})


class Residual(nn.Module):
    """Convolutions with batch normalisation, pooling and a shortcut, on 8 × 8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.group = nn.BatchNorm2d(4), nn.GroupNorm(2, 4)
        self.head = nn.Linear(4 * 4 * 4, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(images)))
        x = nn.functional.max_pool2d(x + self.group(self.conv(x)), 2)
        return self.head(x.flatten(1))


def test_images_batch_normalisation_and_unequal_clients(make_trainer: MakeTrainer) -> None:
    """Test Dirichlet clients, whose last batches have many sizes."""
    module = ImageClassifier(Residual(), num_classes=10, learning_rate=0.05)
    data = digits(image_size=8, partition=Dirichlet(alpha=0.5))
    flags = {"local_epochs": 1, "max_rounds": 2, "precision": "64-true", "limit_val_batches": 1}
    assert_same(fits(make_trainer, module, data, **flags), 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("network", ["cnn", "lenet5", "vgg9", "vgg11_bn", "resnet18", "resnet32"])
def test_every_kind_of_network(network: str, make_trainer: MakeTrainer) -> None:
    module = ImageClassifier(network, num_classes=10, in_channels=1, image_size=32, learning_rate=0.05)
    data = digits(image_size=32, partition=Dirichlet(alpha=0.5))
    flags = {"local_steps": 1, "max_rounds": 1, "clients_per_round": 2, "limit_val_batches": 1}
    assert_same(fits(make_trainer, module, data, precision="64-true", **flags), 1e-9)


def test_cosine_inside_a_round_asks_for_each_clients_length(make_trainer: MakeTrainer) -> None:
    module = ImageClassifier("linear", num_classes=10, in_channels=1, image_size=8, lr_schedule="cosine", lr_decay=0.9)
    data = digits(image_size=8, partition=Dirichlet(alpha=0.5))
    flags = {
        "local_epochs": 2,
        "limit_train_batches": 3,
        "limit_val_batches": 1,
        "max_rounds": 2,
        "straggler_rate": 0.4,
    }
    assert_same(fits(make_trainer, module, data, clients_per_round=5, **flags))


@pytest.mark.parametrize("module", [Statistics(True), Statistics(False), Tied()], ids=["written", "replaced", "tied"])
def test_buffers_and_tied_parameters(module: Any, make_trainer: MakeTrainer) -> None:
    assert_same(fits(make_trainer, module, federation, local_epochs=2))


class Partial(Perceptron):
    """Module with a frozen layer, a layer without gradients, and one with gradients only in the second half of the steps."""

    def __init__(self) -> None:
        super().__init__(configure=lambda m: torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.3, momentum=0.5))
        self.hidden.bias.requires_grad_(False)
        self.unused, self.late = nn.Linear(2, 2), nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        loss = self.loss(batch)
        if batch_idx >= 2:
            loss = loss + self.late(self(batch[0])).square().mean()
        self.log("late", float(batch_idx))
        self.log("largest", loss, reduce_fx="max")
        return {"loss": loss}


@pytest.mark.parametrize("algorithm", [FedAvg(), FedProx(mu=0.5)], ids=lambda a: a.name)
def test_parameters_take_part_once_they_have_a_gradient(algorithm: Any, make_trainer: MakeTrainer) -> None:
    pair = fits(make_trainer, Partial(), federation, algorithm, local_epochs=2)
    assert_same(pair)
    assert {"late", "largest"} <= set(pair[0][1].callback_metrics)


def test_clients_keep_their_states_apart(make_trainer: MakeTrainer) -> None:
    pair = fits(make_trainer, Perceptron(), federation, Remembering(), local_epochs=2, max_rounds=4)
    assert_same(pair)
    (_, serial), (_, stacked) = pair
    assert serial.run.clients.keys() == stacked.run.clients.keys()
    for client, state in serial.run.clients.items():
        for name, x in state.items():
            torch.testing.assert_close(stacked.run.clients[client][name], x, rtol=1e-5, atol=1e-6)


class Noisy(Perceptron):
    """Module that draws a dropout mask for its inputs and sums the masks in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = nn.functional.dropout(torch.ones_like(batch[0]), 0.5)
        self.seen += x.sum(0)
        return self.loss((x * batch[0], batch[1]))


def test_dropout_differs_between_clients_and_repeats_between_runs(make_trainer: MakeTrainer) -> None:
    class Watch(Callback):
        def __init__(self) -> None:
            self.seen: list[Tensor] = []

        def on_client_upload(self, trainer: Any, module: Any, client: int, place: int, total: int) -> None:
            self.seen.append(torch.tensor(place))

    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        module = Noisy()
        deltas: list[Tensor] = []
        trainer = make_trainer(max_rounds=1, clients_per_round=3, runner="stacked", local_steps=4)
        finish = stacked_module._finish

        def noted(*arguments: Any, deltas: list[Tensor] = deltas, finish: Any = finish) -> Any:
            results = finish(*arguments)
            deltas += [result.message["buffers"] for result in results]
            return results

        stacked_module._finish = noted
        try:
            trainer.fit(module, federation(sizes=(8, 8, 8)))
        finally:
            stacked_module._finish = finish
        runs.append((torch.stack(deltas[-3:]), vector(module)))
    assert len({tuple(row.tolist()) for row in runs[0][0]}) == 3, "each client must draw its own mask"
    torch.testing.assert_close(runs[0][0], runs[1][0], rtol=0, atol=0)
    np.testing.assert_array_equal(runs[0][1], runs[1][1])


class Worded(Perceptron):
    """Module for batches that are dictionaries with tensors and words."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss((batch["x"], batch["y"]))


class WordedSamples(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.x, self.y = samples(40)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "y": self.y[index], "name": f"sample {index % 2}"}


def test_batches_of_any_structure(make_trainer: MakeTrainer) -> None:
    """Check that batches that cannot be stacked (different words) are trained one by one, with the same result."""

    class Words(LightningDataModule):
        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(WordedSamples(), batch_size=4)

    assert_same(fits(make_trainer, Worded(), lambda: Federated(Words(), num_clients=5), local_epochs=2))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_reduced_precision(precision: str, make_trainer: MakeTrainer) -> None:
    assert_same(fits(make_trainer, Perceptron(), federation, precision=precision), 0.05, 0.05)


class Reads(Perceptron):
    """Module that reads a number of the batch while it trains."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        return loss if loss.item() > 0 else -loss


class Skips(Perceptron):
    """Module that skips a batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return None


class Prepares(Perceptron):
    """Module that makes an attribute when training starts."""

    def on_train_start(self) -> None:
        self.factor = torch.ones(())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.factor * self.loss(batch)


class Watches(Callback):
    """Callback that needs every client's batch."""

    def on_train_batch_end(self, *arguments: Any) -> None:
        raise AssertionError("must not be called")

    def on_before_optimizer_step(self, *arguments: Any) -> None:
        raise AssertionError("must not be called")


def adafactor(module: Any) -> Any:
    return torch.optim.Adafactor(module.parameters())


@pytest.mark.parametrize(
    ("module", "callbacks", "words"),
    [
        (Reads(), None, ["Reads", "item"]),
        (Measuring(), None, ["Measuring"]),
        (Skips(), None, ["Skips", "no loss"]),
        (Prepares(), None, ["'factor'", "tried before on_train_start", "in __init__ or setup"]),
        (
            Reads(configure=adafactor),
            Watches(),
            ["Adafactor", "on_train_batch_end", "on_before_optimizer_step", "item"],
        ),
    ],
    ids=["reads", "metric", "none", "late", "several"],
)
def test_what_stands_in_the_way_is_named_at_once(
    module: Any, callbacks: Any, words: list[str], make_trainer: MakeTrainer
) -> None:
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(UserError) as caught:
        make_trainer(runner="stacked", callbacks=callbacks).fit(module, federation())
    sentence = str(caught.value)
    assert "\n" not in sentence
    for word in ["runner 'stacked' cannot train", "serial", *words]:
        assert word in sentence, sentence
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


class Padded(Perceptron):
    """Module whose embedding leaves the row of the padding as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 3, padding_idx=0)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return super().loss((x + self.words((x[:, 0] > 0).long()), y))


def test_clients_leave_the_padding_of_an_embedding_alone(make_trainer: MakeTrainer) -> None:
    trained = {}
    for runner in ("auto", "serial"):
        torch.manual_seed(0)
        module = Padded()
        make_trainer(runner=runner, clients_per_round=6, max_rounds=3).fit(module, federation())
        assert not module.words.weight[0].any()
        assert module.words.weight[1].abs().sum() > 0
        trained[runner] = vector(module)
    np.testing.assert_allclose(trained["auto"], trained["serial"], rtol=1e-5, atol=1e-6)
    with pytest.raises(UserError, match="row of an embedding's padding_idx"):
        make_trainer(runner="stacked").fit(Padded(), federation())


class Mixing(Perceptron):
    """Module that draws a factor of its loss."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__()
        self.draw = draw

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.draw() * self.loss(batch)


@pytest.mark.parametrize("draw", [torch.rand, np.random.rand, random.random], ids=["torch", "numpy", "python"])
def test_clients_that_draw_numbers_are_not_stacked_unasked(draw: Callable[..., Any], make_trainer: MakeTrainer) -> None:
    trained = {}
    for runner in ("auto", "serial"):
        torch.manual_seed(0)
        module = Mixing(partial(draw, ()) if draw is torch.rand else draw)
        make_trainer(runner=runner, clients_per_round=12).fit(module, federation(sizes=(4,) * 12))
        trained[runner] = vector(module)
    assert np.array_equal(trained["auto"], trained["serial"])


def clear(parameter: Tensor) -> None:
    parameter.grad.zero_()  # type: ignore[union-attr]


class Hooked(Perceptron):
    """Module whose first weight has no gradient, because of a hook of this parameter."""

    def __init__(self, is_late: bool) -> None:
        super().__init__()
        if is_late:
            self.hidden.weight.register_post_accumulate_grad_hook(clear)
        else:
            self.hidden.weight.register_hook(torch.zeros_like)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("personal", [[], ["hidden"]])
def test_hooks_of_parameters_see_each_clients_gradient(
    personal: list[str], is_late: bool, make_trainer: MakeTrainer
) -> None:
    module = Hooked(is_late)
    before = copy.deepcopy(module.state_dict())
    trainer = make_trainer(runner="auto", clients_per_round=12)
    trainer.fit(module, federation(sizes=(4,) * 12), FedAvg(personal=personal))
    assert torch.equal(module.hidden.weight, before["hidden.weight"])
    assert all(state["personal"][:12].equal(module.hidden.weight.flatten()) for state in trainer.run.clients.values())
    assert not torch.equal(module.output.weight, before["output.weight"])
    with pytest.raises(UserError, match="hooks of its parameters need each client's gradient"):
        make_trainer(runner="stacked").fit(Hooked(is_late), federation(), FedAvg(personal=personal))


@dataclass
class Pair:
    """Batch that is an object of a user's class."""

    x: Tensor
    y: Tensor


class Pairs(LightningDataModule):
    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(*samples(24)),
            batch_size=4,
            collate_fn=lambda rows: Pair(*map(torch.stack, zip(*rows, strict=False))),
        )


class ReadsPairs(Perceptron):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss((batch.x, batch.y))


def test_batches_of_a_users_class_train_one_by_one(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"its batches contain a Pair, .* \(use tuples or dictionaries\)\. Fix this"):
        make_trainer(runner="stacked").fit(ReadsPairs(), Federated(Pairs(), num_clients=3))
    monkeypatch.setattr(choose_runner, "LEAST_CLIENTS_ON_CPU", 1)
    trainer = make_trainer(max_rounds=1)
    trainer.fit(ReadsPairs(), Federated(Pairs(), num_clients=3))
    assert describe_runner(trainer.fit_loop.engine.runner)["wanted"] == "serial"


class FusedAttention(Perceptron):
    """Fails as torch's fused attention does on a GPU with mapped sequences whose length it cannot align."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if torch._C._functorch.is_batchedtensor(batch[0]):
            raise RuntimeError("LSE is not correctly aligned (strideH)")
        return super().training_step(batch, batch_idx)


def test_fused_attention_that_cannot_be_mapped(make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match=r"compute it under `torch\.nn\.attention\.sdpa_kernel\(SDPBackend\.MATH\)`"):
        make_trainer(runner="stacked").fit(FusedAttention(), federation())


def test_mixed_precision_of_mapped_convolutions(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UserError, match=r"casts no mapped convolution to bfloat16; use precision 32-true or bf16-true\."
    ):
        make_trainer(runner="stacked", precision="bf16-mixed").fit(Convolved(), federation())
    make_trainer(runner="stacked", precision="bf16-true").fit(Convolved(), federation())
    monkeypatch.setattr(choose_runner, "LEAST_CLIENTS_ON_CPU", 1)
    trainer = make_trainer(max_rounds=1, precision="bf16-mixed")
    trainer.fit(Convolved(), federation())
    assert describe_runner(trainer.fit_loop.engine.runner)["wanted"] == "serial"


class Classifies(Perceptron):
    """Its last layer has no bias, so that autocast leaves its output in bfloat16."""

    def __init__(self, in_float32: bool = False) -> None:
        super().__init__()
        self.in_float32 = in_float32
        self.output = nn.Linear(4, 2, bias=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits.float() if self.in_float32 else logits, y.argmax(1))
        assert loss.dtype == torch.float32 or torch._C._functorch.is_batchedtensor(loss)
        return loss


@pytest.mark.parametrize("compiles", [False, True])
def test_mixed_precision_rounds_no_loss(
    compiles: bool, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that the loss of a stack is a float32 number, as that of a single client is, or the module is not stacked."""
    monkeypatch.setattr("lightning_fl.flat_module.graph.BACKEND", "aot_eager")
    flags = {"precision": "bf16-mixed", "compile": compiles, "max_rounds": 1}
    with pytest.raises(
        UserError, match=r"its loss is a bfloat16 number, .*; compute it from logits\.float\(\), or use"
    ):
        make_trainer(runner="stacked", **flags).fit(Classifies(), federation())
    assert_same(fits(make_trainer, Classifies(in_float32=True), federation, **flags), 0.05, 0.05)
    monkeypatch.setattr(choose_runner, "LEAST_CLIENTS_ON_CPU", 1)
    trainer = make_trainer(**flags)
    trainer.fit(Classifies(), federation())
    assert describe_runner(trainer.fit_loop.engine.runner)["wanted"] == "serial"


def test_stacked_is_really_stacked(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    step = Perceptron.training_step
    monkeypatch.setattr(Perceptron, "training_step", lambda *arguments: calls.append(1) or step(*arguments))
    trainer = make_trainer(max_rounds=1, clients_per_round=3, local_steps=5, runner="stacked")
    trainer.fit(Perceptron(), federation(sizes=(8, 8, 8)))
    assert len(calls) == 1 + 5, "one trial, and one call for all clients in each of five steps"


def test_the_trial_leaves_no_trace(make_trainer: MakeTrainer) -> None:
    """Check that buffers, generators and learning rate do not change: one client gives the serial result bit for bit."""
    assert_same(fits(make_trainer, Statistics(True), federation, clients_per_round=1, local_epochs=2), 1e-6)


def test_the_trial_is_kept_from_progress_bars(make_trainer: MakeTrainer) -> None:
    """Check with Lightning's own bars, which are not set up before the training starts."""
    bar = TQDMProgressBar()
    trainer = make_trainer(runner="stacked", callbacks=bar, enable_progress_bar=True, max_rounds=1)
    trainer.fit(Perceptron(), federation())


def linear() -> ImageClassifier:
    return ImageClassifier("linear", in_channels=1, image_size=8)


def fitted_on_digits(make_trainer: MakeTrainer, module: Any = None, **flags: Any) -> FederatedTrainer:
    trainer = make_trainer(**{"clients_per_round": 10, **flags})
    trainer.fit(linear() if module is None else module, Digits(num_clients=20, batch_size=8))
    return trainer


def test_auto_stacks_many_small_steps_on_a_cpu(make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture) -> None:
    module = linear()
    auto = fitted_on_digits(make_trainer, copy.deepcopy(module))
    assert "Up to 10 clients train at once" in caplog.text
    assert describe_runner(auto.fit_loop.engine.runner) == {"wanted": "stacked", "clients_at_once": 64}
    other = fitted_on_digits(make_trainer, module, runner="serial")
    torch.testing.assert_close(auto.run.params, other.run.params, rtol=1e-5, atol=1e-6)


def test_auto_counts_the_samples_that_a_client_has(make_trainer: MakeTrainer) -> None:
    """Check with batches that are larger than any client."""
    trainer = make_trainer(clients_per_round=10, max_rounds=1)
    trainer.fit(linear(), Digits(num_clients=100, batch_size=10_000))
    assert describe_runner(trainer.fit_loop.engine.runner)["wanted"] == "stacked"


def test_auto_does_not_stack_random_draws_on_a_cpu(make_trainer: MakeTrainer) -> None:
    """Check with dropout, whose draws would depend on the number of processes that share the clients."""
    module = linear()
    module.network = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))
    trainer = fitted_on_digits(make_trainer, module)
    assert describe_runner(trainer.fit_loop.engine.runner) == {"wanted": "serial", "clients_at_once": None}


@pytest.mark.parametrize("reason", ["few clients", "large steps", "unknown work"])
def test_auto_is_serial_on_a_cpu_otherwise(
    reason: str, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacked_module, "train_stack", None)
    if reason == "large steps":
        monkeypatch.setattr(choose_runner, "MOST_WORK_ON_CPU", 8 * 640 - 1)  # Digits has 8 x 8 pixels and 10 classes
    if reason == "unknown work":
        monkeypatch.setattr(importlib.import_module("lightning_fl.engine.network"), "count_macs", lambda *_: None)
    trainer = fitted_on_digits(make_trainer, clients_per_round=9 if reason == "few clients" else 10)
    assert describe_runner(trainer.fit_loop.engine.runner) == {"wanted": "serial", "clients_at_once": None}


class Collecting(ImageClassifier):
    """Collects outputs as Lightning's documentation shows, counts its steps and keeps its last loss."""

    def __init__(self) -> None:
        super().__init__("linear", in_channels=1, image_size=8)
        self.outputs: list[Tensor] = []
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.outputs.append(loss)
        self.steps += 1
        self.last_loss = loss.detach()
        return loss

    def on_train_epoch_end(self) -> None:
        assert len(torch.stack(self.outputs)) == self.steps


def test_a_module_that_collects_its_outputs_is_trained_one_client_after_the_other(make_trainer: MakeTrainer) -> None:
    trainer = fitted_on_digits(make_trainer, module := Collecting(), max_rounds=1)
    assert module.steps == trainer.run.num_steps
    with pytest.raises(
        UserError, match="changes 'last_loss' and 'outputs' and 'steps' of the module, which clients of a stack"
    ):
        fitted_on_digits(make_trainer, module := Collecting(), runner="stacked")
    assert (module.outputs, module.steps, hasattr(module, "last_loss")) == ([], 0, False)


class Later(ImageClassifier):
    """Does in its second round, or in its second batch, what no stack can hold, and what the trial does not see."""

    def __init__(self, what: str) -> None:
        super().__init__("linear", in_channels=1, image_size=8)
        self.what, self.seen, self.weight, self.received = what, 0, 1.0, [torch.zeros(1)]

    def on_client_download(self, client: int) -> None:
        if self.what == "sets rates":
            self.optimizers().param_groups[0]["lr"] = 0.01 * (client + 1)
        if self.what == "weighs":
            self.weight = 0.1 * (client + 1)
        if self.what == "weighs by arrays":
            self.weight = np.full(1, 0.1 * (client + 1))
        if self.what == "keeps":
            self.received = [p.detach().clone() for p in self.parameters()]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        loss = float(np.sum(self.weight)) * super().training_step(batch, batch_idx)
        if self.what == "keeps":
            loss = loss + sum((p - q).square().sum() for p, q in zip(self.parameters(), self.received, strict=False))
        if self.what == "skips" and batch_idx == 1:
            return None
        if self.what == "compares" and self.current_epoch and loss.item() < 0:
            loss = -loss
        if self.what == "counts" and self.current_epoch:
            self.seen += 1
            loss = loss / self.seen
        if self.what == "draws" and self.current_epoch:
            loss = loss * torch.rand_like(loss)
        if self.what in ("reads", "catches") and batch_idx == 1:
            try:
                loss = loss * self.trainer.num_training_batches
            except Exception:
                if self.what == "reads":
                    raise
        return loss


@pytest.mark.parametrize(
    ("what", "said", "refused"),
    [
        ("skips", "training_step returns no loss for a batch, which clients that train at once", "returns no loss"),
        ("compares", "a step of several clients failed (RuntimeError: vmap", "item"),
        ("counts", "training_step changes 'seen' of the module, which clients", "runner 'stacked' cannot train Later"),
        ("draws", "Later draws random numbers, which would depend on the stack", ""),
        ("reads", "trainer.num_training_batches differs between clients that train at once", "differs between clients"),
        (
            "catches",
            "trainer.num_training_batches differs between clients that train at once",
            "differs between clients",
        ),
        ("sets rates", "on_client_download changes the optimiser's settings, which clients", "cannot train Later"),
        ("weighs by arrays", "on_client_download changes 'weight' of the module, which clients", "cannot train Later"),
        ("weighs", "on_client_download changes 'weight' of the module, which clients", "cannot train Later"),
    ],
)
def test_what_no_stack_can_hold_in_a_later_step_is_trained_one_by_one(
    what: str,
    said: str,
    refused: str,
    make_trainer: MakeTrainer,
    caplog: pytest.LogCaptureFixture,
    keeps_files: dict[str, Any],
) -> None:
    trained = []
    for runner in ("serial", "auto"):
        torch.manual_seed(3)
        module, trainer = Later(what), make_trainer(clients_per_round=10, max_rounds=2, runner=runner, **keeps_files)
        data = Digits(num_clients=20, batch_size=8, partition=Dirichlet(1.0))
        trainer.fit(module, data)
        trained.append((trainer.run.params, module.seen, trainer.run.num_steps))
    assert "Up to 10 clients train at once" in caplog.text
    assert f"Clients train one after the other from now on, because {said}" in caplog.text
    assert describe_runner(trainer.fit_loop.engine.runner)["wanted"] == "serial"
    torch.testing.assert_close(trained[0][0], trained[1][0], rtol=1e-5, atol=1e-6)
    assert trained[0][1:] == trained[1][1:]
    if refused:  # the runner `stacked` allows draws
        with pytest.raises((UserError, RuntimeError), match=refused):
            make_trainer(clients_per_round=10, max_rounds=2, runner="stacked").fit(Later(what), data)


def test_hooks_that_set_the_same_for_every_client_leave_stacks(make_trainer: MakeTrainer) -> None:
    """Keep a copy of the received model, as a penalty of one's own needs it."""
    trained = []
    for runner in ("serial", "stacked"):
        torch.manual_seed(3)
        trainer = make_trainer(clients_per_round=10, max_rounds=2, runner=runner)
        trainer.fit(Later("keeps"), Digits(num_clients=20, batch_size=8))
        trained.append(trainer.run.params)
    torch.testing.assert_close(*trained, rtol=1e-5, atol=1e-6)


def test_a_resumed_run_keeps_its_runner(
    make_trainer: MakeTrainer,
    tmp_path: Path,
    keeps_files: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Resume where `auto` would choose otherwise: the weights are those of the run in one piece, bit for bit."""
    module = linear()
    whole = fitted_on_digits(make_trainer, copy.deepcopy(module), max_rounds=3)
    fitted_on_digits(make_trainer, module, max_rounds=2, **keeps_files)
    monkeypatch.setattr(choose_runner, "MOST_WORK_ON_CPU", 0)
    caplog.clear()
    resumed = make_trainer(max_rounds=3, clients_per_round=10)
    data = Digits(num_clients=20, batch_size=8)
    resumed.fit(linear(), data, ckpt_path=tmp_path / "checkpoints" / "last.ckpt")
    assert torch.equal(resumed.run.params, whole.run.params)
    assert "earlier rounds" not in caplog.text
    other = make_trainer(max_rounds=3, clients_per_round=10, runner="serial")
    other.fit(linear(), data, ckpt_path=tmp_path / "checkpoints" / "last.ckpt")
    said = caplog.text
    assert "goes on with runner serial and 1 thread; its earlier rounds had runner stacked, 64 and 1 thread." in said


def test_on_another_device_the_runner_is_chosen_anew(
    make_trainer: MakeTrainer,
    tmp_path: Path,
    keeps_files: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Resume as if the earlier rounds had run on a GPU, where stacks of this size pay and other threads were set."""
    fitted_on_digits(make_trainer, linear(), max_rounds=1, **keeps_files)
    path = tmp_path / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(path, weights_only=False)
    assert checkpoint["federation"]["execution"]["device"] == "cpu"
    checkpoint["federation"]["execution"] |= {"device": "cuda", "threads": 2}
    torch.save(checkpoint, path)
    monkeypatch.setattr(choose_runner, "MOST_WORK_ON_CPU", 0)
    caplog.clear()
    resumed = make_trainer(max_rounds=2, clients_per_round=10)
    resumed.fit(linear(), Digits(num_clients=20, batch_size=8), ckpt_path=path)
    said = "with runner serial and 1 thread on cpu; its earlier rounds had runner stacked, 64 and 2 threads on cuda."
    assert said in caplog.text


@pytest.mark.parametrize("value", [0, -1])
def test_clients_at_once_must_be_positive(value: int, make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match=f"clients_at_once must be a whole number of at least 1, got {value}"):
        make_trainer(clients_at_once=value)


def test_resumes_bit_for_bit(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    resumed_like_whole(make_trainer, tmp_path, Perceptron, runner="stacked")


def test_an_optimiser_in_the_way_is_named_once(make_trainer: MakeTrainer) -> None:
    module = Perceptron(configure=lambda m: torch.optim.Adafactor(m.parameters()))
    with pytest.raises(UserError, match="Adafactor does not update each number separately") as refusal:
        make_trainer(runner="stacked").fit(module, federation())
    assert "a step of two clients" not in str(refusal.value)


def test_a_resumed_run_does_not_stack_clients_whose_steps_a_new_callback_sees(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    class Counting(Callback):
        count = 0

        def on_before_optimizer_step(self, *_: Any) -> None:
            self.count += 1

    module = linear()
    fitted_on_digits(make_trainer, module, max_rounds=1, **keeps_files)
    resumed = make_trainer(max_rounds=2, clients_per_round=10, callbacks=(seen := Counting()))
    data = Digits(num_clients=20, batch_size=8)
    resumed.fit(linear(), data, ckpt_path=tmp_path / "checkpoints" / "last.ckpt")
    assert seen.count == resumed.round_batches > 0
    assert describe_runner(resumed.fit_loop.engine.runner)["wanted"] == "serial"

"""Test modules that store their weights in other orders of the axes, and runs that go on in another order."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer
from lightning.pytorch import Trainer
from roster import ROSTER
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from toys import Perceptron, reordered, vector

from lightning_fl.algorithms import SCAFFOLD, Algorithm, Ditto, FedAdamSSM, FedBuff, HeteroFL, PruneFL, ServerM
from lightning_fl.codecs import ErrorFeedback, TopK
from lightning_fl.data import Arrays
from lightning_fl.modules import ImageClassifier

DRAWS_BY_ENTRY = {"DASHA", "DASHA-minibatch", "IFCA"}
"""Methods that draw numbers for the entries of a vector one after the other."""
METHODS: dict[str, Any] = {
    "client states": SCAFFOLD,
    "server states": ServerM,
    "shared moments": lambda: FedAdamSSM(alpha=0.3, epsilon=0.01),
    "codec memories": lambda: Algorithm(uplink=ErrorFeedback(TopK(0.3))),
    "models of clients": Ditto,
    "masks": lambda: PruneFL(interval=1, initial_passes=2, max_density=0.6),
    "versions under way": lambda: FedBuff(buffer_size=2),
    "owned tensors": lambda: Algorithm(personal=["network.0", "own"]),
    "smaller networks": lambda: HeteroFL({1.0: 0.4, 0.2: 0.6}),  # of one filter, in which both orders are the same
}


def reorder(module: nn.Module) -> None:
    """Store the parameters and buffers of a module in another order."""
    for tensors in (dict(module.named_parameters()), dict(module.named_buffers())):
        for name, other in reordered(tensors).items():
            tensors[name].data = other


class Convolutional(ImageClassifier):
    """Network with two buffers of images, which change its forward pass."""

    def __init__(self) -> None:
        layers = nn.Conv2d(3, 5, 3), nn.Tanh(), nn.Conv2d(5, 2, 2), nn.Flatten(), nn.Linear(18, 4)
        super().__init__(nn.Sequential(*layers), num_classes=4, image_size=6, learning_rate=0.05)
        self.register_buffer("sums", torch.zeros(2, 3, 6, 6))
        self.register_buffer("own", torch.zeros(2, 3, 6, 6))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, _ = batch
        for buffer in (self.sums, self.own):
            buffer += images[:2]
        return super().training_step(batch, batch_idx)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + 0.01 * (self.sums + self.own).mean(0))


@pytest.mark.trains
@pytest.mark.parametrize("kept", METHODS)
def test_a_run_goes_on_in_another_order(kept: str, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    def fit(folder: str, rounds: int, is_reordered: bool, **options: Any) -> np.ndarray:
        generator = torch.Generator().manual_seed(1)
        images, labels = torch.randn(72, 3, 6, 6, generator=generator), torch.arange(72) % 4
        torch.manual_seed(0)
        module = Convolutional()
        if is_reordered:
            reorder(module)
        data = Arrays(
            train=(images, labels), test=(images[:8], labels[:8]), num_clients=5, batch_size=6, server_fraction=0.1
        )
        trainer = make_trainer(
            precision="64-true", max_rounds=rounds, default_root_dir=tmp_path / folder, enable_checkpointing=True
        )
        trainer.fit(module, data, METHODS[kept](), **options)
        return np.concatenate([vector(module), module.sums.flatten(), module.own.flatten()])

    begun = fit("whole", 2, is_reordered=False)
    whole = fit("whole", 4, is_reordered=False, ckpt_path="last")
    fit("other", 2, is_reordered=False)
    other = fit("other", 4, is_reordered=True, ckpt_path="last")
    assert np.abs(whole - begun).max() > 1e-4
    np.testing.assert_allclose(other, whole, rtol=0, atol=1e-9)


class RecordsStrides(ImageClassifier):
    """Note the strides of all parameters, gradients and buffers in a step, and of the weights in the checkpoint.

    They have channels innermost, the last layer's are transposed, and the second convolution is frozen.
    """

    def __init__(self, **options: Any) -> None:
        flat = nn.Conv2d(3, 5, 3), nn.Tanh(), nn.Conv2d(5, 4, 2), nn.Unflatten(1, (4, 1))
        solid = nn.Conv3d(4, 2, (1, 2, 2)), nn.Flatten(), nn.Linear(8, 4)
        super().__init__(nn.Sequential(*flat, *solid), num_classes=4, image_size=6, learning_rate=0.05, **options)
        flat[0].to(memory_format=torch.channels_last)
        flat[2].to(memory_format=torch.channels_last)
        solid[0].to(memory_format=torch.channels_last_3d)
        solid[2].weight = nn.Parameter(torch.randn(8, 4).t())
        flat[2].requires_grad_(False)
        self.register_buffer("maps", torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last))
        self.strides: set[Any] = set()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for name, parameter in self.named_parameters():
            self.strides.add((name, parameter.stride(), None if parameter.grad is None else parameter.grad.stride()))
        self.strides |= {(name, buffer.stride()) for name, buffer in self.named_buffers()}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.strides |= {(name, tensor.stride()) for name, tensor in checkpoint["state_dict"].items()}


@pytest.mark.trains
@pytest.mark.parametrize("runner", ["serial", "stacked", "lightning"])
def test_a_module_keeps_the_format_that_it_has(runner: str, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    images, labels = torch.randn(24, 3, 6, 6, generator=generator), torch.arange(24) % 4
    torch.manual_seed(0)
    start = RecordsStrides()
    if runner == "stacked":  # which calls no hooks at steps
        start.on_before_optimizer_step = None  # type: ignore[assignment, method-assign]
    stock, plain = copy.deepcopy(start), copy.deepcopy(start)
    for parameter in plain.parameters():
        parameter.data = parameter.data.contiguous()
    resumed, before = copy.deepcopy(start), vector(start)
    data = Arrays(train=(images, labels), test=(images, labels), num_clients=3, batch_size=4)

    def fit(module: RecordsStrides, rounds: int, folder: str, **options: Any) -> None:
        flags: dict[str, Any] = {"default_root_dir": tmp_path / folder, "enable_checkpointing": True}
        make_trainer(max_rounds=rounds, runner=runner, **flags).fit(module, data, **options)

    fit(start, 2, "innermost")
    fit(plain, 2, "plain")
    fit(resumed, 3, "innermost", ckpt_path="last")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(max_epochs=1, default_root_dir=tmp_path / "stock", accelerator="cpu", **quiet)
    trainer.fit(stock, DataLoader(TensorDataset(images, labels), 4))
    for module in (start, resumed):
        assert module.strides == stock.strides
        assert [p.stride() for p in module.parameters()] == [p.stride() for p in stock.parameters()]
    assert {start.network[i].weight.stride(1) for i in (0, 2, 4)} == {start.maps.stride(1)} == {1}
    assert start.network[6].weight.stride() == (1, 4)
    assert np.abs(vector(start) - before).max() > 1e-4
    np.testing.assert_allclose(vector(start), vector(plain), rtol=0, atol=1e-6)


@pytest.mark.matrix
@pytest.mark.parametrize("name", [name for name in ROSTER if name not in DRAWS_BY_ENTRY])
def test_a_method_computes_the_same_in_another_order(name: str, make_trainer: MakeTrainer) -> None:
    ends = []
    for is_reordered in (False, True):
        torch.manual_seed(0)
        module = Perceptron()
        if is_reordered:
            reorder(module)
        trainer = make_trainer(precision="64-true", clients_per_round=4, dropout_rate=0.2, straggler_rate=0.3)
        trainer.fit(module, ROSTER[name].federation(), ROSTER[name].algorithm())
        ends.append((vector(module), trainer.run.ledger.state_dict()))
    (plain, plain_bits), (other, other_bits) = ends
    np.testing.assert_allclose(other, plain, rtol=0, atol=1e-9)
    assert other_bits == plain_bits

"""Test modules that store their weights with the channels innermost, and runs that go on in another order."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from toys import vector

from lightning_fl.algorithms import SCAFFOLD, Algorithm, Ditto, FedAdamSSM, FedBuff, HeteroFL, PruneFL, ServerM
from lightning_fl.codecs import ErrorFeedback, TopK
from lightning_fl.data import Arrays
from lightning_fl.modules import ImageClassifier

METHODS: dict[str, Any] = {
    "client states": SCAFFOLD,
    "server states": ServerM,
    "shared moments": lambda: FedAdamSSM(alpha=0.3, epsilon=0.01),
    "codec memories": lambda: Algorithm(uplink=ErrorFeedback(TopK(0.3))),
    "models of clients": Ditto,
    "masks": lambda: PruneFL(interval=1, initial_passes=2, max_density=0.6),
    "versions under way": lambda: FedBuff(buffer_size=2),
    "smaller networks": lambda: HeteroFL({1.0: 0.4, 0.2: 0.6}),  # of one filter, in which both orders are the same
}


@pytest.mark.trains
@pytest.mark.parametrize("kept", METHODS)
def test_a_run_goes_on_in_another_order_of_weights(kept: str, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    def fit(folder: str, rounds: int, innermost: bool, **options: Any) -> np.ndarray:
        generator = torch.Generator().manual_seed(1)
        images, labels = torch.randn(72, 3, 6, 6, generator=generator), torch.arange(72) % 4
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 5, 3), nn.Tanh(), nn.Conv2d(5, 2, 2), nn.Flatten(), nn.Linear(18, 4)
        network = nn.Sequential(*layers).to(memory_format=torch.channels_last if innermost else torch.contiguous_format)
        module = ImageClassifier(network, num_classes=4, image_size=6, learning_rate=0.05)
        data = Arrays(
            train=(images, labels), test=(images[:8], labels[:8]), num_clients=5, batch_size=6, server_fraction=0.1
        )
        trainer = make_trainer(
            precision="64-true", max_rounds=rounds, default_root_dir=tmp_path / folder, enable_checkpointing=True
        )
        trainer.fit(module, data, METHODS[kept](), **options)
        return vector(module)

    begun = fit("whole", 2, innermost=False)
    whole = fit("whole", 4, innermost=False, ckpt_path="last")
    fit("other", 2, innermost=False)
    other = fit("other", 4, innermost=True, ckpt_path="last")
    assert np.abs(whole - begun).max() > 1e-4
    np.testing.assert_allclose(other, whole, rtol=0, atol=1e-9)


class RecordsStrides(ImageClassifier):
    """Note the strides of all parameters, gradients and buffers in a step, and of the weights in the checkpoint.

    The second convolution is frozen.
    """

    def __init__(self, **options: Any) -> None:
        layers = nn.Conv2d(3, 5, 3), nn.Tanh(), nn.Conv2d(5, 2, 2), nn.Flatten(), nn.Linear(18, 4)
        network = nn.Sequential(*layers).to(memory_format=torch.channels_last)
        super().__init__(network, num_classes=4, image_size=6, learning_rate=0.05, **options)
        layers[2].requires_grad_(False)
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
    stock, plain = copy.deepcopy(start), copy.deepcopy(start).to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
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
    assert start.network[0].weight.stride(1) == start.network[2].weight.stride(1) == start.maps.stride(1) == 1
    assert np.abs(vector(start) - before).max() > 1e-4
    np.testing.assert_allclose(vector(start), vector(plain), rtol=0, atol=1e-6)

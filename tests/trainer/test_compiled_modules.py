"""Test modules that torch compiles: they train as without it, are not compiled again and again, and can be pruned and stacked."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from lightning_fl import FederatedTrainer
from lightning_fl.algorithms import MOON, FedAP, HRank
from lightning_fl.data import Arrays
from lightning_fl.modules import ImageClassifier

pytestmark = pytest.mark.trains

WAYS = "network", "compile", "module", "step"
"""`torch.compile` of the network, its `compile()`, `fit(torch.compile(module))`, and the training step alone."""


class CountGraphs(Callback):
    """Counts after each round how many graphs torch has compiled."""

    def __init__(self) -> None:
        self.backend, self.after_rounds = CompileCounter(), []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.after_rounds.append(self.backend.frame_count)


def fitted(
    folder: Path, way: str | None, algorithm: Any = None, max_rounds: int = 2, **flags: Any
) -> tuple[ImageClassifier, list[int]]:
    """Return a fitted module that is compiled in this way, and the number of graphs that are compiled after each round."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    images, labels = torch.rand(60, 1, 28, 28, dtype=torch.float64), torch.arange(60) % 10
    module = ImageClassifier("lenet5", in_channels=1, image_size=28, learning_rate=0.05)
    given: Any = module
    graphs = CountGraphs()
    if way == "network":
        module.network = torch.compile(module.network, backend=graphs.backend)  # type: ignore[assignment]
    elif way == "compile":
        module.network.compile(backend=graphs.backend)
    elif way == "module":
        given = torch.compile(module, backend=graphs.backend)
    elif way == "step":
        module.training_step = torch.compile(module.training_step, backend=graphs.backend)  # type: ignore[method-assign]
    data = Arrays(
        train=(images, labels), test=(images[:8], labels[:8]), num_classes=10, num_clients=4, batch_size=8,
        val_fraction=0.2, server_fraction=0.2,
    )  # fmt: skip
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = FederatedTrainer(
        max_rounds=max_rounds, clients_per_round=4, default_root_dir=folder, enable_checkpointing=False,
        channels_last=False, precision="64-true", callbacks=[graphs], accelerator="cpu", **quiet, **flags,
    )  # fmt: skip
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        trainer.fit(given, data, algorithm, verbose=False)
    return module, graphs.after_rounds


def entries(module: ImageClassifier) -> dict[str, Tensor]:
    return {name.replace("_orig_mod.", ""): value for name, value in module.state_dict().items()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sampled(1)
def test_a_compiled_module_is_not_compiled_again_and_again_and_trains_as_the_module(way: str, tmp_path: Path) -> None:
    module, graphs = fitted(tmp_path, way, max_rounds=3, local_epochs=6)
    assert 0 < graphs[1] == graphs[2]
    expected, _ = fitted(tmp_path, None, max_rounds=3, local_epochs=6)
    torch.testing.assert_close(entries(module), entries(expected), rtol=0, atol=1e-12)
    assert ("network._orig_mod.conv1.weight" in module.state_dict()) == (way == "network")  # as in Lightning


@pytest.mark.parametrize("way", ["network", "module"])
@pytest.mark.matrix
def test_a_stack_of_compiled_modules_computes_without_the_compiler_and_says_so(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        module, _ = fitted(tmp_path, way, runner="stacked")
    assert "compute without torch.compile, which has compiled ImageClassifier" in caplog.text
    expected, _ = fitted(tmp_path, None, runner="stacked")
    torch.testing.assert_close(entries(module), entries(expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("way", "algorithm"),
    [
        *((way, FedAP(prune_round=1)) for way in ("network", "compile", "module")),
        ("network", HRank(rate=0.3, prune_round=1)),
    ],
)
@pytest.mark.matrix
def test_a_compiled_module_is_pruned_as_the_module(way: str, algorithm: Any, tmp_path: Path) -> None:
    module, graphs = fitted(tmp_path, way, algorithm)
    assert 0 < graphs[0] < graphs[1]  # compiled again for the pruned network
    expected = entries(fitted(tmp_path, None, algorithm)[0])
    assert expected["network.conv1.weight"].shape[0] < 6
    torch.testing.assert_close(entries(module), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("way", ["network", "step"])
def test_representations_are_read_without_the_compiler(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, compiled = (fitted(tmp_path, one, MOON(mu=5.0), runner="serial")[0] for one in (None, way))
    for one, other in zip(plain.parameters(), compiled.parameters(), strict=True):
        assert torch.equal(one, other)
    assert "would hide the layer whose inputs ModelContrast compares" in caplog.text

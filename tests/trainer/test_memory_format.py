"""Test runs that go on where weights are stored in another order, as on another device."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer
from torch import nn
from toys import vector

from lightning_fl.algorithms import SCAFFOLD, Algorithm, Ditto, FedAdamSSM, FedBuff, PruneFL, ServerM
from lightning_fl.codecs import ErrorFeedback, TopK
from lightning_fl.data import Arrays
from lightning_fl.modules import ImageClassifier
from lightning_fl.vectors.layout import Layout

METHODS: dict[str, Any] = {
    "client states": SCAFFOLD,
    "server states": ServerM,
    "shared moments": lambda: FedAdamSSM(alpha=0.3, epsilon=0.01),
    "codec memories": lambda: Algorithm(uplink=ErrorFeedback(TopK(0.3))),
    "models of clients": Ditto,
    "masks": lambda: PruneFL(interval=1, initial_passes=2, max_density=0.6),
    "versions under way": lambda: FedBuff(buffer_size=2),
}


@pytest.mark.trains
@pytest.mark.parametrize("kept", METHODS)
def test_a_run_goes_on_in_another_order_of_weights(
    kept: str, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    of_tree = Layout.of

    def fit(folder: str, rounds: int, innermost: bool, **options: Any) -> np.ndarray:
        monkeypatch.setattr(Layout, "of", partial(of_tree, channels_last=innermost))
        generator = torch.Generator().manual_seed(1)
        images, labels = torch.randn(72, 3, 6, 6, generator=generator), torch.arange(72) % 4
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 5, 3), nn.Tanh(), nn.Conv2d(5, 2, 2), nn.Flatten(), nn.Linear(18, 4)
        module = ImageClassifier(nn.Sequential(*layers), num_classes=4, image_size=6, learning_rate=0.05)
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

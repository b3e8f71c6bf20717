"""Test the count of multiply-accumulates for layers that torch computes with fused kernels."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from toys import Perceptron, federation

from lightning_fl import FederatedTrainer

WIDTH, HEADS, HIDDEN = 4, 2, 8
ATTENTION = 4 * 3 * WIDTH * WIDTH + 2 * 3 * 3 * WIDTH
"""Projections of three positions to query, key, value and result; scores and weighted sums of all pairs."""
STEPS = 3 * HIDDEN * (WIDTH + HIDDEN)
"""One gate over three positions."""
LAYERS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "LSTM": (lambda: nn.LSTM(WIDTH, HIDDEN, batch_first=True), 4 * STEPS),
    "GRU": (lambda: nn.GRU(WIDTH, HIDDEN, batch_first=True), 3 * STEPS),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, batch_first=True),
        ATTENTION + 2 * 3 * WIDTH * HIDDEN,
    ),
}


class Sequential(Perceptron):
    """Module whose three inputs are positions of `WIDTH` numbers each: embedding, a layer, and the perceptron on their mean."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.ones(WIDTH))
        self.layer = make()

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(x.unsqueeze(2) * self.embedding)
        return super().forward((found[0] if isinstance(found, tuple) else found).mean(2))


@pytest.mark.parametrize("name", LAYERS)
def test_fused_layers_are_counted(name: str, make_trainer: Callable[..., FederatedTrainer]) -> None:
    make, macs = LAYERS[name]
    before = torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled, torch.backends.mha.get_fastpath_enabled()
    trainer = make_trainer(max_rounds=1, runner="serial")
    trainer.fit(Sequential(make), federation())
    assert trainer.callback_metrics["model/macs"] == macs + 3 * 4 + 4 * 2
    after = torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled, torch.backends.mha.get_fastpath_enabled()
    assert after == before

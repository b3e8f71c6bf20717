"""Test single updates of what server and clients share."""

from types import SimpleNamespace
from typing import Any

import torch

from lightning_fl.steps import Moments


def test_only_negative_second_moments_are_clamped_and_counted() -> None:
    """Check V + ΔV = −1, 0, 0.5 and 2: one coordinate is below 0."""
    merged = {"moments/first": torch.ones(4), "moments/second": torch.tensor([-2.0, -1.0, -0.5, 1.0])}
    turn: Any = SimpleNamespace(merged=merged, metrics={})
    state = Moments()(turn, {"first": torch.zeros(4), "second": torch.ones(4)})
    assert state["second"].tolist() == [0.0, 0.0, 0.5, 2.0]
    assert state["first"].tolist() == [1.0] * 4
    assert turn.metrics == {"moments/clamped": 1}

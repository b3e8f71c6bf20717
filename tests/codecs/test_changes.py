"""Test a downlink of changes in a federation: the models of whole broadcasts, and its bits from these models."""

from math import ceil, log2
from typing import Any

import pytest
import torch
from compared_runs import MakeTrainer, equal_states
from lightning.pytorch import Callback
from toys import Perceptron, federation

from lightning_fl.algorithms import Algorithm
from lightning_fl.codecs import Changes, Dense, ErrorFeedback, TopK
from lightning_fl.slots import Codec

D, N, ROUNDS = 26, 6, 4


class Watch(Callback):
    """Callback that keeps the model and the downlink's bits of each round."""

    def __init__(self) -> None:
        self.models: list[torch.Tensor] = []
        self.bits: list[int] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.models.append(trainer.run.params.clone())

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.bits.append(int(trainer.callback_metrics["comm/downlink_bits"]))


@pytest.mark.parametrize("runner", ["serial", "stacked"])
def test_changes_are_the_models_of_whole_broadcasts_in_fewer_bits(runner: str, make_trainer: MakeTrainer) -> None:
    def fitted(downlink: Codec) -> tuple[Perceptron, Watch]:
        torch.manual_seed(0)
        module, watch = Perceptron(), Watch()
        trainer = make_trainer(max_rounds=ROUNDS, clients_per_round=2, runner=runner, callbacks=[watch])
        trainer.fit(module, federation(), Algorithm(uplink=ErrorFeedback(TopK(0.1)), downlink=downlink))
        return module, watch

    (whole, dense), (module, changes) = fitted(Dense()), fitted(Changes())
    assert equal_states(dict(module.state_dict()), dict(whole.state_dict()))
    assert dense.bits == [2 * 32 * D] * ROUNDS
    # Each broadcast goes to all clients, because the next one builds on it; two clients change two coordinates each.
    expected = [N * 32 * D]
    for before, after in zip(changes.models, changes.models[1:], strict=False):
        u = int((before != after).sum())
        assert 0 < u <= 4
        expected.append(N * (32 * u + min(D, u * ceil(log2(D)))))
    assert changes.bits == expected

"""Test the distillation on a server that computes almost nothing: its loss, its batches, and when it validates and stops."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fl import UserError
from lightning_fl.steps import Distillation


class FakeServer:
    """Server of samples with one feature x, whose model w has the logits x w; it gives the accuracies of a list."""

    def __init__(
        self, num_samples: int, accuracies: tuple[float, ...] = (), skips_single_samples: bool = False
    ) -> None:
        self.num_samples, self.accuracies, self.skips_single_samples = (
            num_samples,
            list(accuracies),
            skips_single_samples,
        )
        self.has_labels, self.seed, self.num_steps = bool(accuracies), 0, 0
        self.validated: list[tuple[int, Tensor]] = []

    def inputs(self, rows: Tensor, batch_size: int) -> Iterator[Tensor]:
        yield from (rows[:, None] + 1.0).split(batch_size)

    def logits(self, params: Tensor, buffers: Tensor, inputs: Tensor, is_training: bool = False) -> Tensor:
        self.num_steps += is_training
        return inputs * params

    def accuracy(self, params: Tensor, buffers: Tensor, rows: slice) -> float:
        assert rows.start == self.num_samples - 2, "the last two samples are held out"
        self.validated.append((self.num_steps, params.clone()))
        return self.accuracies.pop(0)

    def require_samples(self) -> None:
        """Have samples."""

    def try_logits(self) -> None:
        """Have logits."""

    def try_accuracy(self) -> None:
        """Have an accuracy."""


def distilled(step: Distillation, server: FakeServer) -> Any:
    """Return the turn of two clients after the step."""
    uploads = torch.tensor([[0.5, -0.5], [2.0, 0.0]])
    merged, nothing = {"uploads/model": uploads}, torch.zeros(0)
    turn: Any = SimpleNamespace(server=server, merged=merged, params=torch.zeros(2), buffers=nothing, metrics={})
    turn.proposal, turn.proposed_buffers = torch.tensor([1.0, 0.5]), nothing
    step(turn, {})
    return turn


@pytest.mark.parametrize("average", ["logits", "probs"])
def test_the_loss_is_the_divergence_from_the_clients_at_the_temperature(average: Any) -> None:
    turn = distilled(Distillation(max_steps=1, temperature=3.0, average=average), FakeServer(3))
    x = torch.tensor([1.0, 2, 3])[:, None]
    clients = x / 3 * torch.tensor([0.5, -0.5]), x / 3 * torch.tensor([2.0, 0.0])
    teacher = (sum(clients) / 2).softmax(1) if average == "logits" else sum(z.softmax(1) for z in clients) / 2  # type: ignore[union-attr]
    student = (x / 3 * torch.tensor([1.0, 0.5])).softmax(1)
    assert turn.metrics["feddf/loss"] == pytest.approx(
        float((teacher * (teacher / student).log()).sum(1).mean()), rel=1e-4
    )
    assert "feddf/accuracy" not in turn.metrics


def test_the_first_of_the_best_validated_models_is_kept() -> None:
    server = FakeServer(10, (0.0, 0.5, 0.5, 0.2))
    turn = distilled(Distillation(max_steps=10, val_every_n_steps=3, val_fraction=0.2), server)
    assert [steps for steps, _ in server.validated] == [3, 6, 9, 10]
    assert (turn.metrics["feddf/accuracy"], turn.metrics["feddf/steps"]) == (0.5, 10)
    assert torch.equal(turn.proposal, server.validated[1][1])
    nothing_right = distilled(Distillation(max_steps=1, val_fraction=0.2), FakeServer(10, (0.0,)))
    assert nothing_right.metrics["feddf/accuracy"] == 0


def test_it_stops_when_patience_is_over_and_never_before_a_validation() -> None:
    server = FakeServer(10, (0.5, 0.6, 0.1, 0.1, 0.1))
    assert (
        distilled(Distillation(50, val_every_n_steps=2, val_fraction=0.2, patience=4), server).metrics["feddf/steps"]
        == 8
    )
    turn = distilled(Distillation(50, val_every_n_steps=5, val_fraction=0.2, patience=2), FakeServer(10, (0.5,)))
    assert (turn.metrics["feddf/steps"], turn.metrics["feddf/accuracy"]) == (7, 0.5)


def test_batches_of_one_sample_are_left_out_for_batch_normalisation() -> None:
    server = FakeServer(5, skips_single_samples=True)
    assert distilled(Distillation(max_steps=5, batch_size=2), server).metrics["feddf/steps"] == 5
    Distillation(val_fraction=0.0).check(FakeServer(2, skips_single_samples=True))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="cannot train on one sample"):
        Distillation(val_fraction=0.5).check(FakeServer(2, (0.5,), skips_single_samples=True))  # type: ignore[arg-type]

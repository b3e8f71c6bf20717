"""Test the mean of the products of LoRA's factors."""

from typing import Any

import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer
from torch import Tensor, nn
from toys import SIZES, Perceptron, Recorded, federation, vector

from lightning_fl.aggregators import Members, WeightedMean
from lightning_fl.algorithms import Algorithm
from lightning_fl.errors import UserError
from lightning_fl.steps import Momentum, ProductMean
from lightning_fl.steps.product_mean import mean_product


def factors(clients: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(clients)
    b, a = (torch.randn(clients, *shape, generator=random).double() for shape in ((7, rank), (rank, 5)))
    shares = torch.arange(1, clients + 1).double()
    return b, a, shares / shares.sum()


@pytest.mark.parametrize(("clients", "rank"), [(1, 2), (3, 2), (4, 1), (3, 6)])
def test_it_is_the_best_approximation_of_the_mean_product(clients: int, rank: int) -> None:
    b, a, shares = factors(clients, rank)
    dense = torch.einsum("k,kir,krj->ij", shares, b, a)
    u, values, vt = torch.linalg.svd(dense, full_matrices=False)
    best = u[:, :rank] * values[:rank] @ vt[:rank]
    mean_b, mean_a = mean_product(b, a, shares)
    assert (mean_b.shape, mean_a.shape) == (b.shape[1:], a.shape[1:])
    torch.testing.assert_close(mean_b @ mean_a, best, atol=1e-9, rtol=0)


def test_a_mean_of_no_higher_rank_is_recovered() -> None:
    b, a, shares = factors(3, 2)
    b = b[:1].expand(3, -1, -1)
    mean_b, mean_a = mean_product(b, a, shares)
    torch.testing.assert_close(mean_b @ mean_a, b[0] @ torch.tensordot(shares, a, 1), atol=1e-9, rtol=0)


def test_a_step_with_moments_is_refused() -> None:
    with pytest.raises(UserError, match="ProductMean moves the coordinates of the numbers that Momentum keeps"):
        Algorithm(aggregator=Members(WeightedMean()), steps=(ProductMean(), Momentum()))


class LoRAPerceptron(Perceptron):
    """Perceptron whose frozen hidden layer has factors named as `peft` names them; the output layer is trained whole."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(3, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 3, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.lora_B["default"](self.lora_A["default"](x)))


def method(**parts: Any) -> Algorithm:
    return Algorithm(aggregator=Members(WeightedMean(**parts)), steps=(ProductMean(),))


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_a_round_averages_products_and_all_else_as_usual(weighting: str, make_trainer: MakeTrainer) -> None:
    seen, module = Recorded(), LoRAPerceptron().double()
    start = {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}
    trainer = make_trainer(callbacks=[seen], max_rounds=1, precision="64-true")
    trainer.fit(module, federation(), method(weighting=weighting))
    views = trainer.run.layout.views
    weights = [SIZES[c.client] if weighting == "samples" else 1 for c in seen.rounds[0]]
    wanted, moved = torch.zeros(3, 3).double(), {name: torch.zeros_like(value) for name, value in start.items()}
    for weight, crossing in zip(weights, seen.rounds[0], strict=True):
        own = {name: start[name] + delta for name, delta in views(crossing.arrived["model"]).items()}
        share = weight / sum(weights)
        wanted += share * own["lora_B.default.weight"] @ own["lora_A.default.weight"]
        moved = {name: total + share * own[name] for name, total in moved.items()}
    u, values, vt = torch.linalg.svd(wanted)
    found = views(trainer.run.params)
    product = found["lora_B.default.weight"] @ found["lora_A.default.weight"]
    torch.testing.assert_close(product, u[:, :2] * values[:2] @ vt[:2], atol=1e-9, rtol=0)
    torch.testing.assert_close(found["output.weight"], moved["output.weight"], atol=1e-9, rtol=0)


def test_a_model_without_factors_is_refused(make_trainer: MakeTrainer) -> None:
    module = Perceptron()
    before = vector(module)
    with pytest.raises(UserError, match="ProductMean needs both LoRA factors"):
        make_trainer().fit(module, federation(), method())
    np.testing.assert_array_equal(vector(module), before)

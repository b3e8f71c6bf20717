"""Test the mean of the products of LoRA's factors."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import torch
from compared_runs import MakeTrainer, agree, result
from torch import Tensor, nn
from toys import SIZES, Perceptron, Recorded, federation, vector

from lightning_fl import FederatedTrainer
from lightning_fl.aggregators import KeepUploads, MajorityVote, WeightedMean
from lightning_fl.algorithms import Algorithm, FedAvg
from lightning_fl.codecs import ErrorFeedback, TopK
from lightning_fl.errors import UserError
from lightning_fl.rules import LocalAdam, SharedAdam
from lightning_fl.steps import Momentum, ProductMean
from lightning_fl.steps.product_mean import mean_product
from lightning_fl.vectors.layer_groups import factor_pairs


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


@pytest.mark.parametrize(
    ("keeper", "parts"),
    [
        ("Momentum", {"steps": (ProductMean(), Momentum())}),
        ("LocalAdam", {"rule": LocalAdam()}),
        ("SharedAdam", {"rule": SharedAdam()}),
        ("ErrorFeedback", {"uplink": ErrorFeedback(TopK(0.5))}),
    ],
)
def test_numbers_kept_of_coordinates_are_refused(keeper: str, parts: dict[str, Any]) -> None:
    given: dict[str, Any] = {"aggregator": KeepUploads(WeightedMean()), "steps": (ProductMean(),), **parts}
    with pytest.raises(UserError, match=f"ProductMean moves the coordinates of the numbers that {keeper} keeps"):
        Algorithm(**given)


def test_parts_of_models_are_refused() -> None:
    with pytest.raises(UserError, match="averages whole models, and MajorityVote does not: use KeepUploads"):
        Algorithm(aggregator=KeepUploads(MajorityVote()), steps=(ProductMean(),))


def test_factors_of_convolutions_and_embeddings_are_pairs() -> None:
    names = ["c.lora_A.default.weight", "c.lora_B.default.weight", "lora_embedding_A.x", "lora_embedding_B.x"]
    assert factor_pairs([*names, "d.lora_B.default.weight", "c.bias"]) == [tuple(names[:2]), tuple(names[2:])]


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
    return Algorithm(aggregator=KeepUploads(WeightedMean(**parts)), steps=(ProductMean(),))


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
        own = {name: start[name] + delta for name, delta in views(crossing.decoded["model"]).items()}
        share = weight / sum(weights)
        wanted += share * own["lora_B.default.weight"] @ own["lora_A.default.weight"]
        moved = {name: total + share * own[name] for name, total in moved.items()}
    u, values, vt = torch.linalg.svd(wanted)
    found = views(trainer.run.params)
    product = found["lora_B.default.weight"] @ found["lora_A.default.weight"]
    torch.testing.assert_close(product, u[:, :2] * values[:2] @ vt[:2], atol=1e-9, rtol=0)
    torch.testing.assert_close(found["output.weight"], moved["output.weight"], atol=1e-9, rtol=0)


class LoRAConvolution(LoRAPerceptron):
    """The same with factors whose tensors have the four axes of convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.lora_A = nn.ModuleDict({"default": nn.Conv2d(1, 2, (1, 3), bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Conv2d(2, 3, 1, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        change = self.lora_B["default"](self.lora_A["default"](x[:, None, None]))
        return Perceptron.forward(self, x + change.flatten(1))


def test_convolutions_are_averaged_as_matrices(make_trainer: MakeTrainer) -> None:
    trained = []
    for make in (LoRAPerceptron, LoRAConvolution):
        torch.manual_seed(1)
        module = make()
        with torch.no_grad():
            for seed, parameter in enumerate(module.parameters()):
                parameter.copy_(
                    torch.randn(parameter.numel(), generator=torch.Generator().manual_seed(seed)).view_as(parameter)
                )
        make_trainer(max_rounds=2).fit(module, federation(), method())
        trained.append(module)
    np.testing.assert_allclose(vector(trained[1]), vector(trained[0]), rtol=0, atol=1e-5)


def train(folder: Path) -> None:
    torch.manual_seed(0)
    trainer = FederatedTrainer(
        max_rounds=3,
        clients_per_round=3,
        local_epochs=1,
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        accelerator="cpu",
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LoRAPerceptron(), federation(), method())


@pytest.mark.slow
def test_two_processes_are_one(tmp_path: Path) -> None:
    for num in (1, 2):
        processes.run(train, tmp_path / str(num), num_processes=num)
    agree(result(tmp_path / "1"), result(tmp_path / "2"))


def test_a_model_without_factors_is_refused(make_trainer: MakeTrainer) -> None:
    module = Perceptron()
    before = vector(module)
    with pytest.raises(UserError, match="ProductMean needs both LoRA factors"):
        make_trainer().fit(module, federation(), method())
    np.testing.assert_array_equal(vector(module), before)


class LoRAWithNorm(LoRAPerceptron):
    """The same behind a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


def test_running_statistics_are_averaged_as_usual(make_trainer: MakeTrainer) -> None:
    statistics = []
    for algorithm in (method(), FedAvg()):
        torch.manual_seed(0)
        module = LoRAWithNorm()
        make_trainer(max_rounds=1).fit(module, federation(), algorithm)
        statistics.append(module.norm.running_mean)
    torch.testing.assert_close(statistics[0], statistics[1])
    assert statistics[0].any()

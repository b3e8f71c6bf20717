"""Test adapters: a small GPT-2 with LoRA from `peft` where it is installed, and a layer with the same names elsewhere."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer, bits_of, fits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from toys import SIZES, Perceptron, Recorded, Sizes, federation, read_rows, vector

from lightning_fl.aggregators import KeepUploads, WeightedMean
from lightning_fl.algorithms import Algorithm, FedAdamSSM, FedLDF
from lightning_fl.callbacks import AdapterError, AdapterExport
from lightning_fl.codecs import ErrorFeedback, LowRank
from lightning_fl.data import Arrays
from lightning_fl.errors import UserError
from lightning_fl.groups import layer_groups
from lightning_fl.steps import ProductMean


class Adapted(nn.Module):
    """Linear layer with a frozen weight and the factors A and B, named as `peft` names them."""

    def __init__(self, width: int, outputs: int, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = nn.Linear(width, outputs).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(width, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, outputs, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class LoRAPerceptron(Perceptron):
    """Perceptron of which only the adapters of the two layers are trained."""

    def __init__(self, freezes_a: bool = False) -> None:
        super().__init__()
        self.hidden, self.output = Adapted(3, 4), Adapted(4, 2)  # type: ignore[assignment]
        if freezes_a:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_("lora_B" in name)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.3)


def fitted(make: MakeTrainer, keeps: dict[str, Any], module: Any, *callbacks: Any, **flags: Any) -> Any:
    trainer = make(callbacks=list(callbacks), **{"max_rounds": 3, **keeps, **flags})
    trainer.fit(module, federation(), flags.pop("algorithm", None))
    return trainer


def test_low_rank_compression_of_factors_of_no_higher_rank_is_refused(make_trainer: MakeTrainer) -> None:
    method = Algorithm(uplink=ErrorFeedback(LowRank(2)))
    with pytest.raises(UserError, match=r"^LowRank\(rank=2\) would send every tensor whole"):
        make_trainer().fit(LoRAPerceptron(), federation(), method)


def test_the_factors_of_a_layer_are_one_group() -> None:
    names = {group.name: group.parameters for group in layer_groups(LoRAPerceptron())}
    assert names == {
        layer: (f"{layer}.lora_A.default.weight", f"{layer}.lora_B.default.weight") for layer in ("hidden", "output")
    }


def test_only_adapters_cross(make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path) -> None:
    module = LoRAPerceptron()
    frozen = module.hidden.base_layer.weight.clone()
    trainer = fitted(make_trainer, keeps_files, module)
    numbers = 2 * (3 + 4) + 2 * (4 + 2)
    assert bits_of(trainer, "up") == bits_of(trainer, "down") == {"model": 32 * numbers * 3}
    assert torch.equal(module.hidden.base_layer.weight, frozen)
    row = read_rows(tmp_path)[-1]
    assert (int(row["model/trainable"]), int(row["model/parameters"])) == (numbers, numbers + 26)


def test_the_error_of_the_product_is_the_covariance_of_the_factors(
    make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    seen, module = Recorded(), LoRAPerceptron().double()
    start = {name: p.detach().clone().numpy() for name, p in module.named_parameters()}
    fitted(make_trainer, {**keeps_files, "precision": "64-true", "max_rounds": 1}, module, AdapterError(), seen)
    crossings = seen.rounds[0]
    shares = np.array([SIZES[c.client] for c in crossings]) / sum(SIZES[c.client] for c in crossings)
    squares = np.zeros(2)
    for layer, place in {"hidden": 0, "output": 14}.items():
        shapes = {"A": (2, 3), "B": (4, 2)} if layer == "hidden" else {"A": (2, 4), "B": (2, 2)}
        cut = place + np.prod(shapes["A"])
        deltas = [c.decoded["model"].numpy() for c in crossings]
        a0, b0 = (start[f"{layer}.lora_{factor}.default.weight"] for factor in "AB")
        a = np.array([a0 + x[place:cut].reshape(shapes["A"]) for x in deltas])
        b = np.array([b0 + x[cut : cut + np.prod(shapes["B"])].reshape(shapes["B"]) for x in deltas])
        mean_a, mean_b = np.tensordot(shares, a, 1), np.tensordot(shares, b, 1)
        covariance = sum(p * (y - mean_b) @ (x - mean_a) for p, x, y in zip(shares, a, b, strict=True))
        moved = sum(p * y @ x for p, x, y in zip(shares, a, b, strict=True)) - b0 @ a0
        squares += (covariance**2).sum(), (moved**2).sum()
    found = float(read_rows(tmp_path)[0]["lora/product_error"])
    assert found == pytest.approx(float(np.sqrt(squares[0] / squares[1])), rel=1e-6)
    assert found > 1e-3


def test_with_frozen_a_there_is_no_such_error(make_trainer: MakeTrainer, keeps_files: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="trains none: with one factor frozen"):
        fitted(make_trainer, keeps_files, LoRAPerceptron(freezes_a=True), AdapterError())


def test_with_frozen_a_the_product_is_the_mean_of_the_clients_products(
    make_trainer: MakeTrainer, keeps_files: dict[str, Any]
) -> None:
    seen, module = Recorded(), LoRAPerceptron(freezes_a=True).double()
    a = module.hidden.lora_A["default"].weight.clone().numpy()
    fitted(make_trainer, {**keeps_files, "precision": "64-true", "max_rounds": 1}, module, seen)
    arrived = {c.client: c.decoded["model"].numpy()[:8].reshape(4, 2) for c in seen.rounds[0]}
    mean = sum(SIZES[client] * b @ a for client, b in arrived.items()) / sum(SIZES[client] for client in arrived)
    product = module.hidden.lora_B["default"].weight @ module.hidden.lora_A["default"].weight
    np.testing.assert_allclose(product.detach().numpy(), mean, atol=1e-12)
    assert np.abs(mean).max() > 1e-3


def test_fedldf_takes_both_factors_of_a_client(make_trainer: MakeTrainer) -> None:
    seen = Recorded()
    trainer = make_trainer(callbacks=[seen], max_rounds=3, clients_per_round=4)
    trainer.fit(LoRAPerceptron(), federation(), FedLDF(n=1))
    for crossings in seen.rounds.values():
        for crossing in crossings:
            for factors in (slice(0, 14), slice(14, 26)):
                sent = crossing.sent["model"][factors] != 0 if "model" in crossing.sent else torch.zeros(1)
                assert sent.all() or not sent.any()


def test_fedadam_ssm_learns_where_b_begins_with_0(make_trainer: MakeTrainer) -> None:
    module = LoRAPerceptron()
    module.configure = lambda m: torch.optim.Adam([p for p in m.parameters() if p.requires_grad], lr=0.05)
    before = vector(module)
    make_trainer(max_rounds=3).fit(module, federation(), FedAdamSSM(alpha=0.5))
    assert np.isfinite(vector(module)).all()
    assert (vector(module) != before).any()


class Rotary(Perceptron):
    """Perceptron that scales its inputs by a constant, which it does not save, and counts its batches beside it."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([1.0, 0.5, 2.0]), persistent=False)
        self.register_buffer("count", torch.zeros(()), persistent=False)
        self.counts, self.begins = counts, set[float]()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.counts:
            if batch_idx == 0:
                self.begins.add(float(self.count))
            self.count += 1
        return super().training_step(batch, batch_idx)


def test_buffers_that_are_not_saved_are_not_sent(make_trainer: MakeTrainer) -> None:
    serial, stacked = fits(make_trainer, Rotary(), federation)
    for module, trainer in (serial, stacked):
        assert "buffers" not in bits_of(trainer, "up")
        assert module.scale.tolist() == [1.0, 0.5, 2.0]
    np.testing.assert_allclose(vector(serial[0]), vector(stacked[0]), atol=1e-5)


def test_what_a_client_writes_to_an_unsaved_buffer_reaches_no_other(make_trainer: MakeTrainer) -> None:
    module = Rotary(counts=True)
    make_trainer(runner="serial").fit(module, federation())
    assert module.begins == {0.0}


@pytest.mark.parametrize("callback", [AdapterError, AdapterExport])
def test_a_module_without_adapters_is_refused(callback: Any, make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match="Perceptron"):
        make_trainer(callbacks=[callback()]).fit(Perceptron(), federation())


# -- with peft ------------------------------------------------------------------------------------------------------------


def language_model() -> Any:
    """Return a GPT-2 of 28,544 parameters with LoRA of rank 4 on the attention."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    settings = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    return transformers.GPT2LMHeadModel(config), settings, peft


class Writer(L.LightningModule):
    """Module that predicts the next symbol."""

    def __init__(self, freezes_a: bool = False) -> None:
        super().__init__()
        base, settings, peft = language_model()
        self.model = peft.get_peft_model(base, settings)
        if freezes_a:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_("lora_B" in name)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.03)


def sentences() -> Arrays:
    """Return text in which a symbol follows its predecessor + 1 or + 2, so that it can be learned."""
    rng = np.random.default_rng(0)
    steps = rng.integers(1, 3, size=(48, 16)).cumsum(1) % 8
    text = torch.from_numpy(steps)
    return Arrays(
        train=(text[:40], torch.zeros(40)),
        test=(text[40:], torch.zeros(8)),
        num_clients=6,
        batch_size=4,
        partition=Sizes(),
    )


@pytest.mark.parametrize(("freezes_a", "numbers"), [(False, 1024), (True, 768)])
def test_a_language_model_learns_and_sends_adapters_alone(
    freezes_a: bool, numbers: int, make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    module = Writer(freezes_a)
    callbacks = [AdapterExport(), *([] if freezes_a else [AdapterError()])]
    trainer = make_trainer(callbacks=callbacks, max_rounds=6, **keeps_files)
    trainer.fit(module, sentences())
    assert all("lora_" in name for name in trainer.run.layout.names)
    assert bits_of(trainer, "up") == bits_of(trainer, "down") == {"model": 32 * numbers * 3}
    rows = read_rows(tmp_path)
    losses = [float(row["val/loss"]) for row in rows]
    assert losses[-1] < losses[0] - 0.05
    assert (int(rows[0]["model/parameters"]), int(rows[0]["model/trainable"])) == (28_544 + 1024, numbers)
    assert freezes_a or all(float(row["lora/product_error"]) > 0 for row in rows)

    base, _, peft = language_model()
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    text = sentences()
    text.setup("fit")
    batch = next(iter(text.val_dataloader()))[0]
    module.eval(), loaded.eval()
    with torch.no_grad():
        assert torch.equal(module.model(input_ids=batch).logits, loaded(input_ids=batch).logits)


def test_a_language_model_learns_with_the_mean_of_the_products(
    make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    method = Algorithm(aggregator=KeepUploads(WeightedMean()), steps=(ProductMean(),))
    make_trainer(max_rounds=6, **keeps_files).fit(Writer(), sentences(), method)
    losses = [float(row["val/loss"]) for row in read_rows(tmp_path)]
    assert losses[-1] < losses[0] - 0.05


def test_the_servers_adapters_are_the_mean_of_those_that_lightning_trains(
    make_trainer: MakeTrainer, make_stock_trainer: Callable[..., L.Trainer]
) -> None:
    """Compare a round with one minibatch a client, in which the order of its samples does not matter."""
    torch.manual_seed(0)
    first = Writer()
    for part in first.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    text = torch.from_numpy(np.random.default_rng(0).integers(1, 3, size=(40, 16)).cumsum(1) % 8)
    data = Arrays(
        train=(text, torch.zeros(40)), test=(text, torch.zeros(40)), partition=Sizes(), num_clients=6, batch_size=12
    )
    trainer, module = make_trainer(max_rounds=1, clients_per_round=6), copy.deepcopy(first)
    trainer.fit(module, data)
    mean = {name: torch.zeros_like(p) for name, p in first.named_parameters() if p.requires_grad}
    for size, indices in zip(SIZES, data.client_indices, strict=True):
        client = copy.deepcopy(first)
        loader = DataLoader(TensorDataset(text[torch.from_numpy(np.asarray(indices))]), batch_size=12)
        make_stock_trainer(max_epochs=1).fit(client, loader)
        for name, parameter in client.named_parameters():
            if name in mean:
                mean[name] += size / sum(SIZES) * parameter.detach()
    assert len(mean) == 4
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(
            parameter.detach(), mean.get(name, first.get_parameter(name).detach()), rtol=0, atol=1e-6
        )

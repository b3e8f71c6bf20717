"""Modules and data of other people's packages, as their users write them: small networks, synthetic data, no network access."""

from collections.abc import Callable
from typing import Any, NamedTuple

import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

BATCH_SIZE, NUM_TRAIN, NUM_VAL = 4, 22, 6
"""The last of the training's batches is smaller, and has more than one sample."""


class Project(NamedTuple):
    module: L.LightningModule
    data: L.LightningDataModule


class Loaders(L.LightningDataModule):
    """Data module of two loaders."""

    def __init__(self, train: DataLoader, val: DataLoader) -> None:
        super().__init__()
        self.train, self.val = train, val

    def train_dataloader(self) -> DataLoader:
        return self.train

    def val_dataloader(self) -> DataLoader:
        return self.val


def loaders(train: Dataset, val: Dataset, **options: Any) -> Loaders:
    return Loaders(
        DataLoader(train, batch_size=BATCH_SIZE, shuffle=True, **options),
        DataLoader(val, batch_size=BATCH_SIZE, **options),
    )


def chemprop() -> Project:
    """Message passing on molecules: chains of carbon and oxygen, and the share of oxygen."""
    package = pytest.importorskip("chemprop")
    rng = np.random.default_rng(0)
    smiles = ["".join(rng.choice(["C", "O"], 3 + i % 4)) for i in range(NUM_TRAIN + NUM_VAL)]
    points = [package.data.MoleculeDatapoint.from_smi(s, np.array([s.count("O") / len(s)])) for s in smiles]
    train, val = (package.data.MoleculeDataset(part) for part in (points[:NUM_TRAIN], points[NUM_TRAIN:]))
    module = package.models.MPNN(
        package.nn.BondMessagePassing(d_h=12, depth=2),
        package.nn.MeanAggregation(),
        package.nn.RegressionFFN(input_dim=12, hidden_dim=8),
        batch_norm=True,
        warmup_epochs=1,
        max_lr=1e-2,
    )
    build = package.data.build_dataloader
    return Project(module, Loaders(build(train, BATCH_SIZE), build(val, BATCH_SIZE, shuffle=False)))


def scvi() -> Project:
    """Variational autoencoder of cells."""
    package = pytest.importorskip("scvi")
    import anndata  # comes with scvi-tools

    rng = np.random.default_rng(0)
    cells = anndata.AnnData(rng.poisson(3.0, (NUM_TRAIN + NUM_VAL, 10)).astype(np.float32))
    cells.obs["batch"] = [str(i % 2) for i in range(len(cells))]
    package.model.SCVI.setup_anndata(cells, batch_key="batch")
    model = package.model.SCVI(cells, n_hidden=8, n_latent=3)
    data = package.dataloaders.DataSplitter(
        model.adata_manager,
        train_size=NUM_TRAIN / (NUM_TRAIN + NUM_VAL),
        shuffle_set_split=False,
        batch_size=BATCH_SIZE,
    )
    return Project(package.train.TrainingPlan(model.module, n_epochs_kl_warmup=None, n_steps_kl_warmup=8), data)


def _series(package: Any, **options: Any) -> tuple[Any, Loaders]:
    import pandas as pd

    time = np.arange(16)
    rows = [
        pd.DataFrame({"group": name, "time": time, "value": np.sin(time / 2 + phase) + 3})
        for phase, name in enumerate("ab")
    ]
    table = pd.concat(rows, ignore_index=True)
    train = package.TimeSeriesDataSet(
        table[table.time < 16],
        time_idx="time",
        target="value",
        group_ids=["group"],
        max_encoder_length=4,
        min_encoder_length=4,
        max_prediction_length=2,
        time_varying_unknown_reals=["value"],
        **options,
    )
    val = package.TimeSeriesDataSet.from_dataset(train, table, predict=True, stop_randomization=True)
    return train, Loaders(
        train.to_dataloader(train=True, batch_size=BATCH_SIZE),  # with drop_last=True
        val.to_dataloader(train=False, batch_size=BATCH_SIZE),
    )


def temporal_fusion_transformer() -> Project:
    package = pytest.importorskip("pytorch_forecasting")
    train, data = _series(package, static_categoricals=["group"], time_varying_known_reals=["time"])
    module = package.TemporalFusionTransformer.from_dataset(
        train, hidden_size=4, attention_head_size=2, hidden_continuous_size=4, learning_rate=0.01
    )
    return Project(module, data)


def n_beats() -> Project:
    package = pytest.importorskip("pytorch_forecasting")
    train, data = _series(package)
    return Project(package.NBeats.from_dataset(train, widths=[8, 8], num_blocks=[1, 1], learning_rate=0.01), data)


class SimCLR(L.LightningModule):
    """SimCLR as in lightly's tutorial."""

    def __init__(self, head: nn.Module, criterion: nn.Module) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 6, 3, 2), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.projection_head = head
        self.criterion = criterion

    def forward(self, x: Tensor) -> Tensor:
        return self.projection_head(self.backbone(x).flatten(start_dim=1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x0, x1), _, _ = batch
        loss = self.criterion(self(x0), self(x1))
        self.log("train_loss_ssl", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.06, momentum=0.9, weight_decay=5e-4)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)]


class Views(Dataset):
    """lightly's random views of images of noise; the same views each time that an image is read."""

    def __init__(self, transform: Any, num: int) -> None:
        self.transform, self.num = transform, num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, i: int) -> Any:
        from PIL import Image

        pixels = np.random.default_rng(i).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        with torch.random.fork_rng():
            torch.manual_seed(i)
            return self.transform(Image.fromarray(pixels)), i % 2, f"{i}.png"


def lightly() -> Project:
    pytest.importorskip("lightly")
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead
    from lightly.transforms import SimCLRTransform

    transform = SimCLRTransform(input_size=12, gaussian_blur=0.0)
    data = loaders(Views(transform, NUM_TRAIN), Views(transform, NUM_VAL))
    return Project(SimCLR(SimCLRProjectionHead(6, 6, 4), NTXentLoss()), data)


class Classifier(L.LightningModule):
    """Text classifier around a transformer of Hugging Face."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = self.transformer(**batch)
        self.log("train_loss", outputs.loss)
        return outputs.loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        outputs = self.transformer(**batch)
        self.log("val_loss", outputs.loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Texts(Dataset):
    def __init__(self, num: int, generates: bool) -> None:
        self.num, self.generates = num, generates

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        tokens = torch.randint(2, 20, (6,), generator=torch.Generator().manual_seed(i))
        mask = torch.ones(6, dtype=torch.long)
        mask[4 + i % 3 :] = 0
        labels = tokens.where(mask == 1, -100) if self.generates else (tokens[0] % 2)
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def bert() -> Project:
    package = pytest.importorskip("transformers")
    config = package.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, num_labels=2
    )
    module = Classifier(package.BertForSequenceClassification(config))
    return Project(module, loaders(Texts(NUM_TRAIN, False), Texts(NUM_VAL, False)))


def gpt2() -> Project:
    """A language model, whose output layer is its embedding."""
    package = pytest.importorskip("transformers")
    config = package.GPT2Config(
        vocab_size=20, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1
    )
    return Project(Classifier(package.GPT2LMHeadModel(config)), loaders(Texts(NUM_TRAIN, True), Texts(NUM_VAL, True)))


class Images(L.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def timm() -> Project:
    package = pytest.importorskip("timm")
    x = torch.randn(NUM_TRAIN + NUM_VAL, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    y = torch.arange(len(x)) % 3
    data = loaders(TensorDataset(x[:NUM_TRAIN], y[:NUM_TRAIN]), TensorDataset(x[NUM_TRAIN:], y[NUM_TRAIN:]))
    return Project(Images(package.create_model("test_efficientnet", num_classes=3)), data)


PROJECTS: dict[str, Callable[[], Project]] = {
    "chemprop MPNN": chemprop,
    "scvi-tools TrainingPlan": scvi,
    "pytorch-forecasting TFT": temporal_fusion_transformer,
    "pytorch-forecasting N-BEATS": n_beats,
    "lightly SimCLR": lightly,
    "transformers BERT": bert,
    "transformers GPT-2": gpt2,
    "timm EfficientNet": timm,
}

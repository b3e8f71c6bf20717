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


def _loaders_of_other_name(train: DataLoader, val: DataLoader) -> Any:
    """Return a data module of `pytorch_lightning` with two loaders, for a module of that name."""
    import pytorch_lightning as pl

    class OtherLoaders(pl.LightningDataModule):
        def train_dataloader(self) -> DataLoader:
            return train

        def val_dataloader(self) -> DataLoader:
            return val

    return OtherLoaders()


def nhits() -> Project:
    """Forecaster of 22 series, with its own data module."""
    pytest.importorskip("neuralforecast")
    import pandas as pd
    from neuralforecast.models import NHITS
    from neuralforecast.tsdataset import TimeSeriesDataModule, TimeSeriesDataset

    days = pd.date_range("2020", periods=20)
    series = [
        pd.DataFrame({"unique_id": f"{i:02}", "ds": days, "y": np.sin(np.arange(20) / 2 + i)}) for i in range(NUM_TRAIN)
    ]
    dataset, *_ = TimeSeriesDataset.from_df(pd.concat(series), id_col="unique_id", time_col="ds", target_col="y")
    module = NHITS(
        h=2,
        input_size=6,
        n_blocks=[1] * 3,
        mlp_units=[[8, 8]] * 3,
        max_steps=20,
        windows_batch_size=8,
        learning_rate=0.01,
        random_seed=0,
    )
    module.val_size, module.test_size = 2, 0
    return Project(module, TimeSeriesDataModule(dataset, batch_size=BATCH_SIZE))


def darts() -> Project:
    """Forecaster, with the data module that its `fit` makes of two series."""
    pytest.importorskip("darts")
    from darts import TimeSeries
    from darts.models import NBEATSModel

    series = TimeSeries.from_values(np.sin(np.arange(NUM_TRAIN + 7, dtype=np.float32) / 2))
    model = NBEATSModel(
        6,
        2,
        num_stacks=2,
        num_blocks=1,
        num_layers=2,
        layer_widths=8,
        batch_size=BATCH_SIZE,
        random_state=0,
        pl_trainer_kwargs={"accelerator": "cpu"},
    )
    validated = series[-NUM_VAL - 7 :]
    _, parts = model._setup_for_fit_from_dataset([series], val_series=[validated])
    parts = model._setup_for_train(**parts)
    return Project(parts["model"], parts["datamodule"])


def tabular() -> Project:
    """Classifier of a table with numbers and categories; the package writes `.pt_tmp` into the current folder."""
    pytest.importorskip("pytorch_tabular")
    import pandas as pd
    from pytorch_tabular import TabularModel
    from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
    from pytorch_tabular.models import CategoryEmbeddingModelConfig

    rng, num = np.random.default_rng(0), NUM_TRAIN + NUM_VAL
    table = pd.DataFrame({"a": rng.normal(size=num), "b": rng.choice(["x", "y"], num), "target": np.arange(num) % 2})
    model = TabularModel(
        data_config=DataConfig(target=["target"], continuous_cols=["a"], categorical_cols=["b"]),
        model_config=CategoryEmbeddingModelConfig(task="classification", layers="8-4"),
        optimizer_config=OptimizerConfig(),
        trainer_config=TrainerConfig(batch_size=BATCH_SIZE, accelerator="cpu"),
        verbose=False,
    )
    data = model.prepare_dataloader(train=table[:NUM_TRAIN], validation=table[NUM_TRAIN:], seed=0)
    return Project(model.prepare_model(data), _loaders_of_other_name(data.train_dataloader(), data.val_dataloader()))


def torchgeo() -> Project:
    """Classifier of patches, whose data module drops a last batch that is not full."""
    pytest.importorskip("torchgeo")
    from torchgeo.datamodules import NonGeoDataModule
    from torchgeo.datasets import NonGeoDataset
    from torchgeo.trainers import ClassificationTask

    class Patches(NonGeoDataset):
        def __init__(self, first: int, num: int) -> None:
            self.first, self.num = first, num

        def __len__(self) -> int:
            return self.num

        def __getitem__(self, i: int) -> dict[str, Tensor]:
            generator = torch.Generator().manual_seed(self.first + i)
            return {"image": torch.rand(3, 32, 32, generator=generator), "label": torch.tensor(i % 3)}

    class Data(NonGeoDataModule):
        def setup(self, stage: str) -> None:
            if stage == "fit":
                self.train_dataset = Patches(0, NUM_TRAIN)
            self.val_dataset = Patches(NUM_TRAIN, NUM_VAL)

    return Project(ClassificationTask("test_efficientnet", num_classes=3), Data(Patches, batch_size=BATCH_SIZE))


def anomalib() -> Project:
    """Reconstruction of features, whose error tells anomalies."""
    pytest.importorskip("anomalib")
    from anomalib.data import ImageBatch, ImageItem
    from anomalib.models import Fre

    class Pictures(Dataset):
        def __init__(self, num: int) -> None:
            self.num = num

        def __len__(self) -> int:
            return self.num

        def __getitem__(self, i: int) -> Any:
            image = torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(i))
            return ImageItem(image=image, gt_label=torch.tensor(0))

    module = Fre(
        "resnet18",
        pre_trained=False,
        input_dim=1024,
        latent_dim=8,
        pre_processor=False,
        post_processor=False,
        evaluator=False,
        visualizer=False,
    )
    return Project(module, loaders(Pictures(NUM_TRAIN), Pictures(NUM_VAL), collate_fn=ImageBatch.collate))


PROJECTS: dict[str, Callable[[], Project]] = {
    "chemprop MPNN": chemprop,
    "scvi-tools TrainingPlan": scvi,
    "pytorch-forecasting TFT": temporal_fusion_transformer,
    "pytorch-forecasting N-BEATS": n_beats,
    "lightly SimCLR": lightly,
    "transformers BERT": bert,
    "transformers GPT-2": gpt2,
    "timm EfficientNet": timm,
    "neuralforecast NHITS": nhits,
    "darts N-BEATS": darts,
    "pytorch-tabular CategoryEmbedding": tabular,
    "torchgeo Classification": torchgeo,
    "anomalib FRE": anomalib,
}

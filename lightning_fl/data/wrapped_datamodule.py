"""`Federated`: divide any LightningDataModule, or a LightningModule with its own loaders, over clients."""

from __future__ import annotations

from typing import Any

import lightning as L  # noqa: N812  (Lightning's own name for it)
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader

from lightning_fl.checks import check_whole
from lightning_fl.data.federated_data_module import FederatedDataModule
from lightning_fl.data.partition import IID, Partition
from lightning_fl.data.samples.dataset_samples import DatasetSamples, require_map_style, samples_of
from lightning_fl.data.samples.tensor_samples import Samples, TensorSamples
from lightning_fl.errors import require

_LIGHTNING = (L.LightningDataModule, L.LightningModule)


class Federated(FederatedDataModule):
    """Divide another data module's training set over clients; its validation and test loaders stay as they are.

    The clients read the dataset of `datamodule.train_dataloader()` with that loader's collate function and workers.
    Classes, which every partition except IID needs, are read from the dataset's `targets`, `labels` or `tensors[1]`.

    Args:
        datamodule: the LightningDataModule to divide, or any object with train_dataloader(), such as a LightningModule.
        num_clients: clients in the federation, at least 1 and at most the number of training samples.
        partition: division of the clients' samples: IID, Shards or Dirichlet.
        batch_size: samples per training batch, at least 1; None: as in the datamodule's training loader.
        num_classes: number of classes, at least 1; None: the largest label plus one.
        **kwargs: arguments of FederatedDataModule: fractions, server data and seed.
    """

    def __init__(
        self,
        datamodule: L.LightningDataModule | L.LightningModule,
        num_clients: int = 100,
        partition: Partition = IID(),  # noqa: B008  (immutable)
        batch_size: int | None = None,
        num_classes: int | None = None,
        **kwargs: Any,
    ) -> None:
        known_size = 1 if batch_size is None else batch_size
        super().__init__(num_clients=num_clients, partition=partition, batch_size=known_size, **kwargs)
        if num_classes is not None:
            check_whole("num_classes", num_classes, 1)
        require(
            callable(getattr(datamodule, "train_dataloader", None)),
            f"{type(datamodule).__name__} cannot be divided over clients: it has no train_dataloader().",
        )
        self.datamodule = datamodule
        self._batch_size_given = batch_size is not None
        self._num_classes = num_classes
        self._stages: set[str] = set()

    @property
    def num_classes(self) -> int | None:
        """Given number of classes, or after `setup` the largest label plus one; None without classes."""
        return self._num_classes

    @property
    def in_channels(self) -> int | None:
        """Channels of an image after `setup`; None before it, or if the samples are not tensors C×H×W."""
        if not hasattr(self, "train"):
            return None
        if isinstance(self.train, TensorSamples):
            shape = self.train.sample_shape
        else:
            assert isinstance(self.train, DatasetSamples)
            sample = self.train.dataset[0]
            first = sample[0] if isinstance(sample, (tuple, list)) else sample
            shape = first.shape if isinstance(first, torch.Tensor) else torch.Size()
        return shape[0] if len(shape) == 3 else None

    def prepare_data(self) -> None:
        """Call the datamodule's own `prepare_data`, which may download files."""
        prepare = getattr(self.datamodule, "prepare_data", None)
        if callable(prepare):
            prepare()

    def load(self) -> tuple[Samples, None]:
        """Return the training set of the datamodule's loader."""
        self._set_up("fit")
        loader = self.datamodule.train_dataloader()
        name = type(self.datamodule).__name__
        require(
            isinstance(loader, DataLoader),
            f"{name}.train_dataloader() returns a {type(loader).__name__}: only a single torch DataLoader can be "
            "divided over clients.",
        )
        require_map_style(loader.dataset)
        if not self._batch_size_given:
            require(
                loader.batch_size is not None,
                f"{name}'s training loader has no batch_size (it has its own batch sampler): set batch_size.",
            )
            self.batch_size = loader.batch_size
        train = samples_of(loader.dataset, loader.collate_fn, loader.num_workers, worker_init_fn=loader.worker_init_fn)
        if self._num_classes is None and train.labels is not None and len(train.labels):
            self._num_classes = int(train.labels.max()) + 1
        return train, None

    def val_dataloader(self) -> Any:
        """Return a loader of the clients' validation parts, or the datamodule's own one if `val_fraction` is 0."""
        return super().val_dataloader() if self.val_fraction > 0 else self._passed_through("val_dataloader", "validate")

    def test_dataloader(self) -> Any:
        """Return the datamodule's test loader."""
        return self._passed_through("test_dataloader", "test")

    def predict_dataloader(self) -> Any:
        """Return the datamodule's prediction loader, or its test loader if it has none."""
        own = is_overridden("predict_dataloader", self.datamodule)
        return self._passed_through("predict_dataloader" if own else "test_dataloader", "predict" if own else "test")

    def _passed_through(self, hook: str, stage: str) -> Any:
        loader = getattr(self.datamodule, hook, None)
        if loader is None or (isinstance(self.datamodule, _LIGHTNING) and not is_overridden(hook, self.datamodule)):
            return []
        self._set_up(stage)
        return loader()

    def _set_up(self, stage: str) -> None:
        """Set up the datamodule once per stage, as Lightning does; 'fit' includes its validation data."""
        if stage not in self._stages and not (stage == "validate" and "fit" in self._stages):
            self._stages.add(stage)
            setup = getattr(self.datamodule, "setup", None)
            if callable(setup):
                setup(stage)

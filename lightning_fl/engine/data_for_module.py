"""Compare what a module computes with, its classes and its dtype, with the labels and images of the data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fl.checks import is_whole
from lightning_fl.data import FederatedDataModule, SampleLoader, TensorSamples
from lightning_fl.data.samples.dataset_samples import dataset_labels
from lightning_fl.errors import UserError, require
from lightning_fl.modules import ImageClassifier


def check_labels(module: LightningModule, data: FederatedDataModule) -> None:
    """Check the labels of all training and test samples as `check_loaders` does."""
    labels = data.train.labels
    # Those of a data set that are no classes, such as -1 for none, are none for the module either.
    labels = dataset_labels(data.train.source) if labels is None and data.train.source is not None else labels
    _compare(module, labels, "training")
    _compare(module, None if data.test is None else data.test.labels, "test")


def check_loaders(module: LightningModule, loaders: Iterable[Any], stage: str) -> None:
    """Compare all labels that the data sets of loaders name with the number of the module's classes.

    Args:
        module: the module.
        loaders: loaders of the user's.
        stage: what sentences call the samples.

    Raises:
        UserError: the module is an image classifier of this package, and a label is none of its classes. For other modules
            with `num_classes` this is a warning, because theirs may mean something else.
    """
    for loader in loaders:
        # `check_labels` has seen the samples of a `SampleLoader`.
        dataset = None if isinstance(loader, SampleLoader) else getattr(loader, "dataset", None)
        if hasattr(dataset, "__len__"):
            _compare(module, dataset_labels(dataset), stage)


def _compare(module: LightningModule, labels: np.ndarray | None, stage: str) -> None:
    attribute = getattr(module, "num_classes", None)
    num_classes = module.hparams.get("num_classes") if attribute is None else attribute
    if labels is None or num_classes is None or not is_whole(num_classes):
        return
    is_ours = isinstance(module, ImageClassifier)
    # Others may mark samples without a class by a negative number.
    outside = np.flatnonzero((labels >= num_classes) | (is_ours & (labels < 0)))
    if not len(outside):
        return
    sentence = (
        f"{len(outside):,} of {len(labels):,} labels of the {stage} samples are none of the {num_classes} classes of "
        f"{type(module).__name__}, 0 to {num_classes - 1}: the first is {labels[outside[0]]}, of sample {outside[0]:,}; correct "
        "the labels, or num_classes."
    )
    require(not is_ours, sentence)
    rank_zero_warn(sentence)


def check_dtype(module: LightningModule, data: FederatedDataModule, fabric: Fabric) -> None:
    """Raise `UserError` if a network of this package computes with another dtype than its images have."""
    train = data.train
    is_ours = isinstance(module, ImageClassifier) and isinstance(module.hparams.get("network"), str)
    if not is_ours or not isinstance(train, TensorSamples):
        return
    dtype = torch.float32 if train.inputs.dtype == torch.uint8 else train.inputs.dtype
    read = fabric.strategy.precision.convert_input(torch.zeros(1, dtype=dtype)).dtype
    needed = next(module.parameters()).dtype
    if read == needed or (read.is_floating_point and "mixed" in str(fabric.strategy.precision.precision)):
        return
    images, floats = (str(one).removeprefix("torch.") for one in (dtype, needed))
    precision = ", or set precision 64-true" if read == torch.float64 else ""
    raise UserError(
        f"The images of {type(data).__name__} are {images}, but {type(module).__name__} computes in {floats}: convert them, as "
        f"x.to(torch.{floats}) or x.astype('{floats}') do{precision}."
    )

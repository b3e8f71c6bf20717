"""`Federated`: divide any LightningDataModule, or a LightningModule with its own loaders, over clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any

import lightning as L  # noqa: N812  (Lightning's own name for it)
import numpy as np
import torch
from annotated_types import Ge
from torch.utils.data import DataLoader

from lightning_fl.checks import is_a, is_whole, overrides
from lightning_fl.data.federated_data_module import FederatedDataModule
from lightning_fl.data.partitions.client_indices import ClientIndices
from lightning_fl.data.partitions.partition import Partition
from lightning_fl.data.partitions.sizes import IID
from lightning_fl.data.samples.dataset_samples import DatasetSamples, dataset_labels, named_labels, seeded
from lightning_fl.data.samples.evaluation_pipeline import EvaluationPipeline, loaders_in
from lightning_fl.data.samples.given_classes import given_classes
from lightning_fl.data.samples.own_loaders import (
    OwnLoader,
    OwnLoaders,
    check_client_loaders,
    refuse_reading,
    settings_of_samples,
)
from lightning_fl.data.samples.tensor_samples import Samples, Selection, TensorSamples
from lightning_fl.data.sources import Source
from lightning_fl.data.split_checks import (
    MOST_CLASSES,
    are_quantities,
    needing_classes,
    say_other_labels,
    warn_of_gaps,
)
from lightning_fl.data.training_loader import read_loader
from lightning_fl.errors import UserError, require

EVALUATIONS = ("validate", "test", "predict")
"""Stages that need training samples only for what they hold out of them."""
BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class Federated(FederatedDataModule):
    """Divide another data module's training set over clients; its validation and test loaders stay as they are.

    The clients read the dataset of `datamodule.train_dataloader()` with that loader's collate function and workers. All
    hooks of a LightningDataModule are called as `lightning.Trainer` calls them, and its attributes are found here, too.
    Classes, which every partition except IID needs, are read from the dataset's `targets`, `labels` or `tensors[1]`, unless
    `class_of` says where they are: whole numbers (n,) or (n, 1), true and false; where a setting needs classes, also whole floats
    and text, in sorted order. Whole numbers are quantities if some are negative, or if the largest is at least the number of
    samples, and it is at least 10,000 or most differ or are as large.

    Args:
        datamodule: the LightningDataModule to divide, or any object with train_dataloader(), such as a LightningModule.
        num_clients: clients in the federation, at least 1 and at most the number of training samples; null with ByGroup, a
            client for each group, and with GivenIndices, one for each list.
        partition: division of the clients' samples: IID, Shards, Dirichlet, Classes, ClassPriors, QuantitySkew, LogNormalSizes,
            ByGroup, which makes the users of the samples the clients, or GivenIndices, a split from index lists.
        batch_size: samples per training batch, at least 1; None: as in the datamodule's training loader.
        num_classes: number of classes, at least 1; None: the largest label plus one, or the datamodule's own `num_classes` if
            that is more.
        drop_last: True if clients leave out the last batch of a pass when it is not full, False if they read all samples; None:
            as the datamodule's training loader. The server reads all of its samples.
        class_of: class of each training sample: an array (n,) of whole numbers or text, a function from a sample to its class, or
            the name of an attribute or column of the dataset, or else of each sample; None: as above.
        eval_transform: function of each input, in place of the dataset's `transform`, where held-out samples (of `val_fraction`)
            and the server's are evaluated; None: the transforms of the dataset of the datamodule's validation loader, or without
            one of its test loader, if it is of the same class, else those of training, which is said.
        eval_collate_fn: function from a list of samples to a batch there; None: that of the same loader, else that of training.
        client_loaders: function from a client's index, 0..num_clients-1, to what it reads in training: a loader, also of an
            IterableDataset, a list or dictionary of loaders, or any iterable of batches; called once for each client, and nothing
            is divided. Runner lightning trains such clients. None: divide the datamodule's training set. A single client reads
            the datamodule's training loader as it is if runner lightning trains it, or if the loader cannot be divided.
        num_samples: number of samples of each client with `client_loaders`, (num_clients,), at least 1, by which averages weigh
            them; None: unknown, so that all clients weigh the same.
        **kwargs: arguments of FederatedDataModule: fractions, server data and seed.
    """

    changeable = FederatedDataModule.changeable | {
        "class_of",
        "datamodule",
        "client_loaders",
        "drop_last",
        "eval_collate_fn",
        "eval_transform",
    }

    def __init__(
        self,
        datamodule: L.LightningDataModule | L.LightningModule,
        num_clients: int | None = 100,
        partition: Partition = IID(),  # noqa: B008  (immutable)
        batch_size: int | None = None,
        num_classes: Annotated[int, Ge(1)] | None = None,
        drop_last: bool | None = None,
        class_of: Any = None,
        eval_transform: Callable[[Any], Any] | None = None,
        eval_collate_fn: Callable[[list], Any] | None = None,
        client_loaders: Callable[[int], Any] | None = None,
        num_samples: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        known_size = 1 if batch_size is None else batch_size
        self.datamodule = datamodule
        super().__init__(num_clients=num_clients, partition=partition, batch_size=known_size, **kwargs)
        self.prepare_data_per_node = getattr(datamodule, "prepare_data_per_node", True)
        require(
            client_loaders is not None or callable(getattr(datamodule, "train_dataloader", None)),
            f"{type(datamodule).__name__} cannot be divided over clients: it has no train_dataloader().",
        )
        self._batch_size_given = batch_size is not None
        self._drop_last_given = drop_last is not None
        self.drop_last = bool(drop_last)
        self.class_of = class_of
        self.eval_transform, self.eval_collate_fn = eval_transform, eval_collate_fn
        self.client_loaders, self.num_samples = client_loaders, num_samples
        check_client_loaders(self)
        self._next_loader: Any = None
        """Training loader that was read to see whether it can be divided, until it is used."""
        self._divisible: tuple[Samples, int, bool] | None = None
        """Result of `read_loader` for it."""
        self._num_classes = num_classes
        self._num_classes_given = num_classes is not None
        self._stages: set[str] = set()
        """Stages for which the datamodule is set up."""
        if is_a(datamodule, L.LightningDataModule):
            for hook in BATCH_HOOKS:
                # Trainers look for overridden hooks, and otherwise call those of the module.
                if overrides(hook, datamodule):
                    setattr(self, hook, getattr(datamodule, hook))
        self._hide_missing_loaders()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the datamodule, because modules read theirs as `self.trainer.datamodule.…`."""
        wrapped = vars(self).get("datamodule")
        if wrapped is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            return getattr(wrapped, name)
        except AttributeError as error:
            raise AttributeError(f"{error}, and neither has Federated, which wraps it") from error

    @property
    def trainer(self) -> Any:
        """Trainer that uses the data, which the datamodule's own hooks can read as well."""
        return vars(self).get("_trainer")

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        self._trainer = trainer
        if is_a(self.datamodule, L.LightningDataModule):
            self.datamodule.trainer = trainer

    @property
    def num_classes(self) -> int | None:
        """Given number of classes, else the datamodule's own, unless it is below the largest label plus one, found by `setup`."""
        own = self._own("num_classes")
        if self._num_classes_given or own is None:
            return self._num_classes
        return max(own, self._num_classes or 0)

    def _own(self, name: str) -> int | None:
        """Return a whole number that is an attribute of the datamodule; None if it is none."""
        own = None
        with suppress(Exception):  # a property of it may need its own setup
            own = getattr(vars(self).get("datamodule"), name, None)
        return own if is_whole(own) else None

    @property
    def in_channels(self) -> int | None:
        """Channels of an image after `setup`; before it, or if the samples are not tensors C×H×W, the datamodule's own."""
        shape = self._shape()
        return shape[0] if len(shape) == 3 else self._own("in_channels")

    @property
    def image_size(self) -> int | None:
        """Height and width of images as an attribute of the datamodule says; None if it has none, or samples have others."""
        own, shape = self._own("image_size"), self._shape()
        return own if len(shape) != 3 or tuple(shape[1:]) == (own, own) else None

    def _shape(self) -> Sequence[int]:
        """Return the shape of a sample's first part; empty before `setup`, or if that is no tensor."""
        if "train" not in vars(self) or self.reads_own_loaders:
            return ()
        if isinstance(self.train, TensorSamples):
            return self.train.sample_shape
        assert isinstance(self.train, DatasetSamples)
        with seeded(0):  # a random transform
            sample = self.train.dataset[0]
        first = sample[0] if isinstance(sample, (tuple, list)) else sample
        return first.shape if isinstance(first, torch.Tensor) else ()

    def prepare_data(self) -> None:
        """Call the datamodule's own `prepare_data`, which may download files."""
        prepare = getattr(self.datamodule, "prepare_data", None)
        if callable(prepare):
            prepare()

    def setup(self, stage: str | None = None) -> None:
        """Set up the datamodule for the stage, as Lightning does, and divide its training set."""
        if stage == "fit" and "fit" not in self._stages:
            # The datamodule is set up anew, and may then hold back other samples for validation.
            self.is_set_up = False
        if not self.is_set_up and self._reads_training_samples(stage):
            self._set_up_training(stage)
        elif not self.is_set_up:
            self._leave_undivided(TensorSamples(torch.zeros(0, 1)), [0] * (self._num_clients or 1))
        if stage is not None:
            self._set_up(stage)

    def _reads_training_samples(self, stage: str | None) -> bool:
        """True if a stage needs training samples: a fit, held-out samples, or callbacks that ask for those of several clients."""
        if stage not in EVALUATIONS or (stage == "validate" and self.val_fraction > 0):
            return True
        return overrides("train_dataloader", self.datamodule) and self._num_clients != 1

    def _set_up_training(self, stage: str | None) -> None:
        """Divide the training set, or let each client read its own loader."""
        self._set_up("fit")
        if self.client_loaders is not None:
            source = self.client_loaders
        elif self._num_clients == 1 and not settings_of_samples(self) and self._is_read_whole():
            source = self._take_training_loader
        else:
            super().setup(stage)
            return
        assert self._num_clients is not None
        sizes = [1] * self._num_clients if self.num_samples is None else self.num_samples
        self._leave_undivided(OwnLoaders(source), sizes)
        self.is_set_up = True

    def _is_read_whole(self) -> bool:
        """True if the single client reads the training loader as it is: with runner lightning, or where it cannot be divided."""
        if getattr(self.trainer, "by_lightning", False):
            return True
        self._next_loader = self.datamodule.train_dataloader()
        try:
            self._divisible = read_loader(self._next_loader, type(self.datamodule).__name__)
        except UserError:
            return True
        return False

    def _take_training_loader(self, client: int = 0) -> Any:
        """Return the datamodule's training loader, read anew unless it has just been read."""
        loader, self._next_loader = self._next_loader, None
        return self.datamodule.train_dataloader() if loader is None else loader

    def _leave_undivided(self, train: Samples, sizes: Sequence[int]) -> None:
        """Divide nothing.

        Args:
            train: stands for the training samples.
            sizes: number of samples of each client.
        """
        self.train, self.num_clients = train, len(sizes)
        none = np.zeros(0, dtype=np.int64)
        self.client_indices = ClientIndices(none, np.asarray(sizes))
        self.client_val_indices = ClientIndices(none, np.zeros(len(sizes)))
        self._count_clients()

    def client(self, k: int, places: np.ndarray | None = None) -> Selection:
        """Return the training samples of client `k`, 0..num_clients-1, or those at some places; or what its own loader reads.

        Raises:
            UserError: an adversary would change what is read through a loader of its own.
        """
        if not self.reads_own_loaders:
            return super().client(k, places)
        return OwnLoader(k, int(self.client_sizes[k])) if self._read is None else refuse_reading()

    def pooled(self) -> FederatedDataModule:
        """Return a copy with one client, which holds the samples of all.

        Raises:
            UserError: several clients read loaders of their own.
        """
        if not self.reads_own_loaders:
            return super().pooled()
        require(
            self.num_clients == 1,
            "clients read loaders of their own, so that their samples cannot be pooled: use another method, or one client.",
        )
        return self

    def sources(self) -> list[Source]:
        """Return the holders of training samples.

        Raises:
            UserError: clients read loaders of their own.
        """
        if self.reads_own_loaders:
            refuse_reading()
        return super().sources()

    def description(self) -> str:
        """Describe the split in one line."""
        if not self.reads_own_loaders:
            return super().description()
        wrapped, count = type(self.datamodule).__name__, self.num_clients
        if self.client_loaders is None:
            return f"Federated: one client, which reads the training loader of {wrapped} as it is; test data as given."
        weights = (
            "; their numbers of samples are unknown, so that all weigh the same" if self.num_samples is None else ""
        )
        return f"Federated: {count:,} clients with loaders of their own{weights}; test data as given."

    def teardown(self, stage: str) -> None:
        """Call the datamodule's own `teardown`; the next stage sets it up again."""
        self._stages.clear()
        self._call("teardown", stage=stage)

    def on_exception(self, exception: BaseException) -> None:
        """Call the datamodule's own `on_exception`; the next stage sets it up again."""
        self._stages.clear()
        self._call("on_exception", exception)

    def state_dict(self) -> dict[str, Any]:
        """Return the datamodule's own state, for checkpoints."""
        return self._call("state_dict") or {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the datamodule's own state."""
        self._call("load_state_dict", state_dict)

    def _call(self, hook: str, *arguments: Any, **named: Any) -> Any:
        """Call a hook of a LightningDataModule; a trainer calls those of a LightningModule itself."""
        if is_a(self.datamodule, L.LightningDataModule):
            return getattr(self.datamodule, hook)(*arguments, **named)
        return None

    def load(self) -> tuple[Samples, None]:
        """Return the training set of the datamodule's loader."""
        self._set_up("fit")
        name = type(self.datamodule).__name__
        loader = self._take_training_loader()
        divisible, self._divisible = self._divisible or read_loader(loader, name), None
        train, batch_size, drop_last = divisible
        if not self._batch_size_given:
            self.batch_size = batch_size
        if not self._drop_last_given:
            self.drop_last = drop_last
        self._find_classes(train)
        if not self._num_classes_given and train.labels is not None and len(train.labels):
            self._num_classes = int(train.labels.max()) + 1
            if self._own("num_classes") is None:
                warn_of_gaps(train.labels, self._num_classes, "correct the labels, or give num_classes")
        if self.val_fraction > 0 or self.server_fraction > 0 or self.server_groups or self._clients_are_asked():
            train.in_evaluation = self._in_evaluation(train, loader)
        return train, None

    def _clients_are_asked(self) -> bool:
        """True if a callback asks clients about the model, as FedAP's does."""
        callbacks = getattr(self.trainer, "callbacks", [])
        return any(one.asks_clients(False) for one in callbacks if hasattr(one, "asks_clients"))

    def _find_classes(self, train: Samples) -> None:
        """Set the class of each training sample: the given ones, else those that the data set names, if they are classes."""
        needed_by = needing_classes(self)
        if self.class_of is not None:
            train.labels, train.class_names = given_classes(self.class_of, train.source)
            largest = int(train.labels.max(initial=0))
            require(
                self.num_classes is not None or largest < max(len(train.labels), MOST_CLASSES),
                f"class_of gives numbers up to {largest:,}, but classes are numbered from 0: give them as text, or give "
                "num_classes.",
            )
            return
        if train.labels is None:
            found = named_labels(train.source) if needed_by else (dataset_labels(train.source), None)
            train.labels, train.class_names = found or (None, None)
        remedy = "give Federated class_of or num_classes"
        if not self._num_classes_given and are_quantities(train.labels, remedy, needed_by):
            train.labels = None
        if train.labels is not None:
            say_other_labels(train.source)

    def _in_evaluation(self, train: Samples, loader: DataLoader) -> Samples | None:
        """Return the training samples as the datamodule's validation reads its own, None if as in training.

        Args:
            train: training samples.
            loader: training loader.
        """
        given = self.eval_transform, self.eval_collate_fn
        loaders = () if None not in given else self._evaluation_loaders(isinstance(train, DatasetSamples))
        dataset = train.dataset if isinstance(train, DatasetSamples) else train.source
        read = EvaluationPipeline(loaders, *given).read(train, dataset, loader.collate_fn)
        return None if read is train else read

    def _evaluation_loaders(self, may_change_samples: bool) -> tuple[DataLoader, ...]:
        """Return the datamodule's validation loaders; without any its test loaders, if training may change samples."""
        for hook, stage in (("val_dataloader", "validate"), ("test_dataloader", "test"))[: 1 + may_change_samples]:
            try:
                loaders = loaders_in(self._passed_through(hook, stage))
            except Exception:  # of the user's: without data for validation, which this run does not need
                loaders = ()
            if loaders:
                return loaders
        return ()

    def train_dataloader(self) -> Any:
        """Return a loader of all clients' training samples, pooled and shuffled; a single client's own loader as it is.

        Raises:
            UserError: several clients read loaders of their own.
        """
        if not isinstance(self.train, OwnLoaders):
            return super().train_dataloader()
        return self.train.loader_of(0) if self.num_clients == 1 else refuse_reading()

    def val_dataloader(self) -> Any:
        """Return a loader of the clients' validation parts, or the datamodule's own one if `val_fraction` is 0."""
        return super().val_dataloader() if self.val_fraction > 0 else self._passed_through("val_dataloader", "validate")

    def test_dataloader(self) -> Any:
        """Return the datamodule's test loader."""
        return self._passed_through("test_dataloader", "test")

    def predict_dataloader(self) -> Any:
        """Return the datamodule's prediction loader, or its test loader if it has none."""
        predicts = overrides("predict_dataloader", self.datamodule)
        return self._passed_through(
            "predict_dataloader" if predicts else "test_dataloader", "predict" if predicts else "test"
        )

    def _hide_missing_loaders(self) -> None:
        """Put Lightning's own hooks in place of those that have no loader, so that trainers see that there is none."""
        for hook in ("val_dataloader", "test_dataloader", "predict_dataloader"):
            vars(self).pop(hook, None)
            if not self._offers(hook) and getattr(type(self), hook) is getattr(Federated, hook):
                # Unlike a method of this object, a partial can be pickled in it.
                setattr(self, hook, partial(getattr(L.LightningDataModule, hook), self))

    def _offers(self, hook: str) -> bool:
        """True if a hook has something to return a loader of."""
        if hook == "val_dataloader" and self.val_fraction > 0:
            return True
        hooks = (hook, "test_dataloader") if hook == "predict_dataloader" else (hook,)
        return any(overrides(name, self.datamodule) for name in hooks)

    def _passed_through(self, hook: str, stage: str) -> Any:
        self._set_up(stage)
        return getattr(self.datamodule, hook)()

    def _set_up(self, stage: str) -> None:
        """Set up the datamodule, once between two teardowns; 'fit' includes its validation data."""
        if stage not in self._stages and not (stage == "validate" and "fit" in self._stages):
            self._stages.add(stage)
            setup = getattr(self.datamodule, "setup", None)
            if callable(setup):
                setup(stage=stage)  # by name, as Lightning does
                self._hide_missing_loaders()  # it may have set some of its hooks

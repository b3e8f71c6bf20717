"""`FederatedDataModule`: a `LightningDataModule` whose training data are divided over clients and a server.

The training samples are split into the clients' pool and the server's pool; the clients' pool is divided by a
`Partition`; each client may hold out a part of its own for validation; the server draws its data from its pool
(Liu et al., Efficient Federated Learning Using Dynamic Update and Adaptive Pruning with Momentum on Shared Server Data,
ACM TIST 2024: 40,000 CIFAR images for the clients, the server's drawn from the other 10,000). In a stock `L.Trainer`
the same module is the centralised baseline: all clients' samples pooled and shuffled.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import lightning as L  # noqa: N812  (Lightning's own name for it)
import numpy as np
import torch
from annotated_types import Ge, Interval

from lightning_fl.checks import LARGEST_SEED, Remembering, is_a, whole_share
from lightning_fl.data.descriptions import describe_split, settings_in_one_line
from lightning_fl.data.non_iid_degree import label_histograms, non_iid_degree
from lightning_fl.data.partitions.client_indices import ClientIndices
from lightning_fl.data.partitions.given_indices import check_parts, joined
from lightning_fl.data.partitions.partition import Partition, Pool, require_enough
from lightning_fl.data.partitions.sizes import IID
from lightning_fl.data.samples.evaluation_pipeline import say_unknown
from lightning_fl.data.samples.loaders import SampleLoader
from lightning_fl.data.samples.own_loaders import OwnLoaders
from lightning_fl.data.samples.tensor_samples import Samples, Selection
from lightning_fl.data.server_samples import draw_server
from lightning_fl.data.shift import Shift, shift_clients
from lightning_fl.data.sources import Source
from lightning_fl.data.split import GroupsOfClients, hold_out, needed_groups, server_pool
from lightning_fl.data.split_checks import NO_CLASSES, check_labels, check_settings
from lightning_fl.data.users import Groups, as_names, groups_of_test
from lightning_fl.errors import require

# One random stream per purpose: changing one of them (say, the server's data) does not change the others.
POOL, PARTITION, VALIDATION, SERVER, HELD_OUT, SHARED, GROUPS = range(7)
OFFERED = ("num_classes", "in_channels", "image_size")
"""Properties of the data from which the command line takes a module's parameters of these names."""


class FederatedDataModule(Remembering, L.LightningDataModule, ABC):
    """Training data divided over clients and a server. A subclass reads them in `load`.

    Args:
        num_clients: clients in the federation, at least 1 and at most the number of training samples; null with ByGroup, a
            client for each group, and with GivenIndices, one for each list.
        batch_size: samples per training batch, at least 1.
        partition: division of the clients' samples: IID, Shards, Dirichlet, Classes, ClassPriors, QuantitySkew, LogNormalSizes,
            ByGroup, which makes the users of the samples the clients, or GivenIndices, a split from index lists.
        client_fraction: share of the training samples for the clients, in (0, 1]; the rest is the server's pool. With 1,
            clients get all samples that `server_fraction` leaves.
        server_fraction: number of the server's samples relative to the clients' samples, in [0, 1); drawn from the server's
            pool.
        server_classes: draw the server's samples from this many random classes in equal parts; None: uniformly from its pool.
        server_degree: draw the server's samples with this non-IID degree, in [0, 1]; not together with server_classes.
        groups: user (writer, speaker …) of each training sample, for ByGroup and server_groups: an array (n,), a function from a
            sample's index to its name, or the name of a column of the data; null: `groups`, `users` or `client_ids` of the
            data set, if it has them.
        server_groups: share of the groups whose samples go to the server, in [0, 1): all their samples, or as many as
            server_fraction says.
        shift: change of the images that differs from client to client, for any partition: Rotation, Noise or Corruption. It
            changes the clients' training and validation parts, but neither the test set, from which the clients' own test
            samples come, nor the server's samples; null: none.
        val_fraction: share of its samples that each client holds out for validation, in [0, 1); 0: validate on the test set.
        eval_batch_size: samples per batch in validation, test and prediction, at least 1.
        seed: seed of every split, at least 0.

    Raises:
        UserError: a value is not allowed; or, in `setup`, there are too few samples for it.
    """

    num_left_out = 0
    """Training samples that the partition gives to no client, after `setup`; those of groups are not counted."""
    shuffled_files = False
    """True if the training files are already in random order, which is kept; otherwise samples are shuffled first."""
    changeable = frozenset({"batch_size", "eval_batch_size"})
    """Parameters that a resumed run may change; the others decide which samples a client has."""
    drop_last = False
    """True if clients leave out the last batch of a pass when it is not full."""
    test_remedy = "give it some"
    """Remedy for missing test data, for the error message."""
    class_remedy = NO_CLASSES
    """Place of the classes and remedy without any, for the error message."""

    def __init__(
        self,
        num_clients: Annotated[int, Ge(1)] | None = 100,
        batch_size: Annotated[int, Ge(1)] = 10,
        partition: Partition = IID(),  # noqa: B008  (immutable)
        client_fraction: Annotated[float, Interval(gt=0, le=1)] = 1.0,
        server_fraction: Annotated[float, Interval(ge=0, lt=1)] = 0.0,
        server_classes: Annotated[int, Ge(1)] | None = None,
        server_degree: Annotated[float, Interval(ge=0, le=1)] | None = None,
        groups: Any = None,
        server_groups: Annotated[float, Interval(ge=0, lt=1)] | None = None,
        shift: Shift | None = None,
        val_fraction: Annotated[float, Interval(ge=0, lt=1)] = 0.0,
        eval_batch_size: Annotated[int, Ge(1)] = 500,
        seed: Annotated[int, Interval(ge=0, le=LARGEST_SEED)] = 0,
    ) -> None:
        super().__init__()
        self._num_clients = num_clients
        # None until `setup` has counted the groups
        self.num_clients: int = num_clients  # type: ignore[assignment]
        self.batch_size = batch_size
        self.partition = partition
        self.client_fraction = client_fraction
        self.server_fraction = server_fraction
        self.server_classes = server_classes
        self.server_degree = server_degree
        self.groups = as_names(groups) if isinstance(groups, (list, tuple)) else groups
        self.server_groups = server_groups
        self.shift = shift
        self.val_fraction = val_fraction
        self.eval_batch_size = eval_batch_size
        self.seed = seed
        check_settings(self)
        if client_fraction == 1 and not server_groups:
            self.client_fraction = 1 / (1 + server_fraction)
        self.is_set_up = False
        self.train: Samples
        """All training samples: those of the clients, their validation parts, and the server's pool."""
        self.test: Samples | None = None
        """Test samples, or None if `test_dataloader` reads them elsewhere."""
        self.client_indices = ClientIndices.of([])
        """Indices into `train` (int64) of each client's training samples."""
        self.client_val_indices = ClientIndices.of([])
        """Indices into `train` (int64) of each client's validation samples."""
        self.client_test_indices = ClientIndices.of([])
        """Indices into `test` (int64) of each client's own test samples: those of its groups, or what a subclass sets in
        `after_split`; else empty."""
        self.groups_of_clients: GroupsOfClients | None = None
        """Groups of each client with the partition `ByGroup`, else None."""
        self.server_indices: np.ndarray = np.zeros(0, dtype=np.int64)
        """Indices into `train` (int64) of the server's samples."""
        self.client_sizes: np.ndarray = np.zeros(0, dtype=np.int64)
        """Training samples per client, (N,) int64; 0 if `drop_last` leaves the client no batch, so that it is never selected."""
        self._label_histograms: np.ndarray | None = None
        self._read: Callable[[int, Selection], Selection] | None = None
        self.server_histogram: np.ndarray | None = None
        """Server samples per class, (C,) int64; None without classes."""

    @abstractmethod
    def load(self) -> tuple[Samples, Samples | None]:
        """Read the data: training samples and test samples. Called once."""

    @property
    def num_classes(self) -> int | None:
        """Number of classes, or None if the data have none."""
        return None

    @property
    def in_channels(self) -> int | None:
        """Number of channels of an image, or None if the data are not images."""
        return None

    @property
    def image_size(self) -> int | None:
        """Height and width of the images in pixels, or None if the data are not square images."""
        return None

    @property
    def client_names(self) -> np.ndarray | None:
        """Name of each client's group, (N,) strings; None unless each client is one group."""
        return None if self.groups_of_clients is None else self.groups_of_clients.names

    @property
    def largest_client(self) -> int:
        """Client with the most training samples; of equal ones the first."""
        return int(self.client_sizes.argmax())

    @property
    def has_classes(self) -> bool:
        """True if the class of each training sample and the number of classes are known, after `setup`."""
        return "train" in vars(self) and self.train.labels is not None and self.num_classes is not None

    @property
    def reads_own_loaders(self) -> bool:
        """True if clients read loaders of their own, after `setup`: then no samples are divided."""
        return isinstance(vars(self).get("train"), OwnLoaders)

    @property
    def label_histograms(self) -> np.ndarray | None:
        """Training samples per client and class, (N, C) int64; None without classes. Counted at the first use."""
        if self._label_histograms is None and self.has_classes:
            assert self.train.labels is not None
            assert self.num_classes is not None
            self._label_histograms = label_histograms(self.train.labels, self.client_indices, self.num_classes)
        return self._label_histograms

    def setup(self, stage: str | None = None) -> None:
        """Load and split the data, once; every stage sees the same split.

        Raises:
            UserError: the data are missing, or there are too few samples for the settings.
        """
        if self.is_set_up:
            return
        self.train, self.test = self.load()
        num_samples = len(self.train)
        order = np.arange(num_samples) if self.shuffled_files else self._rng(POOL).permutation(num_samples)
        num_pooled = min(
            round(self.client_fraction * num_samples), whole_share(1 / (1 + self.server_fraction), num_samples)
        )
        clients_pool, servers_pool = order[:num_pooled], order[num_pooled:]
        check_labels(self.train, self.test, self.num_classes, self)
        groups = needed_groups(self.train, self.groups, self.partition, self.server_groups or 0.0)
        if self.server_groups and groups is not None:
            clients_pool, servers_pool = server_pool(order, groups, self.server_groups, self._rng(GROUPS))
        self._split_clients(clients_pool, groups)
        takes_all = bool(self.server_groups) and self.server_fraction == 0
        count = len(servers_pool) if takes_all else round(self.server_fraction * len(clients_pool))
        self.server_indices, self.server_histogram = draw_server(self, servers_pool, count, self._rng(SERVER))
        if self.shift is not None:
            owners = np.maximum(self.client_indices.owners(num_samples), self.client_val_indices.owners(num_samples))
            shift_clients(self.shift, self.train, owners, self.num_clients, self.seed)
        self.after_split()
        self.is_set_up = True

    def after_split(self) -> None:
        """Finish the samples once the clients' indices are known. Does nothing unless a subclass overrides it."""

    def client(self, k: int, places: np.ndarray | None = None) -> Selection:
        """Return the training samples of client `k`, 0..num_clients-1, or those at some places of them alone."""
        rows = self.client_indices[k]
        selection = self.train.select(rows if places is None else rows[places])
        return selection if self._read is None else self._read(k, selection)

    def read_through(self, read: Callable[[int, Selection], Selection]) -> FederatedDataModule:
        """Return a copy whose clients' samples a function of a client and its samples changes; all else is shared."""
        changed = copy.copy(self)
        changed._read = read
        return changed

    def enlarged(self, extra: Sequence[np.ndarray]) -> FederatedDataModule:
        """Return a copy whose clients also train on `extra` samples; it shares everything else with this one.

        Args:
            extra: indices into `train` (int64) for each client.
        """
        changed = copy.copy(self)
        pairs = zip(self.client_indices, extra, strict=True)
        changed.client_indices = ClientIndices.of([np.concatenate(pair) for pair in pairs])
        changed._count_clients()
        return changed

    def pooled(self) -> FederatedDataModule:
        """Return a copy with one client that holds the samples of all clients; it shares everything else with this one."""
        changed = copy.copy(self)
        changed.num_clients, changed.groups_of_clients = 1, None
        for name in ("client_indices", "client_val_indices", "client_test_indices"):
            setattr(changed, name, ClientIndices.of([getattr(self, name).joined]))
        changed._count_clients()
        return changed

    def share(self, count: int) -> FederatedDataModule:
        """Return a copy in which every client that has samples also trains on `count` random ones of the server.

        Args:
            count: at most the number of the server's samples; if equal, all clients get the same samples.
        """
        held = self.server_indices

        def received(client: int) -> np.ndarray:
            if not len(self.client_indices[client]):
                return held[:0]
            if count == len(held):
                return held
            return np.random.default_rng([self.seed, SHARED, client]).choice(held, count, replace=False)

        return self.enlarged([received(client) for client in range(self.num_clients)])

    def server_data(self) -> Selection | None:
        """Return the server's samples, or None if it has none."""
        return self.train.select(self.server_indices) if len(self.server_indices) else None

    def sources(self) -> list[Source]:
        """Return a source for the server, if it has samples, then one for each client that has training samples."""
        parts = [self.server_indices, *self.client_indices]
        rows = [row for row, indices in enumerate(parts) if len(indices)]
        degrees = np.zeros(len(parts))
        if self.label_histograms is not None and self.server_histogram is not None:
            counts = np.vstack([self.server_histogram, self.label_histograms])
            degrees[rows] = non_iid_degree(counts[rows], self.label_histograms.sum(0))
        samples = self.train.in_evaluation or self.train
        return [Source(row - 1 if row else None, samples, parts[row], float(degrees[row])) for row in rows]

    @property
    def evaluated(self) -> Samples:
        """All training samples as evaluation reads them; a note is printed once if training transforms may be among them."""
        say_unknown(self.train)
        return self.train.in_evaluation or self.train

    def place(self, device: torch.device) -> None:
        """Move the samples to `device` once, if they can be moved: see `Samples.place`."""
        for samples in (self.train, self.train.in_evaluation, self.test):
            if samples is not None:
                samples.place(device)

    def train_dataloader(self) -> Any:
        """Return a loader of all clients' training samples, pooled and shuffled: a centralised baseline.

        In a stock trainer with several processes each reads its share, because Lightning divides only loaders of torch. With its
        `overfit_batches`, the samples come in order, so that every epoch has the same batches.
        """
        joined = self.client_indices.joined
        trainer: Any = self.trainer
        is_stock = is_a(trainer, L.Trainer) and not hasattr(trainer, "sources")
        divides = is_stock and trainer._accelerator_connector.use_distributed_sampler
        share = (trainer.distributed_sampler_kwargs if divides else None) or {}
        if is_stock and trainer.overfit_batches:
            rank, num_replicas = share.get("rank", 0), share.get("num_replicas", 1)
            own = np.resize(joined, -(-len(joined) // num_replicas) * num_replicas)[rank::num_replicas]
            return SampleLoader(self.train, own, self.batch_size)
        return SampleLoader(self.train, joined, self.batch_size, self.seed, self.drop_last, **share)

    def val_dataloader(self) -> Any:
        """Return a loader of all clients' validation parts, or of the test set if `val_fraction` is 0."""
        if self.val_fraction > 0:
            return SampleLoader(self.evaluated, self.client_val_indices.joined, self.eval_batch_size)
        return self.test_dataloader()

    def test_dataloader(self) -> Any:
        """Return a loader of the test set, in order."""
        require(
            self.test is not None, f"{type(self).__name__} has no test data: {self.test_remedy}, or set val_fraction."
        )
        assert self.test is not None
        return SampleLoader(self.test, None, self.eval_batch_size)

    def predict_dataloader(self) -> Any:
        """Return a loader of the test set, in order."""
        return self.test_dataloader()

    def require_own_test_samples(self, reader: str) -> None:
        """Raise `UserError` if no client has test samples of its own; `reader` would measure clients on them."""
        owner, tested = type(self).__name__, self.client_test_indices
        why = f"the test samples of {owner} belong to no client's users"
        if not len(tested):
            why = f"{owner} {'divides no test set' if self.test is None else 'has one test set for all'}"
        require(
            any(map(len, tested)),
            f"{reader} finds no test samples of the clients' own, because {why}: use part 'validation' with data.val_fraction.",
        )

    def description(self) -> str:
        """Describe the split in one line."""
        return describe_split(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({settings_in_one_line(self)})"

    __str__ = __repr__  # Lightning's own calls all loaders, which read the data

    def _rng(self, purpose: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, purpose])

    def _split_clients(self, pool: np.ndarray, groups: Groups | None) -> None:
        if self._num_clients is not None:
            require_enough(len(pool), self._num_clients)
        if not self.partition.takes_shuffled:
            pool = np.sort(pool)
        labels = self.train.labels
        pool_labels = np.zeros(len(pool), dtype=np.int64) if labels is None else labels[pool]
        view = Pool(pool_labels, None if groups is None else groups.take(pool))
        places = self.partition.divide(view, self._num_clients, self._rng(PARTITION))
        if not isinstance(places, ClientIndices):  # of a partition of the user's own
            name = type(self.partition).__name__
            places = joined(places, f"what {name} returns")
            check_parts(places, self._num_clients, len(pool), f"as {name} divides")
        parts = ClientIndices(pool[places.joined], places.sizes)
        self.num_clients = len(parts)
        self.num_left_out = 0 if self.partition.needs_groups else len(pool) - len(parts.joined)
        if groups is not None and self.partition.needs_groups:
            self.groups_of_clients = GroupsOfClients.of(groups, pool, parts)
            tested = None if self.test is None else groups_of_test(self.test, self.groups)
            self.client_test_indices = ClientIndices.of([])
            if tested is not None:
                self.client_test_indices = self.groups_of_clients.test_parts(tested)
        # Not pool[:0], which would keep the pool in memory.
        self.client_val_indices = ClientIndices(np.zeros(0, dtype=np.int64), np.zeros(len(parts)))
        if self.val_fraction > 0:
            parts, self.client_val_indices = hold_out(parts, self.val_fraction, self._rng(VALIDATION))
        self.client_indices = parts
        self._count_clients()

    def _count_clients(self) -> None:
        sizes = self.client_indices.sizes
        self.client_sizes = np.where(sizes < self.batch_size, 0, sizes) if self.drop_last else sizes
        self._label_histograms = None

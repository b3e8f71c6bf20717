"""Checks of a data module's settings, before and after the data are read."""

from __future__ import annotations

import reprlib
from typing import Any

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import Subset

from lightning_fl.data.partitions.partition import Partition
from lightning_fl.data.samples.tensor_samples import Samples
from lightning_fl.data.shift import Shift
from lightning_fl.data.split_data import SplitData
from lightning_fl.errors import require

NO_CLASSES = (
    "(in targets, labels or tensors[1]): give Federated class_of, a function from a sample to its class or a name"
)
"""End of a sentence that the data have no classes."""

MOST_CLASSES = 10_000
"""Most classes that are found in data without being named, unless there are more samples."""

FEWEST_SAMPLES = 20
"""Samples from which on targets that differ from each other are quantities."""


def check_settings(data: SplitData) -> None:
    """Raise `UserError` unless the settings fit together, and partition, shift and groups are what they should be."""
    require(
        isinstance(data.partition, Partition),
        f"partition={reprlib.repr(data.partition)} is not a Partition: use an instance such as IID(), Shards() or Dirichlet(); "
        "GivenIndices(lists) takes a list of sample indices for each client.",
    )
    _check_groups(data)
    require(
        data.shift is None or isinstance(data.shift, Shift),
        f"shift={reprlib.repr(data.shift)} is not a Shift: use an instance such as Rotation(), Noise() or Corruption().",
    )
    share, server_fraction = data.client_fraction, data.server_fraction
    require(
        bool(data.server_groups) or share == 1 or server_fraction * share <= 1 - share + 1e-9,
        f"server_fraction={server_fraction} of the clients' share is more than client_fraction={share} "
        f"leaves for the server: lower client_fraction to {1 / (1 + server_fraction):.3g} or less.",
    )
    require(
        data.server_classes is None or data.server_degree is None,
        f"server_classes={data.server_classes} and server_degree={data.server_degree} exclude each other: set only one.",
    )


def _check_groups(data: SplitData) -> None:
    """Raise `UserError` if settings would cut groups, which a partition keeps whole, or give groups that nothing reads."""
    partition, share, server_groups = data.partition, data.client_fraction, data.server_groups or 0
    require(
        data.num_clients is not None or partition.needs_groups or partition.knows_num_clients,
        "num_clients is null, but only ByGroup finds it in the data, and GivenIndices in its lists: give the number of clients "
        f"for {partition}.",
    )
    require(
        data.groups is None or partition.needs_groups or server_groups > 0,
        f"groups are given, but {partition} does not use them: set partition to ByGroup.",
    )
    require(
        server_groups == 0 or share == 1,
        f"client_fraction={share} and server_groups={server_groups} exclude each other: leave out client_fraction.",
    )
    name, value = ("client_fraction", share) if share < 1 else ("server_fraction", data.server_fraction)
    require(
        not partition.needs_groups or (share == 1 and (data.server_fraction == 0 or server_groups > 0)),
        f"{name}={value} would take samples away from the groups that {partition} makes clients: give the server whole groups "
        "with server_groups, such as 0.05.",
    )
    taken = f"server_groups={server_groups}" if server_groups else f"{name}={value}"
    require(
        not partition.divides_all or (share == 1 and data.server_fraction == 0 and not server_groups),
        f"{taken} would take samples away from the clients, but {partition} says which client has which: leave it out.",
    )


def needing_classes(data: SplitData) -> str:
    """Return the setting that needs the class of each sample, or an empty text."""
    if data.partition.needs_labels:
        return str(data.partition)
    names = ("server_classes", "server_degree")
    return next((f"{name}={getattr(data, name)}" for name in names if getattr(data, name) is not None), "")


def check_labels(train: Samples, test: Samples | None, num_classes: int | None, data: SplitData) -> None:
    """Raise `UserError` if settings need classes that the training samples lack, or some labels are not 0..num_classes-1.

    Warns of test samples whose label no training sample has.
    """
    labels = train.labels
    require(
        labels is not None or not data.partition.needs_labels,
        f"{data.partition} needs the class of each sample, but the data have none {data.class_remedy}, or use IID().",
    )
    require(
        (labels is not None and num_classes is not None)
        or (data.server_classes is None and data.server_degree is None),
        "server_classes and server_degree need the class of each sample and the number of classes, but the data have "
        f"none {data.class_remedy}.",
    )
    for part, part_labels in (("", labels), (" of the test set", None if test is None else test.labels)):
        if part_labels is None or num_classes is None or not len(part_labels):
            continue
        lowest, highest = part_labels.min(), part_labels.max()
        allowed = (
            "classes are numbered from 0: renumber them, or give Federated class_of"
            if lowest < 0
            else f"num_classes={num_classes} allows 0 to {num_classes - 1}"
        )
        require(
            bool(lowest >= 0 and highest < num_classes),
            f"The labels{part} go from {lowest} to {highest}, but {allowed}.",
        )
    if labels is not None and num_classes is not None and test is not None and test.labels is not None:
        unseen = ~np.isin(test.labels, labels)
        if unseen.any():
            classes = np.unique(test.labels[unseen]).tolist()
            named = ", ".join(map(str, classes[:5])) + (", …" if len(classes) > 5 else "")
            rank_zero_warn(
                f"{unseen.sum():,} of {len(unseen):,} test samples have a label that no training sample has ({named}), so no "
                "client can learn it: correct the labels if that is a mistake."
            )


def check_dropped(data: SplitData) -> None:
    """Say how many samples, and clients, are left out in a pass if clients drop a last batch that is not full.

    Raises:
        UserError: they would leave out all.
    """
    if not data.drop_last:
        return
    size, sizes = data.batch_size, data.client_indices.sizes
    sizes = sizes[sizes > 0]
    dropped, idle = int((sizes % size).sum()), int((sizes < size).sum())
    remedy = "set drop_last=False of Federated to read all, or a smaller batch_size"
    require(
        idle < len(sizes),
        f"drop_last=True leaves no client a batch: each has at most {sizes.max(initial=0):,} samples, and a batch has {size:,}: "
        f"{remedy}.",
    )
    if dropped:
        none = f"; {idle:,} of {len(sizes):,} clients have no full batch and are never selected" if idle else ""
        say = rank_zero_warn if idle else rank_zero_info
        say(
            f"drop_last=True leaves out {dropped:,} of the clients' {sizes.sum():,} samples in each pass{none}: {remedy}."
        )


def describe_largest(labels: np.ndarray, num_classes: int) -> str:
    """Return the start of a sentence about labels that count too many classes."""
    return f"the largest label is {num_classes - 1:,}, but only {len(np.unique(labels)):,} different labels occur"


def are_quantities(labels: np.ndarray | None, remedy: str, needed_by: str = "") -> bool:
    """True, and said, if whole numbers (n,) found in a data set are no classes, of which each would need a count.

    They are if some are negative, or if the largest is at least the number of samples and either at least `MOST_CLASSES` or,
    from `FEWEST_SAMPLES` on, most differ or are as large.

    Args:
        labels: the numbers, or None.
        remedy: what to do if they are classes.
        needed_by: setting that needs classes; empty if none does.

    Raises:
        UserError: they are quantities, and a setting needs classes.
    """
    if labels is None or not len(labels):
        return False
    lowest, highest, count = int(labels.min()), int(labels.max()), len(labels)
    too_many = highest >= count and (highest >= MOST_CLASSES or (count >= FEWEST_SAMPLES and most_differ(labels)))
    if lowest >= 0 and not too_many:
        return False
    found = f"the targets of {count:,} samples are whole numbers from {lowest:,} to {highest:,}"
    remedy = f"{remedy} if they are classes"
    require(
        not needed_by, f"{needed_by} needs the class of each sample, but {found}, so they are quantities; {remedy}."
    )
    rank_zero_info(f"{found[0].upper()}{found[1:]}, so they are taken for quantities; {remedy}.")
    return True


def most_differ(labels: np.ndarray) -> bool:
    """True if labels (n,) are mostly different from each other or at least n, so that few samples could have one class."""
    count = len(labels)
    return 2 * max(len(np.unique(labels)), int((labels >= count).sum())) > count


def say_other_labels(dataset: Any) -> None:
    """Say that the classes are those of the second tensor of a data set, if a later one could be the classes, too."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    tensors = getattr(dataset, "tensors", ())
    if sum(isinstance(one, Tensor) and one.dim() == 1 and not one.is_floating_point() for one in tensors[1:]) > 1:
        rank_zero_info(
            f"The classes of the samples are the second of {len(tensors)} tensors; if another has them, give Federated class_of."
        )


def warn_of_gaps(labels: np.ndarray, num_classes: int, remedy: str) -> None:
    """Warn if less than half of the classes occur, because a single wrong label can make many classes.

    Args:
        labels: (n,) integers.
        num_classes: largest label plus one.
        remedy: what to do about it.
    """
    if 2 * len(np.unique(labels)) < num_classes:
        largest = describe_largest(labels, num_classes)
        rank_zero_warn(f"{largest}, so the model gets {num_classes:,} classes: {remedy} if that is a mistake.")

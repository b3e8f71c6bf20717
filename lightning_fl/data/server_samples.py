"""Draw the server's samples from its pool.

Liu et al., Efficient Federated Learning Using Dynamic Update and Adaptive Pruning with Momentum on Shared Server Data,
ACM TIST 2024.

There are three ways to draw n0 samples without replacement: uniformly; ⌊n0 / l⌋ of each of l random classes; or at a
requested non-IID degree δ: with l the smallest number of classes whose degree D_l is at most δ, the mixture

    P_0 = (1 - λ) · U_{l-1 classes} + λ · U_{all classes}

where U is uniform and λ in [0, 1] is bisected so that D(P_0) = δ against the clients' own label distribution (D falls
as λ grows).
"""

from __future__ import annotations

import warnings

import numpy as np

from lightning_fl.checks import check_between
from lightning_fl.data.non_iid_degree import non_iid_degree
from lightning_fl.data.partitions.sizes import rounded_sizes
from lightning_fl.data.split_data import SplitData
from lightning_fl.errors import require

DEGREE_TOLERANCE = 0.01
"""Largest difference between drawn and requested degree without a warning; few images cannot realise every degree."""

EQUAL_DEGREES = 0.005
"""Relative difference up to which D_l counts as equal to the requested δ. The paper prints 0.61 for two classes. If D_2
were 0.6099 against these clients, δ = 0.61 would otherwise mix in the distribution of a single class."""


def draw_server(
    data: SplitData, pool: np.ndarray, count: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray | None]:
    """Draw the server's samples as the settings say.

    Args:
        data: settings, training samples and the clients' samples.
        pool: indices of the samples that the server may have.
        count: number of samples to draw.
        rng: the only source of randomness.

    Returns:
        Their indices, and their number per class, (C,) int64; None without classes.
    """
    require(
        count > 0 or data.server_fraction == 0,
        f"server_fraction={data.server_fraction} of the clients' samples is less than one sample: raise it or set "
        "it to 0.",
    )
    labels, num_classes = data.train.labels, data.num_classes
    if labels is None or num_classes is None:
        return draw_uniform(pool, count, rng), None
    if count and data.server_classes is not None:
        indices = draw_classes(pool, labels, count, data.server_classes, num_classes, rng)
    elif count and data.server_degree is not None:
        client_counts = np.bincount(labels[data.client_indices.joined], minlength=num_classes)
        indices = draw_degree(pool, labels, count, data.server_degree, client_counts, rng)
    else:
        indices = draw_uniform(pool, count, rng)
    return indices, np.bincount(labels[indices], minlength=num_classes)


def draw_uniform(pool: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw `count` of the indices in `pool` uniformly without replacement."""
    require_pool(len(pool), count)
    return rng.permutation(pool)[:count].copy()  # a view would keep the whole pool in memory


def draw_classes(
    pool: np.ndarray, labels: np.ndarray, count: int, server_classes: int, num_classes: int, rng: np.random.Generator
) -> np.ndarray:
    """Draw ⌊count / server_classes⌋ samples of each of `server_classes` random classes.

    Classes without a sample in the pool are drawn only if there are too few others. A class with fewer samples in the pool gives
    all of them; a warning then reports the total drawn.

    Args:
        pool: (m,) indices into `labels`.
        labels: (n,) integers in 0..num_classes-1.
        count: n0, samples wanted.
        server_classes: l, classes to draw from, 1..num_classes.
        num_classes: C.
        rng: the only source of randomness.

    Returns:
        The indices drawn, in random order.

    Raises:
        UserError: `count` is larger than the pool or smaller than `server_classes`, or there are too few classes.
    """
    require_pool(len(pool), count)
    require(
        server_classes <= num_classes,
        f"server_classes={server_classes} is not allowed: the data have {num_classes} classes.",
    )
    require(
        count >= server_classes,
        f"The server's {count:,} samples cannot cover server_classes={server_classes}: raise server_fraction or lower "
        "server_classes.",
    )
    available = np.bincount(labels[pool], minlength=num_classes)
    wanted, classes = np.zeros(num_classes, dtype=np.int64), rng.permutation(num_classes)
    present_first = classes[np.argsort(available[classes] == 0, kind="stable")]
    wanted[present_first[:server_classes]] = count // server_classes
    counts = np.minimum(wanted, available)
    if counts.sum() < wanted.sum():
        warnings.warn(
            f"The server holds {counts.sum():,} samples instead of {count:,}: each of {server_classes} classes should "
            f"give {count // server_classes:,}, but the server's pool has fewer of some classes.",
            stacklevel=2,
        )
    return _draw_counts(pool, labels, counts, rng)


def draw_degree(
    pool: np.ndarray, labels: np.ndarray, count: int, degree: float, reference: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Draw `count` samples whose non-IID degree against the clients is `degree`, as close as whole samples allow.

    Args:
        pool: (m,) indices into `labels`.
        labels: (n,) integers in 0..C-1.
        count: n0, samples wanted.
        degree: δ in [0, 1].
        reference: (C,) label counts of all clients together.
        rng: the only source of randomness (it also chooses the frequent classes).

    Returns:
        The indices drawn, in random order.

    Raises:
        UserError: `count` is larger than the pool, no label distribution has so high a degree, or a class of the pool
            has too few samples.
    """
    require_pool(len(pool), count)
    available, classes = np.bincount(labels[pool], minlength=len(reference)), rng.permutation(len(reference))
    present = (reference + available)[classes] > 0
    counts = counts_for_degree(count, degree, reference, classes[present])
    short = int(np.argmax(counts - available))
    require(
        bool((counts <= available).all()),
        f"server_degree={degree} with {count:,} server samples needs {counts[short]:,} of class {short}, but the "
        f"server's pool has {available[short]:,}: lower server_fraction, lower server_degree or lower client_fraction.",
    )
    reached = float(non_iid_degree(counts, reference))
    if abs(reached - degree) > DEGREE_TOLERANCE:
        warnings.warn(
            f"The server's {count:,} samples have non-IID degree {reached:.4f} instead of server_degree={degree}.",
            stacklevel=2,
        )
    return _draw_counts(pool, labels, counts, rng)


def counts_for_degree(count: int, degree: float, reference: np.ndarray, class_order: np.ndarray) -> np.ndarray:
    """Return whole numbers of samples per class, `count` in total, whose degree against `reference` is `degree`.

    Args:
        count: n0, at least 1.
        degree: δ in [0, 1].
        reference: (C,) label counts of all clients together.
        class_order: the classes that have samples, in some order; U_{l classes} is uniform over its first l.

    Returns:
        (C,) int64 counts.

    Raises:
        UserError: `degree` is larger than that of a single class.
    """
    check_between("server_degree", degree, 0, 1)
    num_classes = len(class_order)
    uniforms = np.zeros((num_classes, len(reference)))
    uniforms[:, class_order] = np.tri(num_classes) / np.arange(1, num_classes + 1)[:, None]
    degrees = non_iid_degree(uniforms, reference)
    require(
        degree <= degrees[0] + DEGREE_TOLERANCE,
        f"server_degree={degree} is not reachable: samples of one class have only degree {degrees[0]:.4f} against "
        "these clients.",
    )
    below = np.flatnonzero(degrees <= degree * (1 - EQUAL_DEGREES))
    narrow = uniforms[max(0, below[0] - 1 if len(below) else num_classes - 1)]
    uniform = uniforms[-1]
    low, high = 0.0, 0.0 if non_iid_degree(narrow, reference) <= degree else 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if non_iid_degree((1 - middle) * narrow + middle * uniform, reference) > degree:
            low = middle
        else:
            high = middle
    return rounded_sizes(((1 - high) * narrow + high * uniform) * count, count)


def require_pool(available: int, count: int) -> None:
    """Raise `UserError` if the server wants more samples than its pool has."""
    require(
        count <= available,
        f"The server data ({count:,} samples) are larger than their pool ({available:,}): lower server_fraction, or "
        "lower client_fraction, because the pool contains the samples that the clients do not get.",
    )


def _draw_counts(pool: np.ndarray, labels: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    shuffled = rng.permutation(pool)
    drawn = [shuffled[labels[shuffled] == label][:wanted] for label, wanted in enumerate(counts) if wanted]
    return rng.permutation(np.concatenate(drawn))

"""Label histograms and the non-IID degree (Liu et al., Efficient Federated Learning Using Dynamic Update and Adaptive
Pruning with Momentum on Shared Server Data, ACM TIST 2024).

    D(P) = ½ KL(P‖M) + ½ KL(P̄‖M),   M = ½ (P + P̄),   KL(a‖b) = Σ_y a(y) log2(a(y) / b(y)),   0·log 0 = 0

P is a client's (or the server's) label distribution and P̄ that of all clients together. This is the Jensen-Shannon
divergence. The paper writes "log"; only base 2, where D lies in [0, 1], reproduces its numbers: a balanced subset of
2 of 10 classes has D = 0.61.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_fl.data.partitions.client_indices import ClientIndices
from lightning_fl.errors import require


def label_histograms(labels: np.ndarray, parts: Sequence[np.ndarray], num_classes: int) -> np.ndarray:
    """Count the labels of each part.

    Args:
        labels: (n,) integers in 0..num_classes-1.
        parts: N index arrays into `labels`.
        num_classes: C.

    Returns:
        (N, C) int64 counts.
    """
    joined = ClientIndices.of(parts)
    cells = np.repeat(np.arange(len(parts)) * num_classes, joined.sizes)
    cells += labels[joined.joined]
    counts = np.bincount(cells, minlength=len(parts) * num_classes)
    return counts.reshape(len(parts), num_classes).astype(np.int64, copy=False)


def divergence(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return the Jensen-Shannon divergence of distributions in base 2: symmetric, in [0, 1], 0 only if they are equal.

    Args:
        p: (..., C) probabilities.
        q: (..., C) probabilities; the leading axes broadcast against those of `p`.

    Returns:
        (...) float64.
    """
    p, q = np.broadcast_arrays(np.asarray(p, dtype=np.float64), np.asarray(q, dtype=np.float64))
    middle = (p + q) / 2
    return np.clip((_kl(p, middle) + _kl(q, middle)) / 2, 0.0, 1.0)


def non_iid_degree(histogram: np.ndarray, reference_histogram: np.ndarray) -> np.ndarray:
    """Return D(P) of label counts against the counts of all clients together.

    Args:
        histogram: (..., C) counts; each histogram has at least one sample.
        reference_histogram: (C,) or (..., C) counts; each histogram has at least one sample.

    Returns:
        (...) float64 in [0, 1].

    Raises:
        UserError: a histogram is empty, so it has no distribution.
    """
    return divergence(_normalised(histogram), _normalised(reference_histogram))


def held_classes_and_degrees(
    labels: np.ndarray, parts: ClientIndices, reference: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of classes and the non-IID degree of each part that has samples, in the memory of the labels.

    A class that a part lacks has P = 0 and M = ½ P̄, and adds ½ P̄(y). So only classes that a part has need counting.

    Args:
        labels: (n,) integers in 0..C-1.
        parts: indices into `labels` of N parts; M of them have samples.
        reference: (C,) counts against which the degrees are; each class of the parts has some.

    Returns:
        (M,) int64, and (M,) float64 in [0, 1].
    """
    owners = np.repeat(np.arange(len(parts)), parts.sizes)
    cells, counts = np.unique(owners * len(reference) + labels[parts.joined], return_counts=True)
    owners, classes = np.divmod(cells, len(reference))
    p = counts / parts.sizes[owners]
    q = reference[classes] / reference.sum()
    middle = (p + q) / 2
    terms = p * np.log2(p / middle) + q * np.log2(q / middle) - q
    held, degrees = np.bincount(owners, minlength=len(parts)), np.bincount(owners, terms, minlength=len(parts))
    filled = parts.sizes > 0
    return held[filled], np.clip((1 + degrees[filled]) / 2, 0.0, 1.0)


def _kl(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    ratio = np.divide(a, b, out=np.ones_like(a), where=a > 0)
    return (a * np.log2(ratio)).sum(-1)


def _normalised(histogram: np.ndarray) -> np.ndarray:
    counts = np.asarray(histogram, dtype=np.float64)
    totals = counts.sum(-1, keepdims=True)
    require(
        bool((totals > 0).all()), "A label histogram without samples has no non-IID degree: leave empty clients out."
    )
    return counts / totals

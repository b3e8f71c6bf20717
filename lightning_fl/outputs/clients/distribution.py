"""Distribution of a metric over clients: means, quantiles, the worst and the best tenth, and indices of fairness.

Of K clients with values a_k and n_k samples: Jain's index is (Σa)² / (K Σa²) (Jain et al., 1984), in [1/K, 1]; Gini's is
2 Σ i·a_(i) / (K Σa) − (K+1)/K with a_(i) in ascending order, in [0, 1 − 1/K].
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

QUANTILES = {"q10": 0.1, "q50": 0.5, "q90": 0.9}
STATISTICS = ("weighted", "mean", "std", "min", "max", *QUANTILES, "worst10", "best10", "jain", "gini")
TUNED, GAIN = "tuned_", "gain_mean"
OVER_CLIENTS = re.compile(rf"(?P<metric>.+)_clients_((?:{TUNED})?(?:{'|'.join(STATISTICS)})|{GAIN})")


def is_over_clients(name: str) -> bool:
    """True if a column contains a statistic over clients.

    >>> is_over_clients("val/accuracy_clients_tuned_worst10"), is_over_clients("val/clients_mean")
    (True, False)
    """
    return OVER_CLIENTS.fullmatch(name) is not None


def without_statistic(name: str) -> str:
    """Return the metric of which a column contains a statistic over clients; the name itself for others.

    >>> without_statistic("val/accuracy_clients_tuned_worst10"), without_statistic("val/accuracy")
    ('val/accuracy', 'val/accuracy')
    """
    match = OVER_CLIENTS.fullmatch(name)
    return match["metric"] if match else name


def distribution(values: Sequence[float], samples: Sequence[float], lower_is_better: bool) -> dict[str, float]:
    """Return the statistics of clients' values by name; {} without a client.

    >>> found = distribution([0.9, 0.8, 0.8, 0.5], [10, 20, 30, 40], lower_is_better=False)
    >>> [round(found[name], 7) for name in ("weighted", "mean", "std", "q10", "worst10", "jain", "gini")]
    [0.69, 0.75, 0.15, 0.59, 0.5, 0.9615385, 0.1]

    Args:
        values: finite values a_k (K,); with one below 0 the indices of fairness are left out.
        samples: number of samples n_k of each client (K,), all above 0.
        lower_is_better: True if the worst clients are those with the highest values.
    """
    a, n = np.asarray(values, dtype=np.float64), np.asarray(samples, dtype=np.float64)
    count = len(a)
    if not count:
        return {}
    ascending, tenth = np.sort(a), (count + 9) // 10
    lowest, highest = ascending[:tenth].mean(), ascending[-tenth:].mean()
    statistics = {
        "weighted": (n @ a) / n.sum(),
        "mean": a.mean(),
        "std": a.std(),
        "min": ascending[0],
        "max": ascending[-1],
        **{name: np.quantile(a, share) for name, share in QUANTILES.items()},
        "worst10": highest if lower_is_better else lowest,
        "best10": lowest if lower_is_better else highest,
    }
    if ascending[0] >= 0:
        shares = ascending / (ascending[-1] or 1.0)  # of the largest value, so that no square is too small or too large
        total, squares = shares.sum(), shares @ shares
        statistics["jain"] = min(1.0, total**2 / (count * squares)) if total else 1.0
        ranked = 2 * (np.arange(1, count + 1) @ shares)
        statistics["gini"] = max(0.0, ranked / (count * total) - (count + 1) / count) if total else 0.0
    return {name: float(value) for name, value in statistics.items()}

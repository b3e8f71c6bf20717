"""Selections of clients as in the papers: plain loops in numpy float64 over FedAvg's clients of `oracle.py`.

Clients are drawn from the stream of the cohort, (seed, round, 0, 0); those that may send have a coin each, of the stream
(seed, round, 30, client).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from oracle import Problem, output, sgd

Round = Callable[[Problem, int, np.ndarray], np.ndarray]
"""Returns the next model, given the round and the present one."""


def run(problem: Problem, w: np.ndarray, train_round: Round) -> np.ndarray:
    for t in range(problem.rounds):
        w = train_round(problem, t, w)
    return w


def trained(problem: Problem, t: int, w: np.ndarray, k: int) -> np.ndarray:
    """Return Δ_k."""
    return sgd(w, problem.batches(t, k), problem.learning_rate) - w


def loss(problem: Problem, w: np.ndarray, k: int, rows: Any = slice(None)) -> float:
    """Return F_k(w), or its estimate from some samples."""
    return float((0.5 * (output(w, problem.x[k][rows]) - problem.y[k][rows]) ** 2).sum(1).mean())


def drawn_by_size(problem: Problem, t: int, count: int, replace: bool = False) -> list[int]:
    n = np.array([len(x) for x in problem.x])
    return np.random.default_rng([problem.seed, t, 0, 0]).choice(len(n), count, replace=replace, p=n / n.sum()).tolist()


def mean_of(problem: Problem, t: int, w: np.ndarray, cohort: list[int], alike: bool = False) -> np.ndarray:
    """Return the mean of Δ_k over a cohort, in which a client may come several times."""
    weights = [1 if alike else len(problem.x[k]) for k in cohort]
    return sum(n * trained(problem, t, w, k) for n, k in zip(weights, cohort, strict=True)) / sum(weights)


def by_size(replace: bool, alike: bool = False) -> Round:
    """Li et al. 2020, the scheme with replacement, if `replace` and `alike`."""

    def train_round(problem: Problem, t: int, w: np.ndarray) -> np.ndarray:
        return w + mean_of(problem, t, w, drawn_by_size(problem, t, problem.cohort_size, replace), alike)

    return train_round


def in_order(problem: Problem, t: int, w: np.ndarray) -> np.ndarray:
    """Clients 0, 1, 2 …, and again from 0 when all have come; the last round of a pass may be smaller."""
    starts = list(range(0, len(problem.x), problem.cohort_size))
    start = starts[t % len(starts)]
    return w + mean_of(problem, t, w, list(range(len(problem.x)))[start : start + problem.cohort_size])


def power_of_choice(d: int, b: int | None = None) -> Round:
    """Cho et al. 2020, π_pow-d, or π_cpow-d with b samples of each candidate."""

    def train_round(problem: Problem, t: int, w: np.ndarray) -> np.ndarray:
        candidates = drawn_by_size(problem, t, d)
        rows = {
            k: np.random.default_rng([problem.seed, t, 30, k]).permutation(len(problem.x[k]))[:b] for k in candidates
        }
        losses = {k: loss(problem, w, k, rows[k]) for k in candidates}
        active = sorted(candidates, key=lambda k: -losses[k])[: problem.cohort_size]
        return w + mean_of(problem, t, w, active)

    return train_round


def reused_power_of_choice(d: int) -> Round:
    """Cho et al. 2020, π_rpow-d, with the mean loss over a client's last pass, here its only one."""
    known: dict[int, float] = {}

    def train_round(problem: Problem, t: int, w: np.ndarray) -> np.ndarray:
        candidates = drawn_by_size(problem, t, d)
        active = sorted(candidates, key=lambda k: -known.get(k, np.inf))[: problem.cohort_size]
        for k in active:
            y, total = w.copy(), 0.0
            for x, target in problem.batches(t, k):
                total += float(0.5 * ((output(y, x) - target) ** 2).sum())
                y = sgd(y, iter([(x, target)]), problem.learning_rate)
            known[k] = total / len(problem.x[k])
        return w + mean_of(problem, t, w, active)

    return train_round


def optimal_probabilities(u: list[float], m: int) -> list[float]:
    """Return min(1, c u) with the sum m, c by bisection; 1 for all u > 0 if no more than m are."""
    if sum(x > 0 for x in u) <= m:
        return [float(x > 0) for x in u]
    low, high = 0.0, m / min(x for x in u if x > 0)
    for _ in range(200):
        c = (low + high) / 2
        low, high = (c, high) if sum(min(1.0, c * x) for x in u) < m else (low, c)
    return [min(1.0, low * x) for x in u]


def approximate_probabilities(u: list[float], m: int, most_turns: int = 4) -> list[float]:
    """Chen, Horváth, Richtárik 2020, Algorithm 2."""
    n, total = len(u), sum(u)
    p = [min(m * x / total, 1.0) for x in u]
    for _ in range(most_turns):
        t = [(1, x) if x < 1 else (0, 0.0) for x in p]
        count, mass = sum(one for one, _ in t), sum(x for _, x in t)
        if not mass:
            break
        c = (m - n + count) / mass
        p = [min(c * x, 1.0) if x < 1 else x for x in p]
        if c <= 1:
            break
    return p


def by_norm(n: int, unbiased: bool, approximate: bool = False) -> Round:
    """Chen, Horváth, Richtárik 2020: w_k = n_k / Σ_j n_j over the candidates, all of which train."""

    def train_round(problem: Problem, t: int, w: np.ndarray) -> np.ndarray:
        rng = np.random.default_rng([problem.seed, t, 0, 0])
        candidates = rng.choice(len(problem.x), n, replace=False).tolist()
        sizes = {k: len(problem.x[k]) for k in candidates}
        deltas = {k: trained(problem, t, w, k) for k in candidates}
        u = [float(sizes[k] * np.linalg.norm(deltas[k])) for k in candidates]
        find = approximate_probabilities if approximate else optimal_probabilities
        p = dict(zip(candidates, find(u, problem.cohort_size), strict=True))
        coins = {k: np.random.default_rng([problem.seed, t, 30, k]).random() for k in candidates}
        senders = [k for k in candidates if coins[k] < p[k]]
        if unbiased:
            return w + sum(sizes[k] / sum(sizes.values()) / p[k] * deltas[k] for k in senders)
        return w + sum(sizes[k] * deltas[k] for k in senders) / max(1, sum(sizes[k] for k in senders))

    return train_round

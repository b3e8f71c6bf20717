"""The methods as the papers write them: plain loops in numpy float64 on the toy of `toys.Perceptron`, no code of ours.

The order in which clients are drawn and see their samples is reproduced from its definition: streams seeded with
(seed, round, purpose, client), purpose 0 for the cohort and 2 for a client's training.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

Batches = Iterator[tuple[np.ndarray, np.ndarray]]


@dataclass
class Problem:
    """A federation: samples x[k] (n_k, 3) and y[k] (n_k, 2) of each client k, and how it is trained."""

    x: list[np.ndarray]
    y: list[np.ndarray]
    batch_size: int
    cohort_size: int
    rounds: int
    epochs: int = 1
    learning_rate: float = 0.1
    seed: int = 0
    absent: frozenset[int] = frozenset()

    def cohort(self, t: int) -> list[int]:
        rng = np.random.default_rng([self.seed, t, 0, 0])
        drawn = rng.choice(len(self.x), self.cohort_size, replace=False)
        return [int(k) for k in drawn if k not in self.absent]

    def batches(self, t: int, k: int) -> Batches:
        words = np.random.SeedSequence([self.seed, t, 2, k]).generate_state(2, np.uint64) >> np.uint64(1)
        generator = torch.Generator().manual_seed(int(words[0]))
        for _ in range(self.epochs):
            order = torch.randperm(len(self.x[k]), generator=generator).numpy()
            for start in range(0, len(order), self.batch_size):
                rows = order[start : start + self.batch_size]
                yield self.x[k][rows], self.y[k][rows]


def gradient(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """∇ of mean ½‖W₂ tanh(W₁x + b₁) + b₂ − y‖², by the chain rule; w (26,) holds W₁ (4, 3), b₁, W₂ (2, 4), b₂."""
    w1, b1, w2, b2 = w[:12].reshape(4, 3), w[12:16], w[16:24].reshape(2, 4), w[24:]
    hidden = np.tanh(x @ w1.T + b1)
    d_output = (hidden @ w2.T + b2 - y) / len(x)
    d_hidden = (d_output @ w2) * (1 - hidden**2)
    return np.concatenate([(d_hidden.T @ x).ravel(), d_hidden.sum(0), (d_output.T @ hidden).ravel(), d_output.sum(0)])


# What a client does: from the received model w to its own.
Local = Callable[[np.ndarray, Batches, float], np.ndarray]


def sgd(w: np.ndarray, batches: Batches, eta: float) -> np.ndarray:
    y = w.copy()
    for batch in batches:
        y -= eta * gradient(y, *batch)
    return y


def proximal_sgd(mu: float) -> Local:
    def local(w: np.ndarray, batches: Batches, eta: float) -> np.ndarray:
        y = w.copy()
        for batch in batches:
            y -= eta * (gradient(y, *batch) + mu * (y - w))
        return y

    return local


def momentum_sgd(beta: float) -> Local:
    def local(w: np.ndarray, batches: Batches, eta: float) -> np.ndarray:
        y, v = w.copy(), np.zeros_like(w)
        for batch in batches:
            v = beta * v + (1 - beta) * gradient(y, *batch)
            y -= eta * v
        return y

    return local


def average(problem: Problem, t: int, w: np.ndarray, local: Local) -> np.ndarray:
    """Σ_k n_k w_k / Σ_k n_k over the round's clients."""
    cohort = problem.cohort(t)
    models = [local(w, problem.batches(t, k), problem.learning_rate) for k in cohort]
    sizes = [len(problem.x[k]) for k in cohort]
    return sum(n * model for n, model in zip(sizes, models, strict=True)) / sum(sizes)


def fedavg(problem: Problem, w: np.ndarray, local: Local = sgd) -> np.ndarray:
    """McMahan et al. 2017, Algorithm 1."""
    for t in range(problem.rounds):
        w = average(problem, t, w, local)
    return w


def fedprox(problem: Problem, w: np.ndarray, mu: float) -> np.ndarray:
    """Li et al. 2020, Algorithm 2 with SGD as the inexact solver."""
    return fedavg(problem, w, proximal_sgd(mu))


def device_momentum(problem: Problem, w: np.ndarray, beta: float) -> np.ndarray:
    """DeviceM of Liu et al. 2024: momentum restarted in every round."""
    return fedavg(problem, w, momentum_sgd(beta))


def server_momentum(
    problem: Problem,
    w: np.ndarray,
    beta: float,
    eta: float = 1.0,
    first: bool = False,
    dampening: bool = True,
    local: Local = sgd,
) -> np.ndarray:
    """ServerM of Liu et al. 2024; without dampening FedAvgM of Hsu et al. 2019."""
    m = np.zeros_like(w)
    for t in range(problem.rounds):
        delta = average(problem, t, w, local) - w
        if t == 0 and first:
            m = delta
        elif dampening:
            m = beta * m + (1 - beta) * delta
        else:
            m = beta * m + delta
        w = w + eta * m
    return w


# FedAdam and its sparse and quantised relatives. A message is the list of its vectors.


def adam(
    w: np.ndarray, m: np.ndarray, v: np.ndarray, batches: Batches, eta: float, b1: float, b2: float, eps: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Section 2 of FedAdam-SSM: no bias correction, ε inside the root."""
    y, m, v = w.copy(), m.copy(), v.copy()
    for batch in batches:
        g = gradient(y, *batch)
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        y = y - eta * m / np.sqrt(v + eps)
    return y, m, v


def largest(x: np.ndarray, k: int) -> list[int]:
    """The k coordinates of largest magnitude, of equal ones the first."""
    return sorted(range(len(x)), key=lambda i: (-abs(x[i]), i))[:k]


def own_masks(deltas: list[np.ndarray], k: int) -> list[list[int]]:
    """FedAdam-Top."""
    return [largest(x, k) for x in deltas]


def shared_mask(leader: int) -> Callable[[list[np.ndarray], int], list[list[int]]]:
    """FedAdam-SSM, SSM_M, SSM_V: vector `leader` chooses for all."""
    return lambda deltas, k: [largest(deltas[leader], k)] * len(deltas)


def fair_mask(deltas: list[np.ndarray], k: int) -> list[list[int]]:
    """Fairness-Top: the vectors' ranks in turns."""
    ranks = [largest(x, len(x)) for x in deltas]
    chosen: list[int] = []
    for r in range(len(deltas[0])):
        offers = sorted(range(len(deltas)), key=lambda j: (-abs(deltas[j][ranks[j][r]]), j))
        for j in offers:
            if ranks[j][r] not in chosen and len(chosen) < k:
                chosen.append(ranks[j][r])
    return [chosen] * len(deltas)


def max_mask(deltas: list[np.ndarray], k: int) -> list[list[int]]:
    """Fairness-Top's other union."""
    return [largest(np.max(np.abs(deltas), axis=0), k)] * len(deltas)


def fedadam(
    problem: Problem,
    w: np.ndarray,
    k: int = 26,
    masks: Callable[[list[np.ndarray], int], list[list[int]]] = own_masks,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    uniform: bool = False,
    moments: list[np.ndarray] | None = None,
) -> np.ndarray:
    """FedAdam-SSM's Algorithm 1 with the masks of one of its methods; `moments` returns M and V."""
    state = [w, np.zeros_like(w), np.zeros_like(w)]
    for t in range(problem.rounds):
        cohort = problem.cohort(t)
        sizes = [1 if uniform else len(problem.x[client]) for client in cohort]
        sums = [np.zeros_like(w) for _ in state]
        for client, size in zip(cohort, sizes, strict=True):
            end = adam(*state, problem.batches(t, client), problem.learning_rate, b1, b2, eps)
            deltas = [after - before for after, before in zip(end, state, strict=True)]
            for total, delta, kept in zip(sums, deltas, masks(deltas, k), strict=True):
                for i in kept:
                    total[i] += size * delta[i]
        if cohort:
            state = [x + total / sum(sizes) for x, total in zip(state, sums, strict=True)]
            state[2] = np.maximum(state[2], 0)
    if moments is not None:
        moments[:] = state[1:]
    return state[0]


TENSORS = (slice(0, 12), slice(12, 16), slice(16, 24), slice(24, 26))


def one_bit(z: np.ndarray, order: int, groups: tuple[slice, ...]) -> np.ndarray:
    """s · sgn(z) with s = ‖z‖₂/√n or ‖z‖₁/n of each group, sgn(0) = 1."""
    sent = np.zeros_like(z)
    for group in groups:
        part = z[group]
        s = np.sqrt(np.mean(part**2)) if order == 2 else np.mean(np.abs(part))
        sent[group] = [s if x >= 0 else -s for x in part]
    return sent


def one_bit_adam(
    problem: Problem,
    w: np.ndarray,
    warmup: int,
    order: int = 2,
    groups: tuple[slice, ...] = TENSORS,
    masked: bool = True,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
) -> np.ndarray:
    """Tang et al. 2021, Algorithm 1, its local step taken several times."""
    m, v = np.zeros_like(w), np.zeros_like(w)
    e_server: np.ndarray = np.zeros_like(w)
    errors: dict[int, np.ndarray] = {}
    for t in range(problem.rounds):
        cohort = problem.cohort(t)
        sizes = [len(problem.x[client]) for client in cohort]
        if t < warmup:
            ends = [adam(w, m, v, problem.batches(t, c), problem.learning_rate, b1, b2, eps) for c in cohort]
            w, m, v = (
                sum(n * x for n, x in zip(sizes, xs, strict=True)) / sum(sizes) for xs in zip(*ends, strict=True)
            )
            continue
        alive = (v > 0).astype(float) if masked else np.ones_like(v)
        y, steps = np.zeros_like(w), 0.0
        for client, n in zip(cohort, sizes, strict=True):
            x, m_n, path, count = w.copy(), m * alive, np.zeros_like(w), 0
            for batch in problem.batches(t, client):
                m_n = b1 * m_n + (1 - b1) * gradient(x, *batch)
                x -= problem.learning_rate * alive * m_n / np.sqrt(v + eps)
                path, count = path + alive * m_n, count + 1
            z = path / count + errors.get(client, 0)
            sent = one_bit(z, order, groups)
            errors[client] = z - sent
            y, steps = y + n * sent / sum(sizes), steps + n * count / sum(sizes)
        m = one_bit(y + e_server, order, groups)
        e_server = y + e_server - m
        w = w - problem.learning_rate * steps * alive * m / np.sqrt(v + eps)
    return w


def log_levels(bits: int) -> list[float]:
    return [0.0] + [2.0**-j for j in range(2 ** (bits - 1) - 1)]


def uniform_levels(bits: int) -> list[float]:
    most = 2 ** (bits - 1) - 1
    return [q / most for q in range(most + 1)]


def quantise(z: np.ndarray, levels: list[float], groups: tuple[slice, ...]) -> np.ndarray:
    """The nearest of s·level, s = ‖z‖∞ of each group, of equally near ones the larger."""
    sent = np.zeros_like(z)
    for group in groups:
        s = np.abs(z[group]).max()
        sent[group] = [np.sign(x) * s * min(levels, key=lambda q: (abs(abs(x) - s * q), -q)) for x in z[group]]
    return sent


def efficient_adam(
    problem: Problem,
    w: np.ndarray,
    compress: Callable[[np.ndarray], np.ndarray],
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
) -> np.ndarray:
    """Chen et al. 2022 with several local steps; δ is server minus client, as printed."""
    moments: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    errors: dict[int, np.ndarray] = {}
    e_server: np.ndarray = np.zeros_like(w)
    for t in range(problem.rounds):
        cohort = problem.cohort(t)
        total = sum(len(problem.x[client]) for client in cohort)
        y = e_server
        for client in cohort:
            m, v = moments.get(client, (np.zeros_like(w), np.zeros_like(w)))
            x, m, v = adam(w, m, v, problem.batches(t, client), problem.learning_rate, b1, b2, eps)
            z = w - x + errors.get(client, 0)
            sent = compress(z)
            moments[client], errors[client] = (m, v), z - sent
            y = y + len(problem.x[client]) / total * sent
        down = compress(y)
        e_server, w = y - down, w - down
    return w

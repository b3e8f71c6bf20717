"""The methods as the papers write them: plain loops in numpy float64 on the toy of `toys.Perceptron`, no code of ours.

The order in which clients are drawn and see their samples is reproduced from its definition: streams seeded with
(seed, round, purpose, client), purpose 0 for the cohort, 2 for a client's training and 4 for what the server draws about a
client.
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


# Where the layers of the toy, their tensors and their neurons lie in w: W₁ (4, 3), b₁, W₂ (2, 4), b₂.
LAYERS = [list(range(16)), list(range(16, 26))]
TENSORS = [list(range(12)), list(range(12, 16)), list(range(16, 24)), [24, 25]]
NEURONS = [
    [[3 * j, 3 * j + 1, 3 * j + 2, 12 + j] for j in range(4)],
    [[*range(16 + 4 * j, 20 + 4 * j), 24 + j] for j in (0, 1)],
]

# Who sends which coordinates: from (round, model, {client: its model}) to {client: coordinates}.
Sends = Callable[[int, np.ndarray, dict[int, np.ndarray]], dict[int, list[int]]]


def partial_averaging(
    problem: Problem, w: np.ndarray, sends: Sends, trace: list[dict[int, list[int]]] | None = None
) -> np.ndarray:
    """Each coordinate becomes Σ n_k w_k / Σ n_k over the clients that send it; one that nobody sends stays."""
    for t in range(problem.rounds):
        models = {k: sgd(w, problem.batches(t, k), problem.learning_rate) for k in problem.cohort(t)}
        sent = sends(t, w, models)
        if trace is not None:
            trace.append(sent)
        following = w.copy()
        for i in range(len(w)):
            senders = [k for k in models if i in sent[k]]
            if senders:
                weight = sum(len(problem.x[k]) for k in senders)
                following[i] = sum(len(problem.x[k]) * models[k][i] for k in senders) / weight
        w = following
    return w


def the_largest(scores: dict[int, float], n: int) -> list[int]:
    """The n clients with the largest scores; of equal ones the earlier."""
    return sorted(scores, key=lambda k: -scores[k])[:n]


def fedldf(
    problem: Problem, w: np.ndarray, n: int, layers: list[list[int]] = LAYERS, trace: list | None = None
) -> np.ndarray:
    """Wang et al. 2024, Algorithm 1."""

    def sends(t: int, w: np.ndarray, models: dict[int, np.ndarray]) -> dict[int, list[int]]:
        sent: dict[int, list[int]] = {k: [] for k in models}
        for layer in layers:
            divergence = {k: np.sqrt(np.sum((y[layer] - w[layer]) ** 2)) for k, y in models.items()}
            for k in the_largest(divergence, n):
                sent[k] += layer
        return sent

    return partial_averaging(problem, w, sends, trace)


def drawn_layers(
    problem: Problem, w: np.ndarray, n: int, layers: list[list[int]] = LAYERS, trace: list | None = None
) -> np.ndarray:
    """The random baseline of Wang et al. 2024; with the whole model as one layer their HDFL."""

    def sends(t: int, w: np.ndarray, models: dict[int, np.ndarray]) -> dict[int, list[int]]:
        sent: dict[int, list[int]] = {k: [] for k in models}
        drawn = {k: np.random.default_rng([problem.seed, t, 4, k]).random(len(layers)) for k in models}
        for place, layer in enumerate(layers):
            for k in the_largest({k: draws[place] for k, draws in drawn.items()}, n):
                sent[k] += layer
        return sent

    return partial_averaging(problem, w, sends, trace)


def pruned_neurons(
    problem: Problem,
    w: np.ndarray,
    keep: float,
    magnitude: bool = False,
    per_layer: bool = False,
    trace: list | None = None,
) -> np.ndarray:
    """FedADP as Wang et al. 2024 use it."""

    def kept_of(values: np.ndarray, layers: list[list[list[int]]], budget: float) -> list[int]:
        scores = {tuple(u): np.linalg.norm(values[u]) / np.sqrt(len(u)) for layer in layers for u in layer}
        kept = [max((tuple(u) for u in layer), key=lambda u: scores[u]) for layer in layers]
        for unit in sorted((u for u in scores if u not in kept), key=lambda u: -scores[u]):
            if sum(map(len, kept)) + len(unit) > budget:
                break
            kept.append(unit)
        return [i for unit in kept for i in unit]

    def sends(t: int, w: np.ndarray, models: dict[int, np.ndarray]) -> dict[int, list[int]]:
        sent = {}
        for k, y in models.items():
            values = y if magnitude else y - w
            parts = [[layer] for layer in NEURONS] if per_layer else [NEURONS]
            sent[k] = [
                i
                for part in parts
                for i in kept_of(values, part, keep * sum(len(unit) for layer in part for unit in layer))
            ]
        return sent

    return partial_averaging(problem, w, sends, trace)

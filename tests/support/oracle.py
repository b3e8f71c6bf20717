"""The methods as in the papers: plain loops in numpy float64 on the toy of `toys.Perceptron`, without the package's code.

The order in which clients are drawn and see their samples is reproduced from its definition: streams seeded with
(seed, round, purpose, client). The purposes are 0 for the cohort, 2 for a client's training, 3 for the server's, 4 for the
server's draws about a client, 5 for a client's work before the first round and 7 for the stop of a straggler.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import log2
from typing import Any
from zlib import crc32

import numpy as np
import torch

Batches = Iterator[tuple[np.ndarray, np.ndarray]]


@dataclass
class Problem:
    """Federation: samples x[k] (n_k, 3) and y[k] (n_k, 2) of each client k and of the server, and the training's settings."""

    x: list[np.ndarray]
    y: list[np.ndarray]
    batch_size: int
    cohort_size: int
    rounds: int
    epochs: int = 1
    learning_rate: float = 0.1
    seed: int = 0
    absent: frozenset[int] = frozenset()
    straggler_rate: float = 0.0
    server_x: np.ndarray = field(default_factory=lambda: np.zeros((0, 3)))
    server_y: np.ndarray = field(default_factory=lambda: np.zeros((0, 2)))

    def cohort(self, t: int) -> list[int]:
        rng = np.random.default_rng([self.seed, t, 0, 0])
        drawn = rng.choice(len(self.x), self.cohort_size, replace=False)
        return [int(k) for k in drawn if k not in self.absent]

    def batches(self, t: int, k: int) -> Batches:
        return islice(self._batches(self.x[k], self.y[k], [self.seed, t, 2, k]), self.num_steps(t, k))

    def first_batches(self, t: int, k: int, steps: int) -> Batches:
        """Yield the batches of so many steps of a client, or of fewer if it straggles, in as many passes as they take."""
        stream = replace(self, epochs=10**6)._batches(self.x[k], self.y[k], [self.seed, t, 2, k])
        return islice(stream, self._done(t, k, steps))

    def batches_of_passes(self, t: int) -> Batches:
        """Yield the batches of as many passes of the first client as are asked for."""
        return replace(self, epochs=10**6)._batches(self.x[0], self.y[0], [self.seed, t, 2, 0])

    def num_steps(self, t: int, k: int, on_each_batch: int = 1) -> int:
        """Return all steps, or for a straggler 1, 2 … or all but one with equal probability (Li et al. 2020, 5.2, has epochs)."""
        return self._done(t, k, self.epochs * -(-len(self.x[k]) // self.batch_size) * on_each_batch)

    def _done(self, t: int, k: int, steps: int) -> int:
        rng = np.random.default_rng([self.seed, t, 7, k])
        return int(rng.integers(1, steps)) if steps > 1 and rng.random() < self.straggler_rate else steps

    def server_batches(self, t: int) -> Batches:
        return self._batches(self.server_x, self.server_y, [self.seed, t, 3, 0])

    def _batches(self, x: np.ndarray, y: np.ndarray, stream: list[int]) -> Batches:
        words = np.random.SeedSequence(stream).generate_state(2, np.uint64) >> np.uint64(1)
        generator = torch.Generator().manual_seed(int(words[0]))
        for _ in range(self.epochs):
            order = torch.randperm(len(x), generator=generator).numpy()
            for start in range(0, len(order), self.batch_size):
                rows = order[start : start + self.batch_size]
                yield x[rows], y[rows]


def parts(w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Split w into W₁ (h, 3), b₁ (h,), W₂ (2, h), b₂ (2,), in this order; h is 4, unless neurons were pruned."""
    h = (len(w) - 2) // 6
    return w[: 3 * h].reshape(h, 3), w[3 * h : 4 * h], w[4 * h : 6 * h].reshape(2, h), w[6 * h :]


def output(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return W₂ tanh(W₁x + b₁) + b₂."""
    w1, b1, w2, b2 = parts(w)
    return np.tanh(x @ w1.T + b1) @ w2.T + b2


def gradient(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return ∇ of mean ½‖W₂ tanh(W₁x + b₁) + b₂ − y‖², by the chain rule."""
    return backward(w, x, (output(w, x) - y) / len(x))


def backward(w: np.ndarray, x: np.ndarray, d_output: np.ndarray) -> np.ndarray:
    """Return the gradient of a loss whose gradient by the outputs is `d_output` (n, 2)."""
    w1, b1, w2, _ = parts(w)
    hidden = np.tanh(x @ w1.T + b1)
    d_hidden = (d_output @ w2) * (1 - hidden**2)
    return np.concatenate([(d_hidden.T @ x).ravel(), d_hidden.sum(0), (d_output.T @ hidden).ravel(), d_output.sum(0)])


# Local training: from the received model w to the client's model.
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


def sharpness_aware_sgd(rho: float) -> Local:
    def local(w: np.ndarray, batches: Batches, eta: float) -> np.ndarray:
        y = w.copy()
        for batch in batches:
            g = gradient(y, *batch)
            y -= eta * gradient(y + rho * g / np.linalg.norm(g), *batch)
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


def average(problem: Problem, t: int, w: np.ndarray, local: Local, uniform: bool = False) -> np.ndarray:
    """Return Σ_k n_k w_k / Σ_k n_k over the round's clients, or with equal weights."""
    cohort = problem.cohort(t)
    models = [local(w, problem.batches(t, k), problem.learning_rate) for k in cohort]
    sizes = [1 if uniform else len(problem.x[k]) for k in cohort]
    return sum(n * model for n, model in zip(sizes, models, strict=True)) / sum(sizes)


def fedavg(problem: Problem, w: np.ndarray, local: Local = sgd) -> np.ndarray:
    """McMahan et al. 2017, Algorithm 1."""
    for t in range(problem.rounds):
        w = average(problem, t, w, local)
    return w


def centralised(problem: Problem, w: np.ndarray) -> np.ndarray:
    """SGD on the samples of all clients, in as many steps as K of N clients make together on average, or as one straggler."""
    steps = round(
        problem.epochs * -(-sum(map(len, problem.x)) // problem.batch_size) * problem.cohort_size / len(problem.x)
    )
    pooled = replace(problem, x=[np.concatenate(problem.x)], y=[np.concatenate(problem.y)])
    for t in range(problem.rounds):
        if 0 not in problem.absent:
            rng = np.random.default_rng([problem.seed, t, 7, 0])
            done = int(rng.integers(1, steps)) if rng.random() < problem.straggler_rate else steps
            w = sgd(w, islice(pooled.batches_of_passes(t), done), problem.learning_rate)
    return w


def alone(problem: Problem, w: np.ndarray) -> dict[int, np.ndarray]:
    """SGD of each client that has taken part, from where it ended last."""
    models = dict[int, np.ndarray]()
    for t in range(problem.rounds):
        for k in problem.cohort(t):
            models[k] = sgd(models.get(k, w), problem.batches(t, k), problem.learning_rate)
    return models


def fedprox(problem: Problem, w: np.ndarray, mu: float) -> np.ndarray:
    """Li et al. 2020, Algorithm 2 with SGD as the inexact solver."""
    return fedavg(problem, w, proximal_sgd(mu))


def fedsam(problem: Problem, w: np.ndarray, rho: float) -> np.ndarray:
    """Qu et al. 2022, Algorithm 1."""
    return fedavg(problem, w, sharpness_aware_sgd(rho))


def asynchronous(
    problem: Problem,
    w: np.ndarray,
    seconds: Callable[[int], float],
    buffer_size: int,
    factor: Callable[[int], float],
    by_samples: bool = False,
    mixes: bool = False,
    local: Local = sgd,
    max_staleness: float = np.inf,
) -> tuple[np.ndarray, list[tuple[float, list[int]]]]:
    """Nguyen et al. 2022, Algorithm 1, or with `mixes` Xie et al. 2019, Algorithm 1; returns w, and time and staleness by update.

    `cohort_size` clients train at any time, for `seconds` of each. All uploads of an instant are taken before idle places are
    filled by one draw among the idle clients. Those that are too stale count in the buffer, and not in the mean.
    """
    now, sequence, training, log = 0.0, 0, list[Any](), list[Any]()
    for t in range(problem.rounds):
        taken, begun, draws = list[Any](), list[int](), 0
        while len(taken) < buffer_size:
            if len(training) < problem.cohort_size and all(entry[0] > now for entry in training):
                busy = {entry[2] for entry in training}
                idle = [k for k in range(len(problem.x)) if k not in busy]
                free = min(problem.cohort_size - len(training), len(idle))
                for k in np.random.default_rng([problem.seed, t, 0, draws]).choice(idle, free, replace=False):
                    again = begun.count(k)
                    training.append((now + seconds(k), sequence, int(k), t, w, again))
                    begun.append(int(k))
                    sequence += 1
                draws += 1
            training.sort(key=lambda entry: entry[:2])
            taken.append(training.pop(0))
            now = taken[-1][0]
        step, total = np.zeros_like(w), 0.0
        for _, _, k, version, received, again in taken:
            if t - version > max_staleness:
                continue
            stream = [problem.seed, version, 2, k, *([14, again] if again else [])]
            trained = local(received, problem._batches(problem.x[k], problem.y[k], stream), problem.learning_rate)
            n = len(problem.x[k]) if by_samples else 1
            step += n * factor(t - version) * (trained - (w if mixes else received))
            total += n
        w = w + step / max(total, 1)
        log.append((now, [t - version for _, _, _, version, _, _ in taken]))
    return w, log


def device_momentum(problem: Problem, w: np.ndarray, beta: float) -> np.ndarray:
    """DeviceM of Liu et al. 2024: momentum restarted in every round."""
    return fedavg(problem, w, momentum_sgd(beta))


def fedper(
    problem: Problem, w: np.ndarray, own: slice, mu: float = 0.0, decay: float = 0.0
) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Arivazhagan et al. 2019: every client keeps the numbers in `own`, without FedProx's pull and weight decay."""
    start, heads = w[own].copy(), dict[int, np.ndarray]()
    for t in range(problem.rounds):
        cohort, models = problem.cohort(t), []
        for k in cohort:
            y = w.copy()
            y[own] = heads.get(k, start)
            for batch in problem.batches(t, k):
                g = gradient(y, *batch)
                step = g + mu * (y - w) + decay * y
                step[own] = g[own]
                y = y - problem.learning_rate * step
            heads[k] = y[own]
            models.append(y)
        sizes = [len(problem.x[k]) for k in cohort]
        w = sum(n * model for n, model in zip(sizes, models, strict=True)) / sum(sizes)
    return w, heads


def fedrep(
    problem: Problem,
    w: np.ndarray,
    own: slice,
    head_epochs: int,
    clip: float = np.inf,
    decay: float = 0.0,
    uniform: bool = False,
) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Collins et al. 2021, algorithm 1: a client trains its head alone, then the shared body alone."""
    start, heads = w[own].copy(), dict[int, np.ndarray]()
    for t in range(problem.rounds):
        cohort, models = problem.cohort(t), []
        for k in cohort:
            y = w.copy()
            y[own] = heads.get(k, start)
            for step, batch in enumerate(problem.batches(t, k)):
                epoch = step // -(-len(problem.x[k]) // problem.batch_size)
                head = np.zeros(len(y), dtype=bool)
                head[own] = True
                phase = head if epoch < head_epochs else ~head
                g = gradient(y, *batch) * phase
                g = g * min(1.0, clip / (np.linalg.norm(g) + 1e-6))
                y = y - problem.learning_rate * (g + decay * y * (phase & ~head))
            heads[k] = y[own]
            models.append(y)
        sizes = [1 if uniform else len(problem.x[k]) for k in cohort]
        w = sum(n * model for n, model in zip(sizes, models, strict=True)) / sum(sizes)
    return w, heads


def ditto(
    problem: Problem, w: np.ndarray, strength: float, implicit: bool = False
) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Li et al. 2021, algorithm 1 over FedAvg: v steps on the same minibatches as y, and is pulled to the received w."""
    models = dict[int, np.ndarray]()
    for t in range(problem.rounds):
        eta = problem.learning_rate
        for k in problem.cohort(t):
            v = models.get(k, w).copy()
            for batch in problem.batches(t, k):
                if implicit:
                    v = (v - eta * gradient(v, *batch) + eta * strength * w) / (1 + eta * strength)
                else:
                    v = v - eta * (gradient(v, *batch) + strength * (v - w))
            models[k] = v
        w = average(problem, t, w, sgd)
    return w, models


def apfl(
    problem: Problem, w: np.ndarray, alpha: float, adaptive: bool
) -> tuple[np.ndarray, dict[int, tuple[np.ndarray, float]]]:
    """Deng et al. 2020, algorithm 1 over FedAvg: the gradient of v is that of the mixture; α moves in a round's first step."""
    models = dict[int, tuple[np.ndarray, float]]()
    for t in range(problem.rounds):
        eta = problem.learning_rate
        for k in problem.cohort(t):
            v, share = models.get(k, (w, alpha))
            y = w
            for step, batch in enumerate(problem.batches(t, k)):
                g = gradient(share * v + (1 - share) * y, *batch)
                slope = (v - y) @ g
                v, y = v - eta * share * g, y - eta * gradient(y, *batch)
                if adaptive and step == 0:
                    share = min(max(share - eta * slope, 0.0), 1.0)
            models[k] = v, share
        w = average(problem, t, w, sgd)
    return w, models


def pfedme(
    problem: Problem, w: np.ndarray, strength: float, inner_steps: int, alpha: float, beta: float
) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Dinh et al. 2020, algorithm 1, whose inner problem is solved by some steps of SGD; both models begin a round at w.

    A straggler stops after any step of the inner problem; the copy moves after the last one on a minibatch.
    """
    models = dict[int, np.ndarray]()
    for t in range(problem.rounds):
        copies = []
        for k in problem.cohort(t):
            theta = copy = w
            left = problem.num_steps(t, k, inner_steps)
            for batch in replace(problem, straggler_rate=0.0).batches(t, k):
                for _ in range(min(inner_steps, left)):
                    theta = theta - alpha * (gradient(theta, *batch) + strength * (theta - copy))
                if left >= inner_steps:
                    copy = copy - problem.learning_rate * strength * (copy - theta)
                left = max(0, left - inner_steps)
            models[k] = theta
            copies.append(copy)
        w = (1 - beta) * w + beta * sum(copies) / len(copies)
    return w, models


def scaffnew(
    problem: Problem, w: np.ndarray, p: float, uniform: bool = True, rate: Callable[[int], float] = lambda t: 0.1
) -> np.ndarray:
    """Mishchenko et al. 2022, Algorithm 2; a client learns w⁺, with which it updates h_k, when it next receives a model."""
    sent, rates = dict[int, np.ndarray](), dict[int, float]()
    for t in range(problem.rounds):
        eta = rate(t)
        seed = np.random.SeedSequence([problem.seed, t, 11, 2, 0, crc32(b"local steps")]).generate_state(1, np.uint64)[
            0
        ]
        steps = int(np.random.default_rng(int(seed >> np.uint64(1))).geometric(p))
        cohort = problem.cohort(t)
        for k in cohort:
            h = p / rates.get(k, eta) * (w - sent.get(k, w))
            y = w
            for batch in problem.first_batches(t, k, steps):
                y = y - eta * (gradient(y, *batch) - h)
            sent[k], rates[k] = y - eta / p * h, eta
        sizes = [1 if uniform else len(problem.x[k]) for k in cohort]
        w = sum(n * sent[k] for n, k in zip(sizes, cohort, strict=True)) / sum(sizes)
    return w


def per_fedavg(problem: Problem, w: np.ndarray, beta: float) -> np.ndarray:
    """Fallah et al. 2020, Algorithm 1 with the first-order gradient."""

    def local(w: np.ndarray, batches: Batches, eta: float) -> np.ndarray:
        y = w.copy()
        while (first := next(batches, None)) and (second := next(batches, None)):
            y = y - eta * gradient(y - beta * gradient(y, *first), *second)
        return y

    return fedavg(problem, w, local)


def loss(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
    """Return the mean of ½‖W₂ tanh(W₁x + b₁) + b₂ − y‖²."""
    return float(0.5 * np.square(output(w, x) - y).sum(1).mean())


def turned_signs(w: np.ndarray, number: int) -> np.ndarray:
    """Return a model with half of its signs turned, by a generator that has the model's number as its seed."""
    turned = torch.rand(len(w), generator=torch.Generator().manual_seed(number)).numpy() < 0.5
    return np.where(turned, -w, w)


def ifca(problem: Problem, w: np.ndarray, clusters: int) -> list[np.ndarray]:
    """Ghosh et al. 2020, Algorithm 1 with averaged models."""
    models = [w, *(turned_signs(w, number) for number in range(1, clusters))]
    for t in range(problem.rounds):
        changes = [(np.zeros_like(w), 0) for _ in models]
        for k in problem.cohort(t):
            j = int(np.argmin([loss(model, problem.x[k], problem.y[k]) for model in models]))
            y = sgd(models[j], problem.batches(t, k), problem.learning_rate)
            total, count = changes[j]
            changes[j] = total + len(problem.x[k]) * (y - models[j]), count + len(problem.x[k])
        models = [model + total / max(count, 1) for model, (total, count) in zip(models, changes, strict=True)]
    return models


def dasha(problem: Problem, w: np.ndarray, k: int = 26, momentum: float | None = None, full: bool = True) -> np.ndarray:
    """Tyurin and Richtárik 2023, Algorithm 1, with k random coordinates; clients that are away keep g_k and h_k."""
    a = 1 / (2 * (len(w) / k - 1) + 1) if momentum is None else momentum
    total, estimates, gradients = np.zeros_like(w), dict[int, np.ndarray](), dict[int, np.ndarray]()
    for t in range(problem.rounds):
        for c in problem.cohort(t):
            g, h = (kept.get(c, np.zeros_like(w)) for kept in (estimates, gradients))
            gradients[c] = (
                gradient(w, problem.x[c], problem.y[c]) if full else gradient(w, *next(problem.batches(t, c)))
            )
            wanted = gradients[c] - h - a * (g - h)
            stream = np.random.SeedSequence([problem.seed, t, 11, c, 0, 0, crc32(b"model")]).generate_state(
                1, np.uint64
            )
            generator = torch.Generator().manual_seed(int(stream[0] >> np.uint64(1)))
            positions = torch.randperm(len(w), generator=generator)[:k].numpy()
            sent = np.zeros_like(w)
            sent[positions] = len(w) / k * wanted[positions]
            estimates[c] = g + sent
            total += sent / len(problem.x)
        w = w - problem.learning_rate * total
    return w


@dataclass
class Norm:
    """Batch normalisation of the inputs (n, 3): scale, shift, running mean and variance, and number of batches."""

    scale: np.ndarray = field(default_factory=lambda: np.ones(3))
    shift: np.ndarray = field(default_factory=lambda: np.zeros(3))
    mean: np.ndarray = field(default_factory=lambda: np.zeros(3))
    var: np.ndarray = field(default_factory=lambda: np.ones(3))
    batches: int = 0


def fedbn(problem: Problem, w: np.ndarray) -> tuple[np.ndarray, dict[int, Norm]]:
    """Li et al. 2021, algorithm 1: all but the normalisation is averaged, here by samples. A batch of one is left out."""
    norms = dict[int, Norm]()
    for t in range(problem.rounds):
        cohort, models = problem.cohort(t), []
        for k in cohort:
            model, norm = w.copy(), replace(norms.get(k, Norm()))
            for x, y in problem.batches(t, k):
                if len(x) == 1:
                    continue
                z = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)
                inputs = norm.scale * z + norm.shift
                error = (output(model, inputs) - y) / len(x)
                w1, b1, w2, _ = parts(model)
                d_inputs = ((error @ w2) * (1 - np.tanh(inputs @ w1.T + b1) ** 2)) @ w1
                model = model - problem.learning_rate * backward(model, inputs, error)
                norm.scale = norm.scale - problem.learning_rate * (d_inputs * z).sum(0)
                norm.shift = norm.shift - problem.learning_rate * d_inputs.sum(0)
                norm.mean = 0.9 * norm.mean + 0.1 * x.mean(0)
                norm.var = 0.9 * norm.var + 0.1 * x.var(0, ddof=1)
                norm.batches += 1
            norms[k] = norm
            models.append(model)
        sizes = [len(problem.x[k]) for k in cohort]
        w = sum(n * model for n, model in zip(sizes, models, strict=True)) / sum(sizes)
    return w, norms


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


def kullback_leibler(a: list[float], b: list[float]) -> float:
    return sum(p * log2(p / q) for p, q in zip(a, b, strict=True) if p > 0)


def degree(histogram: np.ndarray, everyone: np.ndarray) -> float:
    """Return D(P) of Liu et al. 2024."""
    p, mean = list(histogram / histogram.sum()), list(everyone / everyone.sum())
    middle = [(a + b) / 2 for a, b in zip(p, mean, strict=True)]
    return kullback_leibler(p, middle) / 2 + kullback_leibler(mean, middle) / 2


def server_gradient(problem: Problem, t: int, w: np.ndarray) -> tuple[int, np.ndarray]:
    """Return τ and ḡ₀, steps and mean gradient of the server's local training from w (formula 5 of Liu et al. 2024)."""
    y, gradients = w.copy(), []
    for batch in problem.server_batches(t):
        gradients.append(gradient(y, *batch))
        y = y - problem.learning_rate * gradients[-1]
    return len(gradients), sum(gradients) / len(gradients)


def server_share(
    problem: Problem,
    t: int,
    w: np.ndarray,
    C: float = 1,  # noqa: N803
    decay: float = 0.99,
    inverse: bool = False,
    alpha_max: float | None = None,
) -> float:
    """Return τ_eff/τ by formulas 6 and 7 of Liu et al. 2024."""

    def classes(targets: np.ndarray) -> np.ndarray:
        return np.bincount(targets.argmax(1), minlength=2)

    histograms = [classes(targets) for targets in problem.y]
    everyone = sum(histograms)
    cohort = problem.cohort(t)
    d_cohort, d_server = (
        degree(histogram, everyone) for histogram in (sum(histograms[k] for k in cohort), classes(problem.server_y))
    )
    n_server, n_cohort = len(problem.server_x), sum(len(problem.x[k]) for k in cohort)
    accuracy = np.mean(output(w, problem.server_x).argmax(1) == problem.server_y.argmax(1))
    share = 1 / (accuracy + 0.01) if inverse else 1 - accuracy
    ratio = n_server * d_cohort / (n_server * d_cohort + n_cohort * d_server)
    alpha = share * ratio * C * decay**t
    return alpha if alpha_max is None else min(alpha, alpha_max)


def dynamic_update(problem: Problem, t: int, w: np.ndarray, **share: float) -> np.ndarray:
    """Return w − τ_eff η ḡ₀, formula 4 of Liu et al. 2024."""
    alpha = server_share(problem, t, w, **share)
    tau, mean_gradient = server_gradient(problem, t, w)
    return w - alpha * tau * problem.learning_rate * mean_gradient if alpha > 1e-3 else w


def feddu(problem: Problem, w: np.ndarray, **update: float) -> np.ndarray:
    """FedDU of Liu et al. 2024."""
    for t in range(problem.rounds):
        w = dynamic_update(problem, t, average(problem, t, w, sgd), **update)
    return w


def feddu_static(problem: Problem, w: np.ndarray, tau_eff: float | None) -> np.ndarray:
    """FedDU-S: a constant τ_eff, or all the server's steps."""
    for t in range(problem.rounds):
        w = average(problem, t, w, sgd)
        tau, mean_gradient = server_gradient(problem, t, w)
        w = w - (tau if tau_eff is None else tau_eff) * problem.learning_rate * mean_gradient
    return w


def feddum(
    problem: Problem, w: np.ndarray, beta: float, local_beta: float, eta_g: float = 1.0, first: bool = False
) -> np.ndarray:
    """FedDUM of Liu et al. 2024, formula 8 with G of (12) as in (4): old minus new."""
    m = np.zeros_like(w)
    for t in range(problem.rounds):
        target = dynamic_update(problem, t, average(problem, t, w, momentum_sgd(local_beta)))
        g = w - target
        m = g if t == 0 and first else beta * m + (1 - beta) * g
        w = w - eta_g * m
    return w


def feddum_in_two_stages(problem: Problem, w: np.ndarray, beta: float, local_beta: float) -> np.ndarray:
    """FedDUM of its authors' code: one momentum for the clients' change and then for the server's."""
    m = np.zeros_like(w)
    for t in range(problem.rounds):
        clients = average(problem, t, w, momentum_sgd(local_beta))
        m = beta * m + (1 - beta) * (w - clients)
        w = w - m
        server = dynamic_update(problem, t, w)
        if not np.array_equal(server, w):
            m = beta * m + (1 - beta) * (w - server)
            w = w - m
    return w


def hessian(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the dense Hessian of the loss, by automatic differentiation of the same formula."""
    h = (len(w) - 2) // 6

    def loss(v: torch.Tensor) -> torch.Tensor:
        w1, b1, w2, b2 = v.split([3 * h, h, 2 * h, 2])
        hidden = torch.tanh(torch.from_numpy(x) @ w1.view(h, 3).T + b1)
        return 0.5 * (hidden @ w2.view(2, h).T + b2 - torch.from_numpy(y)).square().sum(1).mean()

    return torch.autograd.functional.hessian(loss, torch.from_numpy(w)).numpy()


def plateau(values: np.ndarray, weights: np.ndarray) -> float:
    """Return the prune rate of the authors' code, from eigenvalues and their weights."""
    grid = np.linspace(values.min() - 0.01, values.max() + 0.01, 10_000)
    variance = 1e-5 * max(1, grid[-1] - grid[0])
    density = sum(w * np.exp(-((grid - v) ** 2) / 2 / variance) for v, w in zip(values, weights, strict=True))

    def ratio(s: float) -> float:
        return 1 - density[grid <= s].sum() / density.sum()

    inc = 0.1
    while inc >= 1e-5:
        ratios: list[float] = []
        while not ratios or ratios[-1] >= ratios[0] / 2:
            if len(ratios) > 3 and all(ratios[-i - 1] - ratios[-i] < 0.005 for i in (1, 2, 3)):
                return min(ratios[-1], 0.95)
            ratios.append(ratio(len(ratios) * inc))
        inc /= 2
    return min(ratio(0), 0.95)


def source_rate(
    w: np.ndarray, initial: np.ndarray, x: np.ndarray, y: np.ndarray, generator: torch.Generator, gap: bool
) -> float:
    """Return p*_k. With 50 Lanczos steps in a space of 26 dimensions the spectrum is exact."""

    def signs() -> np.ndarray:
        drawn = torch.randint(0, 2, (len(w),), generator=generator, dtype=torch.int8).numpy()
        return (drawn * 2.0 - 1) / len(w) ** 0.5

    curvature = hessian(w, x, y)
    values, vectors = np.linalg.eigh(curvature)
    if not gap:
        return plateau(values, (vectors.T @ signs()) ** 2)
    values = [value for value in values if abs(value) > len(w) * np.finfo(np.float32).eps * max(abs(values))]
    lipschitz = 0.0
    for share in (0.25, 0.5, 0.75, 1):
        change, v = curvature - hessian(w + share * (initial - w), x, y), signs()
        for _ in range(10):
            v = change @ v
            norm = np.linalg.norm(v)
            v = v / norm if norm else v
        lipschitz = max(lipschitz, norm)
    for m in range(1, len(w)):
        if values[m] - values[m - 1] > 4 * lipschitz:
            return min(m / len(w), 0.95)
    return 0.0


def adaptive_rate(problem: Problem, t: int, w: np.ndarray, initial: np.ndarray, gap: bool, labelled: bool) -> float:
    """Return p* of Liu et al. 2024: (14) over the server and all clients."""
    sources = [(0, problem.server_x, problem.server_y)] if len(problem.server_x) else []
    sources += [(1 + k, x, y) for k, (x, y) in enumerate(zip(problem.x, problem.y, strict=True))]
    everyone = sum(np.bincount(y.argmax(1), minlength=2) for y in problem.y)
    total = total_weight = 0.0
    for stream, x, y in sources:
        rng = np.random.default_rng([problem.seed, t, stream])
        rows = rng.choice(len(x), len(x), replace=False)
        generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
        rate = source_rate(w, initial, x[rows], y[rows], generator, gap)
        d = degree(np.bincount(y.argmax(1), minlength=2), everyone) if labelled else 0
        weight = len(x) / (d + 1e-4)
        total, total_weight = total + weight * rate, total_weight + weight
    return total / total_weight


def kept_neurons(problem: Problem, t: int, w: np.ndarray, rate: float) -> list[int]:
    """Return the hidden neurons that stay; the rank of a feature map of one pixel is 1 if the pixel is above 0, else 0."""
    place = int(len(w) * rate)
    threshold = np.sort(np.abs(w))[place - 1] if place else 0
    w1, b1, _, _ = parts(w)
    count = min(int((np.abs(w1) < threshold).sum() / w1.size * len(w1)), len(w1) - 1)
    x = problem.server_x
    if not len(x):
        x = problem.x[np.random.default_rng([problem.seed, t, 0]).integers(len(problem.x))]
    ranks = (x @ w1.T + b1 > 0).mean(0)
    order = sorted(range(len(w1)), key=lambda j: (ranks[j], j))
    return sorted(order[count:])


def without_neurons(w: np.ndarray, kept: list[int]) -> np.ndarray:
    w1, b1, w2, b2 = parts(w)
    return np.concatenate([w1[kept].ravel(), b1[kept], w2[:, kept].ravel(), b2])


def fedap(
    problem: Problem,
    w: np.ndarray,
    when: int,
    rate: float | None = None,
    gap: bool = False,
    beta: float = 0.0,
    local_beta: float = 0.0,
    update: dict[str, float] | None = None,
) -> np.ndarray:
    """FedAP of Liu et al. 2024; with an update on server data FedDUAP, and with momentum on both sides too FedDUMAP."""
    initial, m = w, np.zeros_like(w)
    for t in range(problem.rounds):
        if t == when:
            labelled = len(problem.server_x) > 0
            found = adaptive_rate(problem, t, w, initial, gap, labelled) if rate is None else rate
            kept = kept_neurons(problem, t, w, found)
            w, m = without_neurons(w, kept), without_neurons(m, kept)
        target = average(problem, t, w, momentum_sgd(local_beta))
        if update is not None:
            target = dynamic_update(problem, t, target, **update)
        m = beta * m + (1 - beta) * (w - target)
        w = w - m
    return w


def adaptive_server(
    problem: Problem,
    w: np.ndarray,
    kind: str,
    eta: float,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    uniform: bool = False,
) -> np.ndarray:
    """FedAdagrad, FedAdam or FedYogi of Reddi et al. 2021, Algorithm 2."""
    m, v = np.zeros_like(w), np.full_like(w, tau**2)
    for t in range(problem.rounds):
        delta = average(problem, t, w, sgd, uniform) - w
        m = beta1 * m + (1 - beta1) * delta
        if kind == "adagrad":
            v = v + delta**2
        elif kind == "adam":
            v = beta2 * v + (1 - beta2) * delta**2
        else:
            v = v - (1 - beta2) * delta**2 * np.sign(v - delta**2)
        w = w + eta * m / (np.sqrt(v) + tau)
    return w


def torch_adam_on_server(
    problem: Problem, w: np.ndarray, eta: float, beta1: float, beta2: float, epsilon: float, decay: float
) -> np.ndarray:
    """FedOpt of Reddi et al. 2021, Algorithm 1, with the Adam of Kingma and Ba 2015 and an L2 penalty."""
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t in range(problem.rounds):
        gradient = w - average(problem, t, w, sgd) + decay * w
        m = beta1 * m + (1 - beta1) * gradient
        v = beta2 * v + (1 - beta2) * gradient**2
        w = w - eta * (m / (1 - beta1 ** (t + 1))) / (np.sqrt(v / (1 - beta2 ** (t + 1))) + epsilon)
    return w


def decoupled_momentum(
    w: np.ndarray, m: np.ndarray, batches: Batches, eta: float, beta: float, frozen: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Train a client of FedDA: return the sum P of the directions, and the momentum v that is sent back."""
    y, p, v, tau = w.copy(), np.zeros_like(w), m.copy(), 0
    for batch in batches:
        v = beta * (m if frozen else v) + (1 - beta) * gradient(y, *batch)
        p, tau = p + v, tau + 1
        y = y - eta * v
    return p, p / tau if frozen else v


def fedda(
    problem: Problem,
    w: np.ndarray,
    beta: float,
    frozen: bool = False,
    share: Callable[[np.ndarray, int], float] | None = None,
    full_last: int = 0,
) -> np.ndarray:
    """FedDA of Jin et al. 2022 with SGDM; with `share`, α of (w, t), the server half of FedDU-DA of Liu et al. 2024.

    In the last `full_last` rounds every local iteration uses all samples of the client, or of the server.
    """
    m, eta = np.zeros_like(w), problem.learning_rate
    for t in range(problem.rounds):
        cohort = problem.cohort(t)
        sizes = [len(problem.x[k]) for k in cohort]
        sent = []
        for k in cohort:
            batches = list(problem.batches(t, k))
            if is_full := t >= problem.rounds - full_last:
                batches = [(problem.x[k], problem.y[k])] * len(batches)
            sent.append(decoupled_momentum(w, m, iter(batches), eta, beta, frozen))
        w = w - eta * sum(n * p for n, (p, _) in zip(sizes, sent, strict=True)) / sum(sizes)
        m = sum(n * v for n, (_, v) in zip(sizes, sent, strict=True)) / sum(sizes)
        alpha = share(w, t) if share else 0.0
        if alpha > 1e-3:
            batches = list(problem.server_batches(t))
            if is_full:
                batches = [(problem.server_x, problem.server_y)] * len(batches)
            p, v = decoupled_momentum(w, m, iter(batches), eta, beta, frozen)
            w, m = w - eta * alpha * p, m + alpha * (v - m)
    return w


def fedduda(problem: Problem, w: np.ndarray, beta: float, full_last: int = 0) -> np.ndarray:
    """FedDU-DA of Liu et al. 2024."""
    return fedda(problem, w, beta, share=lambda w, t: server_share(problem, t, w), full_last=full_last)


def mime_lite(problem: Problem, w: np.ndarray, beta: float) -> np.ndarray:
    """MimeLite of Karimireddy et al. 2021 with SGDM, clients weighted by samples."""
    m = np.zeros_like(w)
    for t in range(problem.rounds):

        def local(w: np.ndarray, batches: Batches, eta: float, m: np.ndarray = m) -> np.ndarray:
            y = w.copy()
            for batch in batches:
                y = y - eta * (beta * m + (1 - beta) * gradient(y, *batch))
            return y

        cohort = problem.cohort(t)
        samples = sum(len(problem.x[k]) for k in cohort)
        full = sum(len(problem.x[k]) * gradient(w, problem.x[k], problem.y[k]) for k in cohort) / samples
        w = average(problem, t, w, local)
        m = beta * m + (1 - beta) * full
    return w


def mime(problem: Problem, w: np.ndarray, beta: float) -> np.ndarray:
    """Mime of Karimireddy et al. 2021, Algorithm 1 with SGDM, clients weighted by samples."""
    m, eta = np.zeros_like(w), problem.learning_rate
    for t in range(problem.rounds):
        cohort = problem.cohort(t)
        sizes = [len(problem.x[k]) for k in cohort]
        full = [gradient(w, problem.x[k], problem.y[k]) for k in cohort]
        c = sum(n * g for n, g in zip(sizes, full, strict=True)) / sum(sizes)
        models = []
        for k in cohort:
            y = w.copy()
            for batch in problem.batches(t, k):
                g = gradient(y, *batch) - gradient(w, *batch) + c
                y = y - eta * (beta * m + (1 - beta) * g)
            models.append(y)
        w = sum(n * y for n, y in zip(sizes, models, strict=True)) / sum(sizes)
        m = beta * m + (1 - beta) * c
    return w


def scaffold(
    problem: Problem,
    w: np.ndarray,
    eta_g: float = 1.0,
    uniform: bool = False,
    controls: dict[int, np.ndarray] | None = None,
    eta: Callable[[int], float] | None = None,
) -> np.ndarray:
    """SCAFFOLD of Karimireddy et al. 2020, Algorithm 1, option II.

    `controls` collects the c_k, and c under −1; `eta` is η by step.
    """
    c, c_of = np.zeros_like(w), {} if controls is None else controls
    for t in range(problem.rounds):
        cohort = problem.cohort(t)
        models, changes = [], []
        for k in cohort:
            y, c_k, total = w.copy(), c_of.get(k, np.zeros_like(w)), 0.0
            for s, batch in enumerate(problem.batches(t, k)):
                rate = problem.learning_rate if eta is None else eta(s)
                y = y - rate * (gradient(y, *batch) - c_k + c)
                total += rate
            c_plus = c_k - c + (w - y) / total
            models.append(y)
            changes.append(c_plus - c_k)
            c_of[k] = c_plus
        sizes = [1 if uniform else len(problem.x[k]) for k in cohort]
        w = w + eta_g * sum(n * (y - w) for n, y in zip(sizes, models, strict=True)) / sum(sizes)
        c = c + sum(changes) / len(problem.x)
    c_of[-1] = c
    return w


def feddyn(problem: Problem, w: np.ndarray, alpha: float, gradients: dict[int, np.ndarray] | None = None) -> np.ndarray:
    """Acar et al. 2021, Algorithm 1 with SGD on the clients. `gradients` collects the g_k, and h under −1."""
    x, h, g_of = w, np.zeros_like(w), {} if gradients is None else gradients
    for t in range(problem.rounds):
        models = []
        for k in problem.cohort(t):
            theta, g_k = x.copy(), g_of.get(k, np.zeros_like(w))
            for batch in problem.batches(t, k):
                theta = theta - problem.learning_rate * (gradient(theta, *batch) - g_k + alpha * (theta - x))
            g_of[k] = g_k - alpha * (theta - x)
            models.append(theta)
        h = h - alpha / len(problem.x) * sum(theta - x for theta in models)
        x = sum(models) / len(models) - h / alpha
    g_of[-1] = h
    return x


def fedexp(
    problem: Problem, w: np.ndarray, eps: float, by_samples: bool = False, rates: list[float] | None = None
) -> np.ndarray:
    """Jhunjhunwala et al. 2023, Algorithm 1, or with weights by samples as in their code. `rates` collects η_g."""
    for t in range(problem.rounds):
        cohort = problem.cohort(t)
        changes = [sgd(w, problem.batches(t, k), problem.learning_rate) - w for k in cohort]
        sizes = [len(problem.x[k]) if by_samples else 1 for k in cohort]
        change = sum(n * delta for n, delta in zip(sizes, changes, strict=True)) / sum(sizes)
        squares = sum(n * np.sum(delta**2) for n, delta in zip(sizes, changes, strict=True)) / sum(sizes)
        rate = max(1.0, squares / (2 * (np.sum(change**2) + eps)))
        w = w + rate * change
        if rates is not None:
            rates.append(rate)
    return w


def moon(
    problem: Problem, w: np.ndarray, mu: float, tau: float, models: dict[int, np.ndarray] | None = None
) -> np.ndarray:
    """Li et al. 2021, Algorithm 1, with the hidden layer's outputs as representations. `models` collects the last models."""
    last = {} if models is None else models

    def hidden(model: np.ndarray, x: np.ndarray) -> np.ndarray:
        w1, b1, _, _ = parts(model)
        return np.tanh(x @ w1.T + b1)

    def cosine(z: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the cosines (n,) and their gradients by z (n, f)."""
        lengths = np.linalg.norm(z, axis=1), np.linalg.norm(other, axis=1)
        value = (z * other).sum(1) / (lengths[0] * lengths[1])
        return value, other / (lengths[0] * lengths[1])[:, None] - (value / lengths[0] ** 2)[:, None] * z

    for t in range(problem.rounds):
        cohort, trained = problem.cohort(t), []
        for k in cohort:
            y, before = w.copy(), last.get(k, w)
            for x, targets in problem.batches(t, k):
                z = hidden(y, x)
                (to_server, d_server), (to_last, d_last) = (cosine(z, hidden(model, x)) for model in (w, before))
                pull = 1 / (1 + np.exp((to_server - to_last) / tau)) / tau  # −dℓ/d(to_server − to_last)
                d_z = mu * pull[:, None] * (d_last - d_server) / len(x)
                d_hidden = d_z * (1 - z**2)
                term = np.concatenate([(d_hidden.T @ x).ravel(), d_hidden.sum(0), np.zeros(len(y) - 4 * z.shape[1])])
                y = y - problem.learning_rate * (gradient(y, x, targets) + term)
            last[k] = y
            trained.append(y)
        sizes = [len(problem.x[k]) for k in cohort]
        w = sum(n * y for n, y in zip(sizes, trained, strict=True)) / sum(sizes)
    return w


def fednova(problem: Problem, w: np.ndarray, mu: float = 0.0, rho: float = 0.0) -> np.ndarray:
    """Wang et al. 2020 with their a_i for momentum or for the proximal term; τ_eff as in their code."""
    eta = problem.learning_rate
    for t in range(problem.rounds):
        cohort = problem.cohort(t)
        normalised, lengths, taus = [], [], []
        for k in cohort:
            y, v, tau, a = w.copy(), np.zeros_like(w), 0, 0.0
            for batch in problem.batches(t, k):
                v = rho * v + gradient(y, *batch) + mu * (y - w)
                y = y - eta * v
                tau, a = tau + 1, (1 - eta * mu) * a + 1
            if rho:
                a = (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
            normalised.append((w - y) / a)
            lengths.append(a)
            taus.append(tau)
        p = np.array([len(problem.x[k]) for k in cohort], dtype=float)
        p /= p.sum()
        tau_eff = p @ np.array(taus if mu else lengths)
        w = w - tau_eff * (p @ np.array(normalised))
    return w


def data_sharing(problem: Problem, w: np.ndarray, cap: float, warmup_epochs: int = 0) -> np.ndarray:
    """Zhao et al. 2018: every client also holds some of the server's samples."""
    size = min(len(problem.server_x), int(cap * sum(len(x) for x in problem.x)))
    x, y = [], []
    for k in range(len(problem.x)):
        rows = np.arange(len(problem.server_x))
        if size < len(rows):
            rows = np.random.default_rng([0, 5, k]).choice(rows, size, replace=False)
        x.append(np.concatenate([problem.x[k], problem.server_x[rows]]))
        y.append(np.concatenate([problem.y[k], problem.server_y[rows]]))
    w = sgd(w, replace(problem, epochs=warmup_epochs).server_batches(0), problem.learning_rate)
    return fedavg(replace(problem, x=x, y=y), w)


def hybrid_fl(problem: Problem, w: np.ndarray) -> np.ndarray:
    """Hybrid-FL as used by Liu et al. 2024: the server is one more client of the average."""
    for t in range(problem.rounds):
        models = [sgd(w, problem.batches(t, k), problem.learning_rate) for k in problem.cohort(t)]
        sizes = [len(problem.x[k]) for k in problem.cohort(t)]
        models.append(sgd(w, problem.server_batches(t), problem.learning_rate))
        sizes.append(len(problem.server_x))
        w = sum(n * model for n, model in zip(sizes, models, strict=True)) / sum(sizes)
    return w


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def feddf(
    problem: Problem,
    w: np.ndarray,
    steps: int,
    batch_size: int,
    eta: float,
    temperature: float,
    probs: bool = False,
    held_out: int = 0,
    every: int = 100,
    patience: int = 1000,
    clip: float = 5.0,
) -> np.ndarray:
    """Lin et al. 2020, Algorithm 1: Adam with cosine annealing on KL(ensemble ‖ student), and early stopping."""
    count = len(problem.server_x) - held_out
    x, unseen, classes = problem.server_x[:count], problem.server_x[count:], problem.server_y[count:].argmax(1)
    for t in range(problem.rounds):
        cohort = problem.cohort(t)
        models = [sgd(w, problem.batches(t, k), problem.learning_rate) for k in cohort]
        sizes = [len(problem.x[k]) for k in cohort]
        w = sum(n * model for n, model in zip(sizes, models, strict=True)) / sum(sizes)
        logits = [output(model, x) / temperature for model in models]
        targets = sum(map(softmax, logits)) / len(models) if probs else softmax(sum(logits) / len(models))
        words = np.random.SeedSequence([problem.seed, t, 3, 0]).generate_state(2, np.uint64) >> np.uint64(1)
        generator, order = torch.Generator().manual_seed(int(words[0])), np.zeros(0, dtype=int)
        m, v = np.zeros_like(w), np.zeros_like(w)
        best: tuple[float, int, np.ndarray] = -1.0, 0, w
        for step in range(steps):
            if not len(order):
                order = torch.randperm(len(x), generator=generator).numpy()
            rows, order = order[:batch_size], order[batch_size:]
            student = softmax(output(w, x[rows]) / temperature)
            g = backward(w, x[rows], (student - targets[rows]) / len(rows) / temperature)
            g = g * min(1.0, clip / (np.linalg.norm(g) + 1e-6))
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
            corrected = m / (1 - 0.9 ** (step + 1)), v / (1 - 0.999 ** (step + 1))
            rate = eta * (1 + np.cos(np.pi * step / steps)) / 2
            w = w - rate * corrected[0] / (np.sqrt(corrected[1]) + 1e-8)
            done = step + 1
            if held_out and (done % every == 0 or done == steps):
                accuracy = np.mean(output(w, unseen).argmax(1) == classes)
                if accuracy > best[0]:
                    best = accuracy, done, w
            if held_out and done - best[1] >= patience:
                break
        if held_out:
            w = best[2]
    return w


def fedkt(
    problem: Problem,
    w: np.ndarray,
    s: int,
    t: int,
    epochs: int,
    eta: float,
    batch_size: int,
    consistent: bool = True,
    trace: list[np.ndarray] | None = None,
) -> np.ndarray:
    """Li et al. 2021, Algorithm 1 without noise, and then FedAvg; `trace` collects the votes (n_0, 2) of all clients."""
    public, initial = problem.server_x, w

    def learn(x: np.ndarray, classes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Train with Adam from the initial model on the cross-entropy with these classes."""
        seed, _ = rng.integers(2**63, size=2)
        generator, step = torch.Generator().manual_seed(int(seed)), 0
        y, m, v = initial.copy(), np.zeros_like(initial), np.zeros_like(initial)
        for _ in range(epochs):
            order = torch.randperm(len(x), generator=generator).numpy()
            for start in range(0, len(order), batch_size):
                rows, step = order[start : start + batch_size], step + 1
                g = backward(y, x[rows], (softmax(output(y, x[rows])) - np.eye(2)[classes[rows]]) / len(rows))
                m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
                y = y - eta * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
        return y

    def votes(models: list[np.ndarray]) -> np.ndarray:
        return sum(np.eye(2, dtype=int)[output(model, public).argmax(1)] for model in models)

    everyone = np.zeros((len(public), 2), dtype=int)
    for k in (k for k in range(len(problem.x)) if k not in problem.absent):
        rng, students = np.random.default_rng([problem.seed, 0, 5, k]), []
        for _ in range(s):
            shuffled = rng.permutation(len(problem.x[k]))
            teachers = [learn(problem.x[k][p], problem.y[k][p].argmax(1), rng) for p in np.array_split(shuffled, t)]
            students.append(teachers[0] if t == 1 else learn(public, votes(teachers).argmax(1), rng))
        for row, counted in zip(votes(students), everyone, strict=True):
            if not consistent or max(row) == s:
                counted += row
    if trace is not None:
        trace.append(everyone)
    has_votes = everyone.sum(1) > 0
    words = np.random.SeedSequence([problem.seed, 0, 3, 0]).generate_state(2, np.uint64) >> np.uint64(1)
    w = learn(public[has_votes], everyone[has_votes].argmax(1), np.random.default_rng(int(words[0])))
    return fedavg(problem, w)


def remembering(problem: Problem, w: np.ndarray, pull: float = 0.3) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """`toys.Remembering`: client k trains on g + pull·c_k, c_k ← c_k + Δ_k, sends (Δ_k + e_k)/2 and keeps as much, e_k."""
    c: dict[int, np.ndarray] = {}
    e: dict[int, np.ndarray] = {}
    for t in range(problem.rounds):
        cohort = problem.cohort(t)
        total = np.zeros_like(w)
        for k in cohort:
            kept, y = c.get(k, 0.0), w.copy()
            for batch in problem.batches(t, k):
                y -= problem.learning_rate * (gradient(y, *batch) + pull * kept)
            delta = y - w
            c[k] = kept + delta
            e[k] = (delta + e.get(k, 0.0)) / 2
            total += len(problem.x[k]) * e[k]
        w = w + total / sum(len(problem.x[k]) for k in cohort)
    return w, c


# Positions in w of the toy's layers, their tensors and their neurons: W₁ (4, 3), b₁, W₂ (2, 4), b₂.
LAYERS = [list(range(16)), list(range(16, 26))]
TENSORS = [list(range(12)), list(range(12, 16)), list(range(16, 24)), [24, 25]]
NEURONS = [
    [[3 * j, 3 * j + 1, 3 * j + 2, 12 + j] for j in range(4)],
    [[*range(16 + 4 * j, 20 + 4 * j), 24 + j] for j in (0, 1)],
]

# Function from (round, model, {client: its model}) to the coordinates that each client sends, {client: coordinates}.
Sends = Callable[[int, np.ndarray, dict[int, np.ndarray]], dict[int, list[int]]]


def partial_averaging(
    problem: Problem, w: np.ndarray, sends: Sends, trace: list[dict[int, list[int]]] | None = None
) -> np.ndarray:
    """Set each coordinate to Σ n_k w_k / Σ n_k over the clients that send it, if there are any."""
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
    """Return the n clients with the largest scores; the earlier among equal ones."""
    return sorted(scores, key=lambda k: -scores[k])[:n]


def fedldf(
    problem: Problem,
    w: np.ndarray,
    n: int,
    layers: list[list[int]] = LAYERS,
    sign: int = 1,
) -> np.ndarray:
    """Wang et al. 2024, Algorithm 1; with sign −1 from the clients that diverged least."""

    def sends(t: int, w: np.ndarray, models: dict[int, np.ndarray]) -> dict[int, list[int]]:
        sent: dict[int, list[int]] = {k: [] for k in models}
        for layer in layers:
            divergence = {k: sign * np.sqrt(np.sum((y[layer] - w[layer]) ** 2)) for k, y in models.items()}
            for k in the_largest(divergence, n):
                sent[k] += layer
        return sent

    return partial_averaging(problem, w, sends)


def drawn_layers(problem: Problem, w: np.ndarray, n: int, layers: list[list[int]] = LAYERS) -> np.ndarray:
    """The random baseline of Wang et al. 2024; with the whole model as one layer their HDFL."""

    def sends(t: int, w: np.ndarray, models: dict[int, np.ndarray]) -> dict[int, list[int]]:
        sent: dict[int, list[int]] = {k: [] for k in models}
        drawn = {k: np.random.default_rng([problem.seed, t, 4, k]).random(len(layers)) for k in models}
        for place, layer in enumerate(layers):
            for k in the_largest({k: draws[place] for k, draws in drawn.items()}, n):
                sent[k] += layer
        return sent

    return partial_averaging(problem, w, sends)


def pruned_neurons(
    problem: Problem,
    w: np.ndarray,
    keep: float,
    magnitude: bool = False,
    per_layer: bool = False,
    trace: list | None = None,
) -> np.ndarray:
    """FedADP as used by Wang et al. 2024."""

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


# Clients with smaller models.


def of_units(units: Sequence[int]) -> list[int]:
    """Return the places of W₁'s rows, b₁'s numbers and W₂'s columns of these hidden units, and of b₂."""
    w1 = [3 * u + i for u in units for i in range(3)]
    return [*w1, *(12 + u for u in units), *(16 + u for u in units), *(20 + u for u in units), 24, 25]


def scaled_sgd(r: float) -> Local:
    """SGD on W₂ tanh((W₁x + b₁) / r) + b₂."""

    def local(w: np.ndarray, batches: Batches, eta: float) -> np.ndarray:
        y = w.copy()
        for x, target in batches:
            w1, b1, w2, b2 = parts(y)
            hidden = np.tanh((x @ w1.T + b1) / r)
            d_output = (hidden @ w2.T + b2 - target) / len(x)
            d_hidden = (d_output @ w2) * (1 - hidden**2) / r
            gradients = d_hidden.T @ x, d_hidden.sum(0), d_output.T @ hidden, d_output.sum(0)
            y -= eta * np.concatenate([g.ravel() for g in gradients])
        return y

    return local


def levels_of(problem: Problem, t: int, levels: dict[float, float], fixed: bool) -> dict[int, float]:
    """Return the level of each client: by its place in one random order, or drawn in each round."""
    clients, bounds = len(problem.x), np.cumsum(list(levels.values()))
    order = np.random.default_rng([problem.seed, 0, 30, 0]).permutation(clients)
    drawn = [np.random.default_rng([problem.seed, t, 30, k]).random() for k in range(clients)]
    places = (order + 0.5) / clients if fixed else drawn
    return {k: list(levels)[int(np.sum(place >= bounds))] for k, place in enumerate(places)}


def levels_in_time(
    problem: Problem,
    levels: list[float],
    deadline: float,
    median: tuple[float, float, float],
    sigmas: tuple[float, float, float],
    seed_bits: int = 0,
    ordered: bool = False,
) -> dict[int, float]:
    """Return for each client the widest level whose round takes at most `deadline` seconds; the smallest if there is none.

    Args:
        problem: clients of a network of 3 inputs, 4 hidden units and 2 outputs, in float64.
        levels: levels of the hidden units.
        deadline: seconds.
        median: multiply-accumulates, MiB up and MiB down in a second, of the median client.
        sigmas: spreads of the three.
        seed_bits: bits down of a seed that draws the units.
        ordered: True if every step draws one of the levels up to the client's own.
    """
    chosen = {}
    for k, own in enumerate(problem.x):
        normal = np.random.default_rng([problem.seed, 0, 12, k]).standard_normal(3)
        speed, up, down = (mean * np.exp(sigma * z) for mean, sigma, z in zip(median, sigmas, normal, strict=True))
        for level in sorted(levels, reverse=True):
            h = int(np.ceil(round(4 * level, 9)))
            bits = 64 * (3 * h + h + 2 * h + 2)
            trained = [p for p in levels if p <= level] if ordered else [level]
            macs = np.mean([5 * int(np.ceil(round(4 * p, 9))) for p in trained])
            seconds = 3 * macs * problem.epochs * len(own) / speed
            seconds += bits / 8 / 2**20 / up + (bits + (seed_bits if level < 1 else 0)) / 8 / 2**20 / down
            chosen[k] = level
            if seconds <= deadline:
                break
    return chosen


Part = Callable[[int, int], tuple[Sequence[int], float | list[int]]]


def in_parts(problem: Problem, w: np.ndarray, part: Part) -> np.ndarray:
    """Let client k train in round t the units that `part` returns, and average each number over the clients that have it.

    With the units comes a divisor, or FjORD's numbers of units among which every step draws.
    """
    for t in range(problem.rounds):
        total, weight = np.zeros_like(w), np.zeros_like(w)
        for k in problem.cohort(t):
            units, how = part(t, k)
            own = sorted(of_units(units))
            if isinstance(how, list):
                words = np.random.SeedSequence([problem.seed, t, 2, k]).generate_state(2, np.uint64) >> np.uint64(1)
                local = ordered_sgd(how, torch.Generator().manual_seed(int(words[1])))
            else:
                local = scaled_sgd(how)
            trained = local(w[own], problem.batches(t, k), problem.learning_rate)
            total[own] += len(problem.x[k]) * trained
            weight[own] += len(problem.x[k])
        w = np.where(weight > 0, total / np.maximum(weight, 1), w)
    return w


def ordered_sgd(counts: list[int], generator: torch.Generator) -> Local:
    """SGD whose steps train the first hidden units of a network, as many as they draw."""

    def local(w: np.ndarray, batches: Batches, eta: float) -> np.ndarray:
        y, h = w.copy(), (len(w) - 2) // 6
        for batch in batches:
            count = counts[int(torch.randint(len(counts), (), generator=generator))]
            first = [*range(3 * count), *range(3 * h, 3 * h + count)]
            first += [*range(4 * h, 4 * h + count), *range(5 * h, 5 * h + count), 6 * h, 6 * h + 1]
            y[first] -= eta * gradient(y[first], *batch)
        return y

    return local


def fjord(problem: Problem, w: np.ndarray, widths: list[float]) -> np.ndarray:
    """Horváth et al. 2021, Algorithm 1 without distillation, with clients weighted by their samples."""
    levels = {p: 1 / len(widths) for p in widths}

    def part(t: int, k: int) -> tuple[Sequence[int], list[int] | float]:
        largest_width = levels_of(problem, t, levels, fixed=True)[k]
        counts = [int(np.ceil(4 * p)) for p in sorted(widths) if p <= largest_width]
        return range(counts[-1]), counts if len(counts) > 1 else 1.0

    return in_parts(problem, w, part)


def heterofl(
    problem: Problem, w: np.ndarray, levels: dict[float, float], fixed: bool = True, scaled: bool = True
) -> np.ndarray:
    """Diao et al. 2021, Algorithm 1 with clients weighted by their samples."""

    def part(t: int, k: int) -> tuple[Sequence[int], float]:
        r = levels_of(problem, t, levels, fixed)[k]
        return range(int(np.ceil(4 * r))), r if scaled else 1.0

    return in_parts(problem, w, part)


def federated_dropout(
    problem: Problem, w: np.ndarray, keep: float, per_client: bool = False, scaled: bool = False
) -> np.ndarray:
    """Caldas et al. 2018, 3.2: a seed of a round or of a client in it draws the units, by the name of their layer."""

    def part(t: int, k: int) -> tuple[Sequence[int], float]:
        stream = [problem.seed, t, 30, k if per_client else len(problem.x)]
        seed = int(np.random.default_rng(stream).integers(2**63))
        order = np.random.default_rng([seed, crc32(b"hidden")]).permutation(4)
        return [int(u) for u in order[: int(np.ceil(4 * keep))]], keep if scaled else 1.0

    return in_parts(problem, w, part)


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
    """Return the k coordinates of largest magnitude; the first among equal ones."""
    return sorted(range(len(x)), key=lambda i: (-abs(x[i]), i))[:k]


def own_masks(deltas: list[np.ndarray], k: int) -> list[list[int]]:
    """FedAdam-Top."""
    return [largest(x, k) for x in deltas]


def shared_mask(leader: int) -> Callable[[list[np.ndarray], int], list[list[int]]]:
    """FedAdam-SSM, SSM_M, SSM_V: vector `leader` chooses for all."""
    return lambda deltas, k: [largest(deltas[leader], k)] * len(deltas)


def fair_mask(deltas: list[np.ndarray], k: int) -> list[list[int]]:
    """Fairness-Top: the vectors' coordinates by rank, in turn."""
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
    """FedAdam-SSM's Algorithm 1 with the masks of one of its methods; `moments` collects M and V."""
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


def one_bit(z: np.ndarray, order: int, groups: Sequence[Any]) -> np.ndarray:
    """Return s · sgn(z) with s = ‖z‖₂/√n or ‖z‖₁/n of each group, sgn(0) = 1."""
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
    groups: Sequence[Any] = TENSORS,
    masked: bool = True,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
) -> np.ndarray:
    """Tang et al. 2021, Algorithm 1, with several local steps."""
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


def quantise(z: np.ndarray, levels: list[float], groups: Sequence[Any]) -> np.ndarray:
    """Return the nearest of s·level, s = ‖z‖∞ of each group; the larger among equally near ones."""
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


def imc(problem: Problem, w: np.ndarray, round: int, rate: float | None = None, gap: bool = False) -> np.ndarray:
    """FedAvg; from the given round on the forward pass uses masked weights, so that the other weights get no gradient.

    If no rate is given, it is FedAP's, from the server and all clients.
    """
    mask, initial = np.ones_like(w), w
    for t in range(problem.rounds):
        if t == round:
            found = adaptive_rate(problem, t, w, initial, gap, len(problem.server_x) > 0) if rate is None else rate
            threshold = sorted(np.abs(w))[int(np.ceil(found * len(w)))]
            mask = (np.abs(w) > threshold).astype(float)
            for layer in WEIGHTS:  # each layer keeps at least one weight
                mask[max(layer, key=lambda j: abs(w[j]))] = 1
            w = w * mask

        def local(w: np.ndarray, batches: Batches, eta: float, mask: np.ndarray = mask) -> np.ndarray:
            y = w.copy()
            for batch in batches:
                y = y - eta * mask * gradient(y * mask, *batch)
            return y

        w = average(problem, t, w, local)
    return w


WEIGHTS = [list(range(12)), list(range(16, 24))]


def reconfigured(
    w: np.ndarray, kept: set[int], z: np.ndarray, share: float, fixed_seconds: float, most: int | None
) -> set[int]:
    """Algorithm 2 of Jiang et al. 2023 with one second for every weight: accept weights one by one while Γ grows."""
    removable: set[int] = set()
    for layer in WEIGHTS:
        present = [j for j in layer if j in kept]
        removable |= set(sorted(present, key=lambda j: abs(w[j]))[: int(share * len(present))])
    chosen = kept - removable
    every = [j for layer in WEIGHTS for j in layer]
    numerator, denominator = sum(z[j] for j in chosen), fixed_seconds + sum(j in chosen for j in every)
    for j in sorted((j for j in every if j not in chosen), key=lambda j: -z[j]):
        if z[j] <= numerator / denominator or (most is not None and sum(i in chosen for i in every) >= most):
            break
        chosen, numerator, denominator = chosen | {j}, numerator + z[j], denominator + 1
    return chosen


def prunefl(
    problem: Problem,
    w: np.ndarray,
    interval: int,
    share: float,
    fixed_seconds: float,
    most: int | None = None,
    passes: int = 0,
    batches: int = 10,
    initial_interval: int = 50,
    trace: list[set[int]] | None = None,
) -> np.ndarray:
    """PruneFL of Jiang et al. 2023."""
    kept, z, start, changes = set(range(len(w))), np.zeros_like(w), None, []
    few = replace(problem, epochs=1)
    rows = slice(batches * problem.batch_size)
    few.server_x, few.server_y = problem.server_x[rows], problem.server_y[rows]

    def masked(w: np.ndarray) -> np.ndarray:
        return np.array([x if j in kept else 0.0 for j, x in enumerate(w)])

    for number in range(passes):
        if start is None and number % 10 == 0:
            accuracy = np.mean(output(w, few.server_x).argmax(1) == few.server_y.argmax(1))
            start = number if accuracy >= 1.5 / 2 else None
        for batch in few.server_batches(0):
            g = gradient(w, *batch)
            z = z + g**2
            w = masked(w - problem.learning_rate * g)
        if start is not None and (number - start) % initial_interval == 0:
            before = len(kept)
            kept = reconfigured(w, kept, z, share, fixed_seconds, most)
            changes.append(abs(len(kept) / before - 1))
            z, w = np.zeros_like(w), masked(w)
            if len(changes) > 5 and max(changes[-5:]) <= 0.1:
                break
    kept_z: dict[int, np.ndarray] = {}
    for t in range(problem.rounds):
        cohort = problem.cohort(t)
        models = []
        for k in cohort:
            y, total, samples = w.copy(), np.zeros_like(w), 0
            for batch in problem.batches(t, k):
                g = gradient(y, *batch)
                total, samples = total + g, samples + len(batch[0])
                y = masked(y - problem.learning_rate * g)
            models.append(y)
            kept_z[k] = kept_z.get(k, np.zeros_like(w)) + total**2 * samples
        sizes = [len(problem.x[k]) for k in cohort]
        w = sum(n * model for n, model in zip(sizes, models, strict=True)) / sum(sizes)
        if (t + 1) % interval == 0:
            z = sum(kept_z.pop(k) for k in cohort)
            kept = reconfigured(w, kept, z, share * 0.5 ** (t / 10_000), fixed_seconds, most)
            w = masked(w)
        if trace is not None:
            trace.append(kept)
    return w


def top(pi: np.ndarray, k: int) -> np.ndarray:
    """Return 1 for the k largest of each row, the first among equal ones, and 0 for the others."""
    mask = np.zeros_like(pi)
    for row, values in zip(mask, pi, strict=True):
        row[sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]] = 1
    return mask


def gated_forward(w: np.ndarray, g: np.ndarray, x: np.ndarray, multiply: bool = False) -> Any:
    """Perceptron as 1×1 convolutions with gates, 2 of 4 and 1 of 2 channels kept; g has the shape of the weights."""
    w1, b1, w2, b2 = w[:12].reshape(4, 3), w[12:16], w[16:24].reshape(2, 4), w[24:]
    a1, c1, a2, c2 = g[:12].reshape(4, 3), g[12:16], g[16:24].reshape(2, 4), g[24:]
    u1, z1 = x @ w1.T + b1, x @ a1.T + c1
    pi1 = 1 / (1 + np.exp(-z1))
    mask1 = top(pi1, 2)
    hidden = np.tanh(u1 * mask1 * (pi1 if multiply else 1))
    u2, z2 = hidden @ w2.T + b2, hidden @ a2.T + c2
    pi2 = 1 / (1 + np.exp(-z2))
    mask2 = top(pi2, 1)
    return u1, z1, pi1, mask1, hidden, u2, z2, pi2, mask2, u2 * mask2 * (pi2 if multiply else 1)


def gated_gradient(
    w: np.ndarray, g: np.ndarray, x: np.ndarray, y: np.ndarray, lam: float, mode: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradients by w and g of mean ½‖output − y‖² + λ Σ mean ‖z‖₁, straight-through, none through a gate's input."""
    multiply, trains = mode == "multiply", mode != "index"
    u1, z1, pi1, mask1, hidden, u2, z2, pi2, mask2, out = gated_forward(w, g, x, multiply)
    d_out = (out - y) / len(x)
    m1, m2 = mask1 * (pi1 if multiply else 1), mask2 * (pi2 if multiply else 1)
    d_u2, d_pi2 = d_out * m2, d_out * u2 * (mask2 if multiply else 1)
    d_pre = (d_u2 @ w[16:24].reshape(2, 4)) * (1 - hidden**2)
    d_u1, d_pi1 = d_pre * m1, d_pre * u1 * (mask1 if multiply else 1)
    d_z1, d_z2 = (
        trains * d_pi * pi * (1 - pi) + lam * np.sign(z) / len(x)
        for d_pi, pi, z in ((d_pi1, pi1, z1), (d_pi2, pi2, z2))
    )

    def flat(d1: np.ndarray, d2: np.ndarray) -> np.ndarray:
        return np.concatenate([(d1.T @ x).ravel(), d1.sum(0), (d2.T @ hidden).ravel(), d2.sum(0)])

    return flat(d_u1, d_u2), flat(d_z1, d_z2)


def feddp(
    problem: Problem,
    w: np.ndarray,
    g: np.ndarray,
    base: str,
    lam: float = 0.0,
    mode: str = "ste",
    decay: float = 0.0,
    mu: float = 0.0,
    masked_correction: bool = True,
) -> tuple[np.ndarray, dict[int, np.ndarray], dict[int, np.ndarray]]:
    """Yu et al. 2023, Algorithm 1 with its errors fixed, over one of its baselines: w, the clients' gates and their variates."""
    gates, variates, c = dict[int, np.ndarray](), dict[int, np.ndarray](), np.zeros_like(w)
    eta = problem.learning_rate
    for t in range(problem.rounds):
        cohort, deltas, taus, changes = problem.cohort(t), [], [], []
        for k in cohort:
            y, own, variate, tau = w.copy(), gates.get(k, g).copy(), variates.get(k, np.zeros_like(w)), 0
            descents = []
            for batch in problem.batches(t, k):
                d_y, d_own = gated_gradient(y, own, *batch, lam, mode)
                corrected = np.ones_like(w) if masked_correction else np.array([float(slope != 0) for slope in d_y])
                descents.append(d_y + decay * y)
                y = y - eta * (descents[-1] + mu * (y - w) + corrected * (c - variate))
                own, tau = own - eta * d_own, tau + 1
            gates[k] = own
            if base == "SCAFFOLD":
                variates[k] = sum(descents) / tau
                changes.append(variates[k] - variate)
            deltas.append(y - w)
            taus.append(tau)
        shares = [len(problem.x[k]) / sum(len(problem.x[j]) for j in cohort) for k in cohort]
        if base == "FedNova":
            tau_eff = sum(p * tau for p, tau in zip(shares, taus, strict=True))
            deltas = [tau_eff * delta / tau for delta, tau in zip(deltas, taus, strict=True)]
        w = w + sum(p * delta for p, delta in zip(shares, deltas, strict=True))
        if base == "SCAFFOLD":
            c = c + sum(changes) / len(problem.x)
    return w, gates, variates


def gram_schmidt(columns: np.ndarray) -> np.ndarray:
    """Return an orthonormal basis of the columns, made one after the other."""
    basis = np.zeros_like(columns)
    for j in range(columns.shape[1]):
        column = columns[:, j].copy()
        for i in range(j):
            column -= (basis[:, i] @ column) * basis[:, i]
        basis[:, j] = column / np.sqrt(column @ column)
    return basis

"""Every algorithm beside its oracle. A new method is one more line."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import oracle
import toys

from lightning_fl.algorithms import (
    Algorithm,
    DeviceM,
    EfficientAdam,
    FairnessTop,
    FedAdam,
    FedAdamSSM,
    FedAdamTop,
    FedAvg,
    FedProx,
    OneBitAdam,
    ServerM,
)

D = 26
"""Parameters of the toy."""

# Bits that cross between the server and one client in round t, given the width q of a number.
Bits = Callable[[int, int], int]


def vectors(count: int) -> Bits:
    """So many vectors, whole."""
    return lambda t, q: count * q * D


class Entry(NamedTuple):
    """How to make the algorithm, the oracle from (problem, initial model) to the final model, and what crosses."""

    algorithm: Callable[[], Algorithm]
    oracle: Callable[[oracle.Problem, np.ndarray], np.ndarray]
    up: Bits = vectors(1)
    down: Bits | None = vectors(1)
    """None where it depends on what changed, which a test of its own counts."""
    reaches_all: bool = False
    """Whether a broadcast goes to all clients of the federation."""


K_OF_D = 7


def own_masks(t: int, q: int) -> int:
    """min(3(kq + d), 3k(q + ⌈log2 d⌉)), ⌈log2 26⌉ = 5."""
    return min(3 * (K_OF_D * q + D), 3 * K_OF_D * (q + 5))


def shared_mask(t: int, q: int) -> int:
    """min(3kq + d, k(3q + ⌈log2 d⌉))."""
    return min(3 * K_OF_D * q + D, K_OF_D * (3 * q + 5))


def few_bits(bits: int, groups: int) -> Bits:
    """b · d + q · G."""
    return lambda t, q: bits * D + q * groups


def one_bit(first_round: int, groups: int) -> Bits:
    """3qd before the round, d + q · G from then on."""
    return lambda t, q: 3 * q * D if t < first_round else D + q * groups


def after_the_first(bits: int, groups: int) -> Bits:
    """The model in the first round, b · d + q · G from then on."""
    return lambda t, q: q * D if t == 0 else bits * D + q * groups


# Adam's first steps are so long with the toy's learning rate that the rounding of float32 shows; a larger ε shortens them.
EPSILON = 0.01

ROSTER = {
    "FedAvg": Entry(FedAvg, oracle.fedavg),
    "FedProx": Entry(partial(FedProx, mu=0.5), partial(oracle.fedprox, mu=0.5)),
    "ServerM": Entry(partial(ServerM, beta=0.6), partial(oracle.server_momentum, beta=0.6)),
    "ServerM-first": Entry(
        partial(ServerM, beta=0.6, momentum_init="first"), partial(oracle.server_momentum, beta=0.6, first=True)
    ),
    "ServerM-undamped": Entry(
        partial(ServerM, beta=0.6, server_learning_rate=0.7, dampening=False),
        partial(oracle.server_momentum, beta=0.6, eta=0.7, dampening=False),
    ),
    "DeviceM": Entry(partial(DeviceM, local_beta=0.8), partial(oracle.device_momentum, beta=0.8)),
    "FedAdam": Entry(FedAdam, oracle.fedadam, up=vectors(3), down=vectors(3)),
    "FedAdam-uniform": Entry(
        partial(FedAdam, beta1=0.7, beta2=0.9, epsilon=1e-3, weighting="uniform"),
        partial(oracle.fedadam, b1=0.7, b2=0.9, eps=1e-3, uniform=True),
        up=vectors(3),
        down=vectors(3),
    ),
    "FedAdamTop": Entry(
        partial(FedAdamTop, epsilon=EPSILON, alpha=0.3),
        partial(oracle.fedadam, eps=EPSILON, k=7),
        up=own_masks,
        down=vectors(3),
    ),
    "FedAdamSSM": Entry(
        partial(FedAdamSSM, epsilon=EPSILON, alpha=0.3),
        partial(oracle.fedadam, eps=EPSILON, k=7, masks=oracle.shared_mask(0)),
        up=shared_mask,
        down=vectors(3),
    ),
    "FedAdamSSM-first": Entry(
        partial(FedAdamSSM, epsilon=EPSILON, alpha=0.3, mask="first_moment"),
        partial(oracle.fedadam, eps=EPSILON, k=7, masks=oracle.shared_mask(1)),
        up=shared_mask,
        down=vectors(3),
    ),
    "FedAdamSSM-second": Entry(
        partial(FedAdamSSM, epsilon=EPSILON, alpha=0.3, mask="second_moment", downlink="union"),
        partial(oracle.fedadam, eps=EPSILON, k=7, masks=oracle.shared_mask(2)),
        up=shared_mask,
        down=None,
        reaches_all=True,
    ),
    "FairnessTop": Entry(
        partial(FairnessTop, epsilon=EPSILON, alpha=0.3),
        partial(oracle.fedadam, eps=EPSILON, k=7, masks=oracle.fair_mask),
        up=shared_mask,
        down=vectors(3),
    ),
    "FairnessTop-max": Entry(
        partial(FairnessTop, epsilon=EPSILON, alpha=0.3, union="max", downlink="union"),
        partial(oracle.fedadam, eps=EPSILON, k=7, masks=oracle.max_mask),
        up=shared_mask,
        down=None,
        reaches_all=True,
    ),
    "OneBitAdam": Entry(
        partial(OneBitAdam, epsilon=EPSILON, warmup=1),
        partial(oracle.one_bit_adam, eps=EPSILON, warmup=1),
        up=one_bit(1, 4),
        down=one_bit(2, 4),
        reaches_all=True,
    ),
    "OneBitAdam-global": Entry(
        partial(OneBitAdam, epsilon=EPSILON, warmup=2, scale="l1", groups="global", momentum_mask=False),
        partial(oracle.one_bit_adam, eps=EPSILON, warmup=2, order=1, groups=(slice(0, 26),), masked=False),
        up=one_bit(2, 1),
        down=one_bit(3, 1),
        reaches_all=True,
    ),
    "EfficientAdam": Entry(
        partial(EfficientAdam, epsilon=EPSILON),
        partial(
            oracle.efficient_adam,
            eps=EPSILON,
            compress=partial(oracle.quantise, levels=oracle.log_levels(3), groups=oracle.TENSORS),
        ),
        up=few_bits(3, 4),
        down=after_the_first(3, 4),
        reaches_all=True,
    ),
    "EfficientAdam-uniform": Entry(
        partial(EfficientAdam, epsilon=EPSILON, quantiser="uniform", bits=4, groups="global"),
        partial(
            oracle.efficient_adam,
            eps=EPSILON,
            compress=partial(oracle.quantise, levels=oracle.uniform_levels(4), groups=(slice(0, 26),)),
        ),
        up=few_bits(4, 1),
        down=after_the_first(4, 1),
        reaches_all=True,
    ),
    "EfficientAdam-sign": Entry(
        partial(EfficientAdam, epsilon=EPSILON, quantiser="sign"),
        partial(oracle.efficient_adam, eps=EPSILON, compress=partial(oracle.one_bit, order=1, groups=oracle.TENSORS)),
        up=few_bits(1, 4),
        down=after_the_first(1, 4),
        reaches_all=True,
    ),
}


def problem(
    rounds: int, epochs: int = 1, cohort_size: int = 3, seed: int = 0, absent: frozenset[int] = frozenset()
) -> oracle.Problem:
    """The oracle's view of `toys.federation()`."""
    data = toys.federation()
    data.setup("fit")
    x, y = (tensor.double().numpy() for tensor in toys.samples(sum(toys.SIZES)))
    return oracle.Problem(
        x=[x[rows] for rows in data.client_indices],
        y=[y[rows] for rows in data.client_indices],
        batch_size=toys.BATCH_SIZE,
        cohort_size=cohort_size,
        rounds=rounds,
        epochs=epochs,
        seed=seed,
        absent=absent,
    )

"""Every algorithm beside its oracle. A new method is one more line."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import oracle
import toys

from lightning_fl.algorithms import Algorithm, DeviceM, FedAvg, FedProx, ServerM


class Entry(NamedTuple):
    """How to make the algorithm, and the oracle from (problem, initial model) to the final model."""

    algorithm: Callable[[], Algorithm]
    oracle: Callable[[oracle.Problem, np.ndarray], np.ndarray]


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

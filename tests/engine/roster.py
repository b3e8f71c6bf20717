"""Every algorithm beside its oracle. A new method is one more line."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import oracle
import toys

from lightning_fl.algorithms import (
    HDFL,
    Algorithm,
    DeviceM,
    FedADP,
    FedAvg,
    FedLDF,
    FedProx,
    RandomLayers,
    ServerM,
)

Kinds = dict[str, int]
D = 26


def dense(clients: int, rejected: int) -> tuple[Kinds, Kinds]:
    """The whole model down and up, also of clients that are rejected."""
    return {"model": D * clients}, {"model": D * clients}


def chosen(n: int, layers: int = 0, feedback: bool = False) -> "Costs":
    """n models down in all, and the choice of each client's layers up; of clients that are rejected only the feedback."""

    def costs(clients: int, rejected: int) -> tuple[Kinds, Kinds]:
        up, down = {"model": D * n}, {"model": D * clients}
        if feedback:
            up["scalars"] = layers * clients
        if layers:
            down["mask"] = layers * (clients - rejected)
        return up, down

    return costs


def by_neuron(kept: int) -> "Costs":
    """So many numbers and a bit for each of the six neurons up from each client that is not rejected."""
    return lambda clients, rejected: (
        {"model": kept * (clients - rejected), "mask": 6 * (clients - rejected)},
        {"model": D * clients},
    )


Costs = Callable[[int, int], tuple[Kinds, Kinds]]
"""From (clients that answer, those of them that are rejected) to what goes up and down: numbers, and bits of masks."""


class Entry(NamedTuple):
    """How to make the algorithm, the oracle from (problem, initial model) to the final model, and what a round costs."""

    algorithm: Callable[[], Algorithm]
    oracle: Callable[[oracle.Problem, np.ndarray], np.ndarray]
    costs: Costs = dense

    def bits(self, clients: int, rejected: int = 0, width: int = 32) -> tuple[Kinds, Kinds]:
        """Bits up and down by kind, numbers being `width` bits wide."""
        up, down = self.costs(clients, rejected)
        return tuple(  # type: ignore[return-value]
            {kind: count if kind == "mask" else width * count for kind, count in way.items()} for way in (up, down)
        )


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
    "FedLDF": Entry(partial(FedLDF, n=1), partial(oracle.fedldf, n=1), chosen(1, layers=2, feedback=True)),
    "FedLDF-tensor": Entry(
        partial(FedLDF, n=2, groups="tensor"),
        partial(oracle.fedldf, n=2, layers=oracle.TENSORS),
        chosen(2, layers=4, feedback=True),
    ),
    "FedLDF-map": Entry(
        partial(
            FedLDF,
            n=2,
            groups={"weights": ["hidden.weight", "output.weight"], "biases": ["output.bias", "hidden.bias"]},
        ),
        partial(oracle.fedldf, n=2, layers=[[*range(12), *range(16, 24)], [12, 13, 14, 15, 24, 25]]),
        chosen(2, layers=2, feedback=True),
    ),
    "RandomLayers": Entry(partial(RandomLayers, n=1), partial(oracle.drawn_layers, n=1), chosen(1, layers=2)),
    "RandomLayers-tensor": Entry(
        partial(RandomLayers, n=2, groups="tensor"),
        partial(oracle.drawn_layers, n=2, layers=oracle.TENSORS),
        chosen(2, layers=4),
    ),
    "HDFL": Entry(partial(HDFL, n=2), partial(oracle.drawn_layers, n=2, layers=[list(range(26))]), chosen(2)),
    # 0.46 · 26 numbers: the best neuron of each layer and no other, at 4 and 5.
    "FedADP": Entry(partial(FedADP, keep=0.46), partial(oracle.pruned_neurons, keep=0.46), by_neuron(9)),
    "FedADP-magnitude": Entry(
        partial(FedADP, keep=0.46, score="magnitude"),
        partial(oracle.pruned_neurons, keep=0.46, magnitude=True),
        by_neuron(9),
    ),
    # Half of 4 neurons with 4 numbers, half of 2 with 5.
    "FedADP-per-layer": Entry(
        partial(FedADP, keep=0.5, per_layer=True),
        partial(oracle.pruned_neurons, keep=0.5, per_layer=True),
        by_neuron(13),
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

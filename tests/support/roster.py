"""All algorithms with their oracles: an entry of `ROSTER` each, but for FedRep, which needs two passes over the data or more.

Properties of whole methods are tested with all of them: their oracle, their bits, resuming, stacks. Properties that the parts
have, whatever method they serve, are tested with `COVERING`, a selection with every part and every pair of parts; those that
depend on how a part computes also with `EVERY_OPTION`, which has every value of a part's options as well.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np
import oracle
import torch
import toys

from lightning_fl.aggregators import KeepUploads, MaskedMean, WeightedMean
from lightning_fl.algorithms import (
    APFL,
    DASHA,
    HDFL,
    IFCA,
    IMC,
    MOON,
    SCAFFOLD,
    Algorithm,
    Centralised,
    DataSharing,
    DeviceM,
    Ditto,
    EfficientAdam,
    FairnessTop,
    FedAdam,
    FedAdamSSM,
    FedAdamTop,
    FedADP,
    FedAvg,
    FedBN,
    FedDA,
    FedDF,
    FedDU,
    FedDUDA,
    FedDUDM,
    FedDUM,
    FedDUS,
    FedDUSM,
    FedDyn,
    FederatedDropout,
    FedExP,
    FedKT,
    FedLDF,
    FedNova,
    FedOpt,
    FedProx,
    FedSAM,
    FjORD,
    HeteroFL,
    HybridFL,
    LocalOnly,
    OneBitAdam,
    PerFedAvg,
    PFedMe,
    PruneFL,
    RandomLayers,
    ServerAdagrad,
    ServerAdam,
    ServerM,
    ServerYogi,
)
from lightning_fl.codecs import RandomK
from lightning_fl.data import FederatedDataModule
from lightning_fl.exchanges import LayerDivergence
from lightning_fl.rules import ProxSkip
from lightning_fl.slots import Gradients
from lightning_fl.steps import Apply, Distillation

D = 26
"""Number of parameters of the toy."""


class Turn(NamedTuple):
    """Round whose bits are counted: its index, clients that answer, rejected ones among them, bits of a number."""

    round: int
    clients: int
    rejected: int = 0
    width: int = 32


Bits = dict[str, int]
"""Bits by kind; under "" if only the sum is known."""
Costs = Callable[[Turn], tuple[Bits | None, Bits | None]]
"""Bits of a round up and down; None if they depend on changes or on who takes part, which a separate test counts."""


def whole(*kinds: str) -> Costs:
    """Count one vector of each kind in each direction, also from rejected clients."""

    def costs(turn: Turn) -> tuple[Bits, Bits]:
        bits = dict.fromkeys(kinds, turn.width * D * turn.clients)
        return bits, bits

    return costs


def one_of(count: int) -> Costs:
    """Count several models down, and one and a mask of them up."""

    def costs(turn: Turn) -> tuple[Bits, Bits]:
        model = turn.width * D * turn.clients
        return {"model": model, "mask": count * turn.clients}, {"model": count * model}

    return costs


def in_two_turns(turn: Turn) -> tuple[Bits, Bits]:
    """Count w and m down and a gradient up; then the mean gradient down and the model up, except for rejected clients."""
    vector = turn.width * D
    going_on = turn.clients - turn.rejected
    up = {"model": vector * going_on, "moments": vector * turn.clients}
    return up, {"model": vector * turn.clients, "moments": vector * (turn.clients + going_on)}


def with_normaliser(turn: Turn) -> tuple[Bits, Bits]:
    """Count qd + q + 32 up, qd down."""
    model = {"model": turn.width * D * turn.clients}
    return model | {"scalars": (turn.width + 32) * turn.clients}, model


def chosen(n: int, layers: int = 0, feedback: bool = False) -> Costs:
    """Count n models up in total, and each client's chosen layers down; rejected clients send only the feedback."""

    def costs(turn: Turn) -> tuple[Bits, Bits]:
        up, down = {"model": turn.width * D * n}, {"model": turn.width * D * turn.clients}
        if feedback:
            up["scalars"] = turn.width * layers * turn.clients
        if layers:
            down["mask"] = layers * (turn.clients - turn.rejected)
        return up, down

    return costs


def by_neuron(kept: int) -> Costs:
    """Count `kept` numbers and a bit for each of the six neurons up from each client that is not rejected."""

    def costs(turn: Turn) -> tuple[Bits, Bits]:
        sending = turn.clients - turn.rejected
        return {"model": turn.width * kept * sending, "mask": 6 * sending}, {"model": turn.width * D * turn.clients}

    return costs


def masked(first_round: int, kept: int) -> Costs:
    """Count the model, which has `kept` numbers from `first_round` on; the mask also goes down, to clients without it."""

    def costs(turn: Turn) -> tuple[Bits, Bits | None]:
        numbers = D if turn.round < first_round else kept
        bits = {"model": turn.width * numbers * turn.clients}
        return bits, bits if turn.round < first_round else None

    return costs


def reconfigured(before: int, interval: int) -> Costs:
    """Count the model, which has 18 numbers after the clients first send their squared gradients."""

    def costs(turn: Turn) -> tuple[Bits, Bits | None]:
        model = {"model": turn.width * (before if turn.round < interval else 18) * turn.clients}
        importance = {"scalars": turn.width * D * turn.clients} if (turn.round + 1) % interval == 0 else {}
        return model | importance, None

    return costs


def by_client(turn: Turn) -> tuple[None, None]:
    """Count nothing: each client sends and receives as many numbers as its network has."""
    return None, None


def drawn_units(kept: int) -> Costs:
    """Count `kept` numbers in each direction, and down the seed of 64 bits that tells which."""

    def costs(turn: Turn) -> tuple[Bits, Bits]:
        up = {"model": turn.width * kept * turn.clients}
        return up, up | {"scalars": 64 * turn.clients}

    return costs


# Bits between the server and one client in round t, given the width q of a number.
ClientBits = Callable[[int, int], int]


def vectors(count: int) -> ClientBits:
    """Count whole vectors."""
    return lambda t, q: count * q * D


K_OF_D = 7
LEVELS = {1.0: 0.3, 0.5: 0.4, 0.2: 0.3}
"""Levels of HeteroFL: networks of 4, 2 and 1 hidden units."""


def own_masks(t: int, q: int) -> int:
    """Count min(3(kq + d), 3k(q + ⌈log2 d⌉)), ⌈log2 26⌉ = 5."""
    return min(3 * (K_OF_D * q + D), 3 * K_OF_D * (q + 5))


def shared_mask(t: int, q: int) -> int:
    """Count min(3kq + d, k(3q + ⌈log2 d⌉))."""
    return min(3 * K_OF_D * q + D, K_OF_D * (3 * q + 5))


def few_bits(bits: int, groups: int) -> ClientBits:
    """Count b · d + q · G."""
    return lambda t, q: bits * D + q * groups


def one_bit(first_round: int, groups: int) -> ClientBits:
    """Count 3qd before `first_round`, d + q · G from then on."""
    return lambda t, q: 3 * q * D if t < first_round else D + q * groups


def after_the_first(bits: int, groups: int) -> ClientBits:
    """Count the model in the first round, b · d + q · G from then on."""
    return lambda t, q: q * D if t == 0 else bits * D + q * groups


def each(up: ClientBits, down: ClientBits | None, to_all: bool = False) -> Costs:
    """Count the same bits for each client; with `to_all` a broadcast goes to the whole federation."""

    def costs(turn: Turn) -> tuple[Bits, Bits | None]:
        recipients = len(toys.SIZES) if to_all else turn.clients
        return (
            {"": turn.clients * up(turn.round, turn.width)},
            None if down is None else {"": recipients * down(turn.round, turn.width)},
        )

    return costs


# With the toy's learning rate Adam's first steps are so long that float32's rounding shows; a larger ε shortens them.
EPSILON = 0.01


class Entry(NamedTuple):
    """Algorithm, oracle from (problem, initial model) to the final model, bits, and number of server samples."""

    algorithm: Callable[[], Algorithm]
    oracle: Callable[[oracle.Problem, np.ndarray], np.ndarray]
    costs: Costs = whole("model")
    num_server: int = 0

    def federation(self, train: Any = None, num_empty: int = 0) -> FederatedDataModule:
        """Return the toy's data, with server samples if the method uses them, and with further clients that have no samples."""
        sizes = (*toys.SIZES, *[0] * num_empty)
        return toys.Served(self.num_server, train, sizes) if self.num_server else toys.federation(sizes, train)

    @property
    def runners(self) -> tuple[str, ...]:
        """Runners that can train the method; clients with several models, or widths of each step, train one by one."""
        algorithm = self.algorithm()
        rule, differs = algorithm.rule, algorithm.exchange.differs_in_steps
        one_by_one = algorithm.model_keeper or differs or rule.num_losses or Gradients.REPRESENTATIONS in rule.reads
        return ("serial",) if one_by_one else ("serial", "stacked")

    @property
    def num_samples(self) -> int:
        """Number of samples of clients and server."""
        return sum(toys.SIZES) + self.num_server


ROSTER = {
    "FedAvg": Entry(FedAvg, oracle.fedavg),
    "Centralised": Entry(Centralised, oracle.centralised, costs=whole()),
    "LocalOnly": Entry(LocalOnly, lambda given, w: w, costs=whole()),  # test_bounds.py has the clients' models
    "FedProx": Entry(partial(FedProx, mu=0.5), partial(oracle.fedprox, mu=0.5)),
    "Ditto": Entry(Ditto, oracle.fedavg),  # the server's model is the base method's
    "APFL": Entry(APFL, oracle.fedavg),
    "PFedMe": Entry(
        partial(PFedMe, strength=6.0, inner_steps=3, inner_learning_rate=0.05, server_learning_rate=0.7),
        lambda given, w: oracle.pfedme(given, w, strength=6.0, inner_steps=3, alpha=0.05, beta=0.7)[0],
    ),
    "PerFedAvg": Entry(partial(PerFedAvg, beta=0.3), partial(oracle.per_fedavg, beta=0.3)),
    "IFCA": Entry(partial(IFCA, clusters=3), lambda given, w: oracle.ifca(given, w, clusters=3)[0], one_of(3)),
    "FedBN": Entry(FedBN, oracle.fedavg),  # the toy has no norm; test_fedbn.py has one
    "ServerM": Entry(partial(ServerM, beta=0.6), partial(oracle.server_momentum, beta=0.6)),
    "ServerM-first": Entry(
        partial(ServerM, beta=0.6, momentum_init="first"), partial(oracle.server_momentum, beta=0.6, first=True)
    ),
    "ServerM-undamped": Entry(
        partial(ServerM, beta=0.6, server_learning_rate=0.7, dampening=False),
        partial(oracle.server_momentum, beta=0.6, eta=0.7, dampening=False),
    ),
    "DeviceM": Entry(partial(DeviceM, local_beta=0.8), partial(oracle.device_momentum, beta=0.8)),
    "ServerM-yogi": Entry(
        partial(ServerM, beta=0.6, server_learning_rate=0.02, variant="yogi"),
        partial(oracle.adaptive_server, kind="yogi", eta=0.02, beta1=0.6),
    ),
    "ServerAdam": Entry(
        partial(ServerAdam, learning_rate=0.02, beta2=0.9),
        partial(oracle.adaptive_server, kind="adam", eta=0.02, beta2=0.9),
    ),
    "ServerAdam-uniform": Entry(
        partial(ServerAdam, learning_rate=0.05, beta1=0.5, tau=0.1, weighting="uniform"),
        partial(oracle.adaptive_server, kind="adam", eta=0.05, beta1=0.5, tau=0.1, uniform=True),
    ),
    "ServerAdagrad": Entry(
        partial(ServerAdagrad, learning_rate=0.02),
        partial(oracle.adaptive_server, kind="adagrad", eta=0.02, beta1=0.0),
    ),
    "ServerYogi": Entry(
        partial(ServerYogi, learning_rate=0.02, beta1=0.7, beta2=0.8, tau=0.01),
        partial(oracle.adaptive_server, kind="yogi", eta=0.02, beta1=0.7, beta2=0.8, tau=0.01),
    ),
    "FedOpt": Entry(FedOpt, partial(oracle.server_momentum, beta=0.9, dampening=False)),
    "FedOpt-Adam": Entry(
        partial(FedOpt, partial(torch.optim.Adam, lr=0.02, eps=EPSILON, weight_decay=0.1)),
        partial(oracle.torch_adam_on_server, eta=0.02, beta1=0.9, beta2=0.999, epsilon=EPSILON, decay=0.1),
    ),
    "FedOpt-Adagrad": Entry(
        partial(FedOpt, partial(torch.optim.Adagrad, lr=0.02, eps=1e-3, initial_accumulator_value=1e-6), "uniform"),
        partial(oracle.adaptive_server, kind="adagrad", eta=0.02, beta1=0.0, uniform=True),
    ),
    "DeviceM-mime-lite": Entry(
        partial(DeviceM, local_beta=0.8, variant="mime_lite"),
        partial(oracle.mime_lite, beta=0.8),
        costs=whole("model", "moments"),
    ),
    "DeviceM-mime": Entry(
        partial(DeviceM, local_beta=0.8, variant="mime"), partial(oracle.mime, beta=0.8), costs=in_two_turns
    ),
    "FedDA": Entry(partial(FedDA, beta=0.8), partial(oracle.fedda, beta=0.8), costs=whole("model", "moments")),
    "FedDA-frozen": Entry(
        partial(FedDA, beta=0.8, variant="frozen"),
        partial(oracle.fedda, beta=0.8, frozen=True),
        costs=whole("model", "moments"),
    ),
    "FedDUDA": Entry(
        partial(FedDUDA, beta=0.8), partial(oracle.fedduda, beta=0.8), num_server=9, costs=whole("model", "moments")
    ),
    "SCAFFOLD": Entry(SCAFFOLD, oracle.scaffold, costs=whole("model", "moments")),
    "SCAFFOLD-uniform": Entry(
        partial(SCAFFOLD, weighting="uniform", server_learning_rate=0.7),
        partial(oracle.scaffold, eta_g=0.7, uniform=True),
        costs=whole("model", "moments"),
    ),
    "DASHA": Entry(
        partial(DASHA, RandomK(0.3)), partial(oracle.dasha, k=K_OF_D), each(lambda t, q: K_OF_D * q + 64, vectors(1))
    ),
    "DASHA-minibatch": Entry(
        partial(DASHA, RandomK(0.3), momentum=0.5, batch="minibatch"),
        partial(oracle.dasha, k=K_OF_D, momentum=0.5, full=False),
        each(lambda t, q: K_OF_D * q + 64, vectors(1)),
    ),
    # The rule of Scaffnew, which as a method takes all clients in each round; test_scaffnew.py has it.
    "ProxSkip": Entry(
        partial(Algorithm, rule=ProxSkip(p=0.25), aggregator=WeightedMean("uniform")), partial(oracle.scaffnew, p=0.25)
    ),
    "FedDyn": Entry(partial(FedDyn, alpha=0.5), partial(oracle.feddyn, alpha=0.5)),
    "FedExP": Entry(partial(FedExP, eps=1e-4), partial(oracle.fedexp, eps=1e-4)),
    "FedExP-samples": Entry(
        partial(FedExP, weighting="samples", mean_of_two=True), partial(oracle.fedexp, eps=1e-3, by_samples=True)
    ),
    "FedSAM": Entry(partial(FedSAM, rho=0.3), partial(oracle.fedsam, rho=0.3)),
    "MOON": Entry(partial(MOON, mu=5.0, tau=0.3), partial(oracle.moon, mu=5.0, tau=0.3)),
    "FedNova": Entry(FedNova, oracle.fednova, costs=with_normaliser),
    "FedNova-proximal": Entry(partial(FedNova, mu=0.5), partial(oracle.fednova, mu=0.5), costs=with_normaliser),
    "FedDU": Entry(partial(FedDU, C=1.5, decay=0.8), partial(oracle.feddu, C=1.5, decay=0.8), num_server=9),
    "FedDU-inverse": Entry(
        partial(FedDU, C=0.3, f="inverse", alpha_max=0.6),
        partial(oracle.feddu, C=0.3, decay=0.99, inverse=True, alpha_max=0.6),
        num_server=9,
    ),
    "FedDUS": Entry(partial(FedDUS, tau_eff=2), partial(oracle.feddu_static, tau_eff=2), num_server=9),
    "FedDUS-full": Entry(partial(FedDUS, tau_eff="full"), partial(oracle.feddu_static, tau_eff=None), num_server=9),
    "FedDUM": Entry(
        partial(FedDUM, beta=0.6, local_beta=0.8, server_learning_rate=0.7),
        partial(oracle.feddum, beta=0.6, local_beta=0.8, eta_g=0.7),
        num_server=9,
    ),
    "FedDUM-first": Entry(
        partial(FedDUM, beta=0.6, local_beta=0.8, momentum_init="first"),
        partial(oracle.feddum, beta=0.6, local_beta=0.8, first=True),
        num_server=9,
    ),
    "FedDUM-two-stage": Entry(
        partial(FedDUM, beta=0.6, local_beta=0.8, two_stage=True),
        partial(oracle.feddum_in_two_stages, beta=0.6, local_beta=0.8),
        num_server=9,
    ),
    "FedDUSM": Entry(partial(FedDUSM, beta=0.6), partial(oracle.feddum, beta=0.6, local_beta=0), num_server=9),
    "FedDUDM": Entry(partial(FedDUDM, local_beta=0.8), partial(oracle.feddum, beta=0, local_beta=0.8), num_server=9),
    "DataSharing": Entry(partial(DataSharing, cap=1.0), partial(oracle.data_sharing, cap=1.0), num_server=9),
    "DataSharing-some": Entry(
        partial(DataSharing, cap=0.1, warmup_epochs=3),
        partial(oracle.data_sharing, cap=0.1, warmup_epochs=3),
        num_server=9,
    ),
    "HybridFL": Entry(HybridFL, oracle.hybrid_fl, num_server=9),
    "FedDF": Entry(
        partial(FedDF, max_steps=7, batch_size=4, learning_rate=0.02, temperature=2.0),
        partial(oracle.feddf, steps=7, batch_size=4, eta=0.02, temperature=2.0),
        num_server=9,
    ),
    "FedDF-probs": Entry(
        partial(FedDF, max_steps=4, learning_rate=0.02, average="probs"),
        partial(oracle.feddf, steps=4, batch_size=128, eta=0.02, temperature=1.0, probs=True),
        num_server=9,
    ),
    "FedDF-validated": Entry(
        partial(
            Algorithm,
            aggregator=KeepUploads(WeightedMean()),
            steps=(
                Apply(),
                Distillation(
                    max_steps=9,
                    batch_size=4,
                    learning_rate=0.3,
                    clip_norm=0.1,
                    val_fraction=0.34,
                    val_every_n_steps=2,
                    patience=4,
                ),
            ),
        ),
        partial(
            oracle.feddf,
            steps=9,
            batch_size=4,
            eta=0.3,
            temperature=1.0,
            held_out=3,
            every=2,
            patience=4,
            clip=0.1,
        ),
        num_server=9,
    ),
    "FedKT": Entry(
        partial(FedKT, t=2, epochs=3, learning_rate=0.02, batch_size=4),
        partial(oracle.fedkt, s=2, t=2, epochs=3, eta=0.02, batch_size=4),
        num_server=9,
    ),
    "FedKT-light": Entry(
        partial(FedKT, preset="light", learning_rate=0.01),
        partial(oracle.fedkt, s=1, t=2, epochs=20, eta=0.01, batch_size=64),
        num_server=9,
    ),
    "FedKT-teachers": Entry(
        partial(FedKT, s=3, t=1, epochs=4, learning_rate=0.02, batch_size=4, consistent=False),
        partial(oracle.fedkt, s=3, t=1, epochs=4, eta=0.02, batch_size=4, consistent=False),
        num_server=9,
    ),
    "FedLDF": Entry(partial(FedLDF, n=1), partial(oracle.fedldf, n=1), chosen(1, layers=2, feedback=True)),
    "FedLDF-tensor": Entry(
        partial(FedLDF, n=2, groups="tensor"),
        partial(oracle.fedldf, n=2, layers=oracle.TENSORS),
        chosen(2, layers=4, feedback=True),
    ),
    "FedLDF-least": Entry(
        partial(Algorithm, exchange=LayerDivergence(n=1, choose="least"), aggregator=MaskedMean()),
        partial(oracle.fedldf, n=1, sign=-1),
        chosen(1, layers=2, feedback=True),
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
    # 0.46 · 26 numbers: only the best neuron of each layer, 4 and 5 numbers.
    "FedADP": Entry(partial(FedADP, keep=0.46), partial(oracle.pruned_neurons, keep=0.46), by_neuron(9)),
    "FedADP-magnitude": Entry(
        partial(FedADP, keep=0.46, score="magnitude"),
        partial(oracle.pruned_neurons, keep=0.46, magnitude=True),
        by_neuron(9),
    ),
    # Half of 4 neurons with 4 numbers, half of 2 neurons with 5.
    "FedADP-per-layer": Entry(
        partial(FedADP, keep=0.5, per_layer=True),
        partial(oracle.pruned_neurons, keep=0.5, per_layer=True),
        by_neuron(13),
    ),
    "HeteroFL": Entry(partial(HeteroFL, LEVELS), partial(oracle.heterofl, levels=LEVELS), by_client),
    "HeteroFL-drawn": Entry(
        partial(HeteroFL, LEVELS, fixed=False, scaled=False),
        partial(oracle.heterofl, levels=LEVELS, fixed=False, scaled=False),
        by_client,
    ),
    "FjORD": Entry(partial(FjORD, [0.25, 0.5, 1.0]), partial(oracle.fjord, widths=[0.25, 0.5, 1.0]), by_client),
    # ⌈0.7 · 4⌉ = 3 hidden units, and a seed down.
    "FederatedDropout": Entry(
        partial(FederatedDropout, rate=0.3), partial(oracle.federated_dropout, keep=0.7), drawn_units(20)
    ),
    "FederatedDropout-client": Entry(
        partial(FederatedDropout, rate=0.5, per_client=True, scaled=True),
        partial(oracle.federated_dropout, keep=0.5, per_client=True, scaled=True),
        drawn_units(14),
    ),
    # ⌈0.4 · 26⌉ = 11: the eleven smallest and the twelfth are pruned.
    "IMC": Entry(partial(IMC, rate=0.4, prune_round=2), partial(oracle.imc, rate=0.4, round=2), masked(2, 14)),
    "IMC-initial": Entry(partial(IMC, rate=0.7, prune_round=0), partial(oracle.imc, rate=0.7, round=0), masked(0, 6)),
    # With this much fixed time Γ grows until the bound: 12 of 20 weights, and the 6 biases.
    "PruneFL": Entry(
        partial(PruneFL, interval=2, shrink=0.5, max_density=0.6, initial_passes=0, fixed_share=5),
        partial(oracle.prunefl, interval=2, share=0.5, fixed_seconds=100, most=12),
        reconfigured(26, interval=2),
    ),
    "PruneFL-initial": Entry(
        partial(
            PruneFL,
            interval=3,
            shrink=0.4,
            max_density=0.6,
            initial_passes=40,
            initial_batches=2,
            initial_interval=3,
            fixed_share=5,
        ),
        partial(
            oracle.prunefl,
            interval=3,
            share=0.4,
            fixed_seconds=100,
            most=12,
            passes=40,
            batches=2,
            initial_interval=3,
        ),
        reconfigured(18, interval=3),
        num_server=9,
    ),
    "FedAdam": Entry(FedAdam, oracle.fedadam, each(vectors(3), vectors(3))),
    "FedAdam-uniform": Entry(
        partial(FedAdam, beta1=0.7, beta2=0.9, epsilon=1e-3, weighting="uniform"),
        partial(oracle.fedadam, b1=0.7, b2=0.9, eps=1e-3, uniform=True),
        each(vectors(3), vectors(3)),
    ),
    "FedAdamTop": Entry(
        partial(FedAdamTop, epsilon=EPSILON, alpha=0.3),
        partial(oracle.fedadam, eps=EPSILON, k=7),
        each(own_masks, vectors(3)),
    ),
    "FedAdamSSM": Entry(
        partial(FedAdamSSM, epsilon=EPSILON, alpha=0.3),
        partial(oracle.fedadam, eps=EPSILON, k=7, masks=oracle.shared_mask(0)),
        each(shared_mask, vectors(3)),
    ),
    "FedAdamSSM-first": Entry(
        partial(FedAdamSSM, epsilon=EPSILON, alpha=0.3, mask="first_moment"),
        partial(oracle.fedadam, eps=EPSILON, k=7, masks=oracle.shared_mask(1)),
        each(shared_mask, vectors(3)),
    ),
    "FedAdamSSM-second": Entry(
        partial(FedAdamSSM, epsilon=EPSILON, alpha=0.3, mask="second_moment", downlink="union"),
        partial(oracle.fedadam, eps=EPSILON, k=7, masks=oracle.shared_mask(2)),
        each(shared_mask, None, to_all=True),
    ),
    "FairnessTop": Entry(
        partial(FairnessTop, epsilon=EPSILON, alpha=0.3),
        partial(oracle.fedadam, eps=EPSILON, k=7, masks=oracle.fair_mask),
        each(shared_mask, vectors(3)),
    ),
    "FairnessTop-max": Entry(
        partial(FairnessTop, epsilon=EPSILON, alpha=0.3, union="max", downlink="union"),
        partial(oracle.fedadam, eps=EPSILON, k=7, masks=oracle.max_mask),
        each(shared_mask, None, to_all=True),
    ),
    "OneBitAdam": Entry(
        partial(OneBitAdam, epsilon=EPSILON, warmup=1),
        partial(oracle.one_bit_adam, eps=EPSILON, warmup=1),
        each(one_bit(1, 4), one_bit(2, 4), to_all=True),
    ),
    "OneBitAdam-global": Entry(
        partial(OneBitAdam, epsilon=EPSILON, warmup=2, scale="l1", groups="global", momentum_mask=False),
        partial(oracle.one_bit_adam, eps=EPSILON, warmup=2, order=1, groups=(slice(0, 26),), masked=False),
        each(one_bit(2, 1), one_bit(3, 1), to_all=True),
    ),
    "EfficientAdam": Entry(
        partial(EfficientAdam, epsilon=EPSILON),
        partial(
            oracle.efficient_adam,
            eps=EPSILON,
            compress=partial(oracle.quantise, levels=oracle.log_levels(3), groups=oracle.TENSORS),
        ),
        each(few_bits(3, 4), after_the_first(3, 4), to_all=True),
    ),
    "EfficientAdam-uniform": Entry(
        partial(EfficientAdam, epsilon=EPSILON, quantiser="uniform", bits=4, groups="global"),
        partial(
            oracle.efficient_adam,
            eps=EPSILON,
            compress=partial(oracle.quantise, levels=oracle.uniform_levels(4), groups=(slice(0, 26),)),
        ),
        each(few_bits(4, 1), after_the_first(4, 1), to_all=True),
    ),
    "EfficientAdam-sign": Entry(
        partial(EfficientAdam, epsilon=EPSILON, quantiser="sign"),
        # Clients send −δ, and one bit sends 0 as +1.
        partial(oracle.efficient_adam, eps=EPSILON, compress=lambda z: -oracle.one_bit(-z, 1, oracle.TENSORS)),
        each(few_bits(1, 4), after_the_first(1, 4), to_all=True),
    ),
}


def parts_in(part: Any, with_options: bool) -> Iterator[str]:
    """Yield the name of a part's class, followed by the options that it names or switches, and the parts within it."""
    values = [getattr(part, field.name) for field in fields(part)]
    options = [str(value) for value in values if isinstance(value, str | bool) or value is None]
    yield " ".join([type(part).__name__, *(options if with_options else ())])
    for value in values:
        for inner in value if isinstance(value, tuple) else (value,):
            if is_dataclass(inner) and not isinstance(inner, type):
                yield from parts_in(inner, with_options)


HOOKS = ("arrange_data", "prepare", "validate", "configure_callbacks")
"""Methods of an algorithm that a subclass may have instead of a part."""


def properties_of(algorithm: Algorithm, with_options: bool = False) -> set[tuple[str, ...]]:
    """Return an algorithm's parts and hooks, and its pairs of two parts' classes from different slots, and of two steps.

    Args:
        algorithm: the algorithm.
        with_options: tell parts of one class apart that differ in an option.
    """
    codecs = [algorithm.uplink, algorithm.downlink]
    slots = [[algorithm.rule], [algorithm.exchange], [algorithm.aggregator], [*algorithm.personal], [*algorithm.steps]]
    names = [[type(part).__name__ for part in slot] for slot in slots]
    pairs = [pair for one, other in combinations(names, 2) for pair in product(one, other)]
    single = {(name,) for slot in [*slots, codecs] for part in slot for name in parts_in(part, with_options)}
    owners = {hook: next(kind for kind in type(algorithm).__mro__ if hook in vars(kind)) for hook in HOOKS}
    hooks = {(f"{owner.__name__}.{hook}",) for hook, owner in owners.items()}
    return single | hooks | set(pairs) | set(combinations(names[-1], 2))


def covering(roster: dict[str, Entry], with_options: bool = False) -> list[str]:
    """Return the names of a few entries that have every part and every pair of parts of the roster."""
    having = {name: properties_of(entry.algorithm(), with_options) for name, entry in roster.items()}
    missing, chosen = set[tuple[str, ...]]().union(*having.values()), list[str]()
    while missing:
        chosen.append(max(having, key=lambda name: len(having[name] & missing)))  # the first of the best
        missing -= having[chosen[-1]]
    return [name for name in roster if name in chosen]


COVERING = covering(ROSTER)
EVERY_OPTION = covering(ROSTER, with_options=True)
WHOLE = [name for name in COVERING if not ROSTER[name].algorithm().exchange.cuts]
"""Those of `COVERING` whose clients train the whole model, which may be pruned."""


def problem(
    rounds: int,
    epochs: int = 1,
    cohort_size: int = 3,
    seed: int = 0,
    absent: frozenset[int] = frozenset(),
    num_server: int = 0,
    straggler_rate: float = 0.0,
) -> oracle.Problem:
    """Return the oracle's view of `toys.federation()`, or of `toys.Served(num_server)`."""
    data = toys.Served(num_server) if num_server else toys.federation()
    data.setup("fit")
    x, y = (tensor.double().numpy() for tensor in toys.samples(sum(toys.SIZES) + num_server))
    return oracle.Problem(
        x=[x[rows] for rows in data.client_indices],
        y=[y[rows] for rows in data.client_indices],
        batch_size=toys.BATCH_SIZE,
        cohort_size=cohort_size,
        rounds=rounds,
        epochs=epochs,
        seed=seed,
        absent=absent,
        straggler_rate=straggler_rate,
        server_x=x[data.server_indices],
        server_y=y[data.server_indices],
    )

"""Test FedAP, FedDUAP and FedDUMAP: plain loops, every runner, resuming, the bits sent, their limits."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import oracle
import pytest
import torch
from compared_runs import MakeTrainer, ran, resumed_like_whole
from lightning.pytorch import Callback
from roster import problem
from toys import SIZES, Convolved, Perceptron, Served, federation, read_rows, samples, vector

from lightning_fl import UserError
from lightning_fl.algorithms import Algorithm, FedAP, FedAvg, FedDU, FedDUAP, FedDUM, FedDUMAP
from lightning_fl.callbacks import AdaptivePruning
from lightning_fl.data import Arrays
from lightning_fl.modules import ImageClassifier


class Case(NamedTuple):
    """Method, its oracle, the number of server samples and the learning rate."""

    algorithm: Callable[[], Algorithm]
    oracle: Callable[..., np.ndarray]
    num_server: int = 9
    learning_rate: float = 0.1

    def module(self) -> Convolved:
        return Convolved(self.learning_rate)

    def data(self) -> Any:
        return Served(self.num_server) if self.num_server else federation()


CASES = {
    "FedAP": Case(partial(FedAP, prune_round=2), partial(oracle.fedap, when=2)),
    "FedAP-initial": Case(partial(FedAP, prune_round=0), partial(oracle.fedap, when=0)),
    "FedAP-clients": Case(partial(FedAP, prune_round=1), partial(oracle.fedap, when=1), num_server=0),
    "FedAP-fixed": Case(
        partial(FedAP, prune_round=3, rate_mode="fixed", rate=0.6), partial(oracle.fedap, when=3, rate=0.6)
    ),
    # The paper's rule prunes only near the initial model.
    "FedAP-gap": Case(
        partial(FedAP, prune_round=2, rate_mode="gap"), partial(oracle.fedap, when=2, gap=True), learning_rate=0.02
    ),
    "FedDUAP": Case(partial(FedDUAP, prune_round=2, C=1.5), partial(oracle.fedap, when=2, update={"C": 1.5})),
    "FedDUMAP": Case(
        partial(FedDUMAP, prune_round=2, beta=0.6, local_beta=0.8),
        partial(oracle.fedap, when=2, beta=0.6, local_beta=0.8, update={}),
    ),
}


@pytest.mark.parametrize(("name", "runner"), [*((name, "serial") for name in CASES), ("FedDUMAP", "stacked")])
def test_matches_its_oracle(name: str, runner: Any, make_trainer: MakeTrainer) -> None:
    case = CASES[name]
    module = case.module()
    given = replace(problem(rounds=4, num_server=case.num_server), learning_rate=case.learning_rate)
    expected = case.oracle(given, vector(module))
    trainer = make_trainer(max_rounds=4, precision="64-true", runner=runner)
    trainer.fit(module, case.data(), case.algorithm())
    assert len(expected) < 26, "nothing was pruned"
    np.testing.assert_allclose(vector(module), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "bf16-mixed"])
def test_it_prunes_in_every_precision(precision: str, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=2, precision=precision)
    trainer.fit(Convolved(), Served(9), FedAP(prune_round=1, rate_mode="fixed", rate=0.6))
    make_trainer(max_rounds=2, precision=precision).fit(Convolved(), Served(9), FedAP(prune_round=1))
    assert trainer.callback_metrics["model/parameters"] < 26


@pytest.mark.parametrize("name", ["FedAP-gap", "FedDUMAP"])
@pytest.mark.parametrize("stop", [1, 3])
@pytest.mark.matrix
def test_resumed_equals_uninterrupted_bit_for_bit(
    name: str, stop: int, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    case = CASES[name]
    module, _ = resumed_like_whole(make_trainer, tmp_path, case.module, case.data, case.algorithm, stop=stop)
    assert len(vector(module)) < 26


@pytest.mark.parametrize(
    ("limit", "same"),
    [
        (FedAP(prune_round=1, rate_mode="fixed", rate=0.0), FedAvg()),
        (FedDUAP(prune_round=1, rate_mode="fixed", rate=0.0), FedDU()),
        (FedDUMAP(prune_round=1, rate_mode="fixed", rate=0.0), FedDUM()),
        (
            FedDUMAP(prune_round=1, rate_mode="fixed", rate=0.6, beta=0, local_beta=0),
            FedDUAP(prune_round=1, rate_mode="fixed", rate=0.6),
        ),
    ],
    ids=["FedAP", "FedDUAP", "FedDUMAP", "FedDUMAP-without-momentum"],
)
def test_is_another_method_in_the_limit(limit: Algorithm, same: Algorithm, make_trainer: MakeTrainer) -> None:
    one = Convolved()
    other = copy.deepcopy(one)
    runs = []
    for module, algorithm in ((one, limit), (other, same)):
        trainer = make_trainer(max_rounds=3)
        trainer.fit(module, Served(9), algorithm)
        runs.append(trainer.run.ledger.state_dict())
    np.testing.assert_allclose(vector(one), vector(other), rtol=0, atol=1e-6)
    assert runs[0] == runs[1]


class Bits(Callback):
    """Callback that records the bits sent in each round."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, dict[str, int]]] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        booked = copy.deepcopy(trainer.run.ledger.round_bits)
        self.rounds.append({way: {kind: n for kind, n in kinds.items() if n} for way, kinds in booked.items()})


@pytest.mark.parametrize(("num_server", "max_sources"), [(0, None), (9, None), (9, 3), (0, 2)])
def test_bits_of_asking(num_server: int, max_sources: int | None, make_trainer: MakeTrainer) -> None:
    """Check the bits: d = 26 before; 6h + 2 with h of four filters left."""
    q, d, bits = 32, 26, Bits()
    case = Case(partial(FedAP, prune_round=1, max_sources=max_sources), oracle.fedap, num_server)
    algorithm, module = case.algorithm(), case.module()
    make_trainer(max_rounds=3, callbacks=bits).fit(module, case.data(), algorithm)
    pruning = algorithm.pruning  # type: ignore[attr-defined]
    assert len(pruning.asked) == (len(SIZES) if max_sources is None else len(pruning.asked))
    assert max_sources is None or max_sources - 1 <= len(pruning.asked) <= max_sources
    assert (pruning.ranked_by is None) == bool(num_server)
    listening = set(pruning.asked) | ({pruning.ranked_by} - {None})
    small = len(vector(module))
    assert small in (14, 20)
    cohort = set(problem(rounds=3, num_server=num_server).cohort(1))
    # Queried clients receive the whole model; the others of the round's three clients receive the pruned one.
    model = q * (d * len(listening) + small * len(cohort - listening))
    ranks = 0 if num_server else 4 * q
    assert bits.rounds == [
        {"up": {"model": 3 * q * d}, "down": {"model": 3 * q * d}},
        {
            "up": {"model": 3 * q * small, "scalars": q * len(pruning.asked) + ranks},
            "down": {"model": model, "mask": 6 * 4},
        },
        {"up": {"model": 3 * q * small}, "down": {"model": 3 * q * small}},
    ]


def test_asking_costs_the_same_with_any_method(make_trainer: MakeTrainer) -> None:
    """Check that the callback alone equals FedAP, with the same bits."""
    one, runs = Convolved(), []
    other = copy.deepcopy(one)
    for module, algorithm, callbacks in (
        (one, FedAP(prune_round=1), []),
        (other, FedAvg(), [AdaptivePruning(prune_epoch=1)]),
    ):
        trainer = make_trainer(max_rounds=3, callbacks=callbacks)
        trainer.fit(module, federation(), algorithm)
        runs.append(trainer.run.ledger.state_dict())
    assert np.array_equal(vector(one), vector(other))
    assert runs[0] == runs[1]
    assert runs[0]["total_bits"]["up"]["scalars"] == 32 * (6 + 4)


def test_asking_costs_also_where_nothing_is_pruned(make_trainer: MakeTrainer) -> None:
    one, bits = Convolved(lr=0.3), Bits()  # far from the initial model
    other = copy.deepcopy(one)
    make_trainer(max_rounds=3).fit(one, Served(9), FedAvg())
    make_trainer(max_rounds=3, callbacks=bits).fit(other, Served(9), FedAP(prune_round=2, rate_mode="gap"))
    assert np.array_equal(vector(one), vector(other))
    assert bits.rounds[2]["up"] == {"model": 3 * 32 * 26, "scalars": 6 * 32}
    assert bits.rounds[2]["down"] == {"model": 6 * 32 * 26}


def test_bits_of_the_cnn(make_trainer: MakeTrainer) -> None:
    """Check half of the filters: d = 122,570; d' = 16·28 + 32·145 + 32·289 + 64·513 + 650 = 47,818; Σ c_l = 32 + 64 + 64."""
    module, bits = ImageClassifier("cnn", learning_rate=1e-6), Bits()
    with torch.no_grad():
        for parameter in module.parameters():
            signs = 2 * torch.randint(0, 2, (parameter.numel(),)) - 1.0
            small = torch.arange(parameter.numel()) % 2 if parameter.dim() == 4 else torch.zeros(parameter.numel())
            parameter.copy_((signs * torch.where(small == 1, 1e-4, 0.05)).view_as(parameter))
    images, labels = torch.rand(24, 3, 32, 32), torch.arange(24) % 10
    data = Arrays(
        train=(images, labels),
        test=(images, labels),
        num_clients=4,
        num_classes=10,
        client_fraction=0.8,
        server_fraction=0.2,
    )
    # 28,080 of the convolutions' weights are small, and ⌊0.23 d⌋ = 28,191.
    algorithm = FedAP(prune_round=1, rate_mode="fixed", rate=0.23)
    make_trainer(max_rounds=3, clients_per_round=2, callbacks=bits).fit(module, data, algorithm)
    assert len(vector(module)) == 47_818
    assert bits.rounds == [
        {"up": {"model": 7_844_480}, "down": {"model": 7_844_480}},
        {"up": {"model": 3_060_352}, "down": {"model": 3_060_352, "mask": 640}},
        {"up": {"model": 3_060_352}, "down": {"model": 3_060_352}},
    ]


def test_tells_what_it_did(make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]) -> None:
    make_trainer(max_rounds=3, **keeps_files).fit(Convolved(), Served(9), FedAP(prune_round=1, max_sources=4))
    rows = read_rows(tmp_path)
    assert [bool(row["prune/rate"]) for row in rows] == [False, True, False]
    assert 0 < float(rows[1]["prune/rate"]) < 0.95
    assert float(rows[1]["prune/threshold"]) > 0
    assert 0.25 <= float(rows[1]["prune/rate/hidden"]) < 1
    assert (float(rows[1]["prune/sources"]), float(rows[1]["prune/nonfinite_sources"])) == (4, 0)
    assert int(rows[0]["model/parameters"]) == 26 > int(rows[1]["model/parameters"])


def test_sources_without_finite_curvature_count_as_zero(make_trainer: MakeTrainer) -> None:
    x, y = samples(sum(SIZES) + 9)
    data = Served(9)
    data.setup("fit")
    x[data.client_indices[3][0]] = torch.nan
    trainer = make_trainer(max_rounds=1, callbacks=AdaptivePruning(prune_epoch=0))
    trainer.fit(Convolved(), Served(9, (x, y)))
    assert trainer.callback_metrics["prune/nonfinite_sources"] == 1
    assert 0 < trainer.callback_metrics["prune/rate"] < 1


def test_too_late_is_told_and_what_cannot_be_pruned_is_refused(make_trainer: MakeTrainer) -> None:
    with pytest.warns(
        UserWarning, match="AdaptivePruning would prune after 30 epochs, but the run ends after 1 epochs"
    ):
        make_trainer(max_rounds=1).fit(Convolved(), Served(9), FedDUMAP())
    module = Perceptron()
    module.example_input_array = torch.zeros(1, 3)
    with pytest.raises(UserError, match="AdaptivePruning: no layer of Perceptron can lose filters"):
        make_trainer(max_rounds=1).fit(module, Served(9), FedAP(prune_round=0))
    with pytest.raises(UserError, match=r"needs must lie in \[0, 1\), got 1.5"):
        FedAP(rate_mode="fixed", rate=1.5)


@pytest.mark.slow
def test_two_processes_share_the_asking_and_prune_alike(tmp_path: Path) -> None:
    words = ("--model.network", "lenet5", "--data.image_size", "32")
    method = "FedAP --algorithm.prune_round 1 --algorithm.max_sources 3"
    rows, weights = ran(tmp_path / "one", *words, algorithm=method)
    others, other_weights = ran(tmp_path / "two", *words, num_processes=2, algorithm=method)
    assert int(rows[1]["model/parameters"]) < int(rows[0]["model/parameters"])
    for here, there in zip(rows, others, strict=True):
        assert [here[f"comm/{way}link_bits"] for way in ("up", "down")] == [
            there[f"comm/{way}link_bits"] for way in ("up", "down")
        ]
    for name in ("prune/rate", "prune/threshold"):
        assert float(rows[1][name]) == pytest.approx(float(others[1][name]), rel=1e-3)
    for name, value in weights.items():
        torch.testing.assert_close(value, other_weights[name], rtol=1e-5, atol=1e-6, msg=name)

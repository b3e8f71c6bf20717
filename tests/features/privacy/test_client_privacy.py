"""Test clipping and noise at the server: what one client can change, what noise is there, and what runs report."""

from collections import Counter
from collections.abc import Iterator
from math import inf, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer, agree, equal_states, ran
from hypothesis import given
from hypothesis import strategies as st
from roster import ROSTER
from torch import Tensor
from toys import SIZES, Perceptron, federation, fit_until, read_rows, vector

from lightning_fl import UserError
from lightning_fl.aggregators import WeightedMean
from lightning_fl.algorithms import FedAdam, FedAvg, FedDA, FedProx
from lightning_fl.codecs import ErrorFeedback, OneBit
from lightning_fl.engine.population import Population
from lightning_fl.features.privacy import ClientPrivacy, LocalPrivacy
from lightning_fl.features.privacy.central import CentralMechanism
from lightning_fl.features.privacy.mechanism import clip_factor, joint_norm
from lightning_fl.features.privacy.noisy_sum import NoisySum
from lightning_fl.features.privacy.spent_privacy import SpentPrivacy
from lightning_fl.outputs import checkpoint_file
from lightning_fl.slots import Merging, Result, RoundContext, Upload
from lightning_fl.state.run_state import Run
from lightning_fl.vectors.layout import NO_LAYOUT, Layout
from lightning_fl.vectors.submodel import Submodel

NEEDS_LIBRARY = pytest.mark.skipif(
    not __import__("importlib.util").util.find_spec("dp_accounting"), reason="needs the extra privacy"
)
OFF: dict[str, Any] = {
    "clip": inf,
    "noise_multiplier": 0,
    "sampling": "fixed",
    "weights": "samples",
    "cap": 1e9,
    "denominator": "received",
}
"""Settings of a mechanism that leaves FedAvg as it is."""
ALLOWED = (
    *("FedAvg", "FedProx", "APFL", "FedBN", "ServerM", "DeviceM", "ServerAdam", "FedOpt", "DeviceM-mime-lite", "FedDA"),
    *("FedDUS", "DataSharing", "HybridFL", "IMC", "FedAdam", "FedAdamSSM", "FairnessTop", "EfficientAdam"),
)
"""Methods that a private run may have."""
FEW = ("FedAvg", "APFL", "FedDA", "HybridFL", "FedAdamSSM")


def upload(message: dict[str, Tensor], samples: float = 1.0, client: int = 0) -> Upload:
    return Upload(Result(client, {}, samples, {}, {}, {}, num_steps=1), message)


def noisy_sum(**fields: Any) -> NoisySum:
    lengths = fields.pop("lengths", {"model": 3, "moments/first": 3})
    given = {
        "clip": 1.0,
        "scales": {},
        "noise": 0.0,
        "draws": [(fields.pop("seed", 1), 1.0)],
        "bits": None,
        "cap": None,
        "uniform": frozenset(),
        "lengths": lengths,
        "totals": dict.fromkeys(lengths, 1.0),
        "device": torch.device("cpu"),
    }
    return NoisySum(**(given | fields))


def context(kept: Tensor | None = None, length: int = 3) -> RoundContext:
    layout = Layout(("w",), ((length,),))
    unpruned = None if kept is None else Submodel.from_masks(layout, NO_LAYOUT, kept)
    return RoundContext(layout, NO_LAYOUT, 10, unpruned=unpruned)


def summed(aggregator: NoisySum, uploads: list[Upload], within: RoundContext | None = None) -> dict[str, Tensor]:
    """Return W̄ A."""
    accumulator: dict[str, Any] = {}
    for one in uploads:
        aggregator.add(accumulator, one)
    merged = aggregator.combine(accumulator, Merging(context() if within is None else within))
    return {name: vector * aggregator.totals[name] for name, vector in merged.items()}


def length(message: dict[str, Tensor], scales: dict[str, float] | None = None) -> float:
    """Return the length of all vectors, one after the other, by the plain formula."""
    joined = np.concatenate(
        [(scales or {}).get(name, 1.0) * message[name].double().numpy() for name in sorted(message)]
    )
    return float(np.sqrt(np.square(joined).sum()))


NUMBERS = st.lists(st.floats(-1e3, 1e3, width=32), min_size=3, max_size=3).map(torch.tensor)


@pytest.mark.long
@given(NUMBERS, NUMBERS, st.floats(1e-3, 1e3), st.floats(0.1, 10))
def test_a_clipped_upload_is_no_longer_than_the_clip(one: Tensor, other: Tensor, clip: float, scale: float) -> None:
    message, scales = {"model": one, "moments/first": other}, {"moments/first": scale}
    assert joint_norm(message, scales) == pytest.approx(length(message, scales), rel=1e-12)
    clipped = summed(noisy_sum(clip=clip, scales=scales), [upload(message)])
    assert length(clipped, scales) <= clip * (1 + 1e-6)
    if length(message, scales) <= clip * (1 - 1e-12):
        for name, entry in message.items():
            assert torch.equal(clipped[name], entry.double()), "what is inside stays bit for bit"


@pytest.mark.long
@given(st.lists(st.tuples(NUMBERS, st.integers(1, 50)), min_size=1, max_size=5), st.sampled_from([None, 20.0]))
def test_one_client_moves_the_sum_by_twice_the_clip_at_most(clients: list[Any], cap: float | None) -> None:
    """A scaled upload moves it by 2C u_max at most, and a missing one, as a rejected one is, by C u_max."""
    aggregator = noisy_sum(cap=cap, lengths={"model": 3})
    uploads = [upload({"model": entry}, samples) for entry, samples in clients]
    usual = summed(aggregator, uploads)
    entry, samples = clients[0]
    scaled = summed(aggregator, [upload({"model": -1e6 * entry}, samples), *uploads[1:]])
    missing = summed(aggregator, uploads[1:])
    most = 1.0 if cap is None else cap
    assert length({"model": usual["model"] - scaled["model"]}) <= 2 * most * (1 + 1e-9)
    assert length({"model": usual["model"] - missing["model"]}) <= most * (1 + 1e-9)


def test_the_factor_of_a_clip() -> None:
    assert [clip_factor(norm, 2.0) for norm in (0.0, 1.0, 2.0, 4.0, inf)] == [1, 1, 1, 0.5, 0]


def test_weights_by_samples_have_a_cap_and_a_fixed_divisor() -> None:
    mechanism = CentralMechanism.of(
        ClientPrivacy(noise_multiplier=0, weights="samples", cap=10), np.array([4, 0, 30, 6]), 2
    )
    assert mechanism.denominator(False) == pytest.approx(2 / 3 * (4 + 10 + 6))
    assert mechanism.denominator(True) == 2  # of what all clients count alike for
    aggregator = noisy_sum(cap=10.0, uniform={"moments/control"}, lengths={"model": 3, "moments/control": 3})
    message = {"model": torch.full((3,), 0.1), "moments/control": torch.full((3,), 0.2)}
    found = summed(aggregator, [upload(message, 30.0)])
    torch.testing.assert_close(found["model"], torch.full((3,), 1.0, dtype=torch.float64))
    torch.testing.assert_close(found["moments/control"], torch.full((3,), 0.2, dtype=torch.float64))


@pytest.mark.parametrize("number", [2, 3, 7])
def test_uniform_weights_divide_by_the_number_of_clients_exactly(number: int) -> None:
    mechanism = CentralMechanism.of(ClientPrivacy(noise_multiplier=0), np.full(49, 3), number)
    assert mechanism.denominator(False) == number


@pytest.mark.long
def test_noise_is_normal_and_belongs_to_the_seed() -> None:
    """Of 10^6 numbers the mean lies within 4 standard errors, and the standard deviation within 0.5 %."""
    size, std = 10**6, 1.5 * 2.0 / (10 * 0.5)
    aggregator = noisy_sum(
        lengths={"model": size}, noise=1.5 * 2.0, scales={"model": 0.5}, totals={"model": 10.0}, clip=2.0
    )
    found = aggregator.combine({}, Merging(context(length=size)))["model"]
    assert abs(float(found.mean())) < 4 * std / sqrt(size)
    assert float(found.std()) == pytest.approx(std, rel=5e-3)
    again = noisy_sum(lengths={"model": size}, noise=1.5 * 2.0, scales={"model": 0.5}, totals={"model": 10.0})
    assert torch.equal(again.combine({}, Merging(context(length=size)))["model"], found)
    other = noisy_sum(lengths={"model": size}, noise=1.0, seed=2).combine({}, Merging(context(length=size)))["model"]
    assert abs(float(torch.corrcoef(torch.stack([found, other]))[0, 1])) < 4 / sqrt(size)


def test_vectors_have_different_noise_and_pruned_coordinates_none() -> None:
    kept = torch.tensor([True, False, True])
    found = summed(noisy_sum(noise=1.0), [], context(kept))
    assert sorted(found) == ["model", "moments/first"]
    assert all(bool(entry[1] == 0) and bool(entry[[0, 2]].abs().min() > 0) for entry in found.values())
    assert not torch.equal(found["model"], found["moments/first"])


def fitted(make_trainer: MakeTrainer, algorithm: Any = None, data: Any = None, **flags: Any) -> Any:
    torch.default_generator.manual_seed(0)
    module = Perceptron()
    trainer = make_trainer(**{"max_rounds": 3, **flags})
    trainer.fit(module, federation() if data is None else data, FedAvg() if algorithm is None else algorithm)
    return module, trainer


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in ALLOWED]
)
def test_without_clip_and_noise_a_method_is_itself(name: str, make_trainer: MakeTrainer) -> None:
    entry = ROSTER[name]
    plain, private = (
        fitted(make_trainer, entry.algorithm(), entry.federation(), privacy=privacy, runner=runner)
        for privacy, runner in ((None, entry.runners[-1]), (ClientPrivacy(**OFF), entry.runners[-1]))
    )
    assert equal_states(plain[0].state_dict(), private[0].state_dict())
    assert equal_states(plain[1].run.state_dict() | {"features": 0}, private[1].run.state_dict() | {"features": 0})


def test_alike_and_with_all_clients_it_is_the_uniform_mean(make_trainer: MakeTrainer) -> None:
    privacy = ClientPrivacy(clip=inf, noise_multiplier=0, sampling="every")
    private = fitted(make_trainer, privacy=privacy, clients_per_round=6)[0]
    plain = fitted(make_trainer, FedAvg(aggregator=WeightedMean("uniform")), clients_per_round=6)[0]
    assert equal_states(plain.state_dict(), private.state_dict())


def clipped_lengths(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, algorithm: Any) -> Iterator[float]:
    """Yield the length of each upload that enters the sum, times what it counts for."""
    before: list[dict[str, Tensor]] = []
    added = NoisySum.add

    def add(self: NoisySum, accumulator: dict[str, Any], one: Upload) -> None:
        single: dict[str, Any] = {}
        added(self, single, one)
        before.append({name: single[name].clone() for name in self.lengths})
        added(self, accumulator, one)

    monkeypatch.setattr(NoisySum, "add", add)
    fitted(make_trainer, algorithm, privacy=ClientPrivacy(clip=0.05, noise_multiplier=0, sampling="fixed"))
    assert len(before) == 9
    return (length(message) for message in before)


@pytest.mark.parametrize(
    "algorithm",
    [FedAvg(uplink=ErrorFeedback(OneBit())), FedAdam(), FedDA()],
    ids=["one bit", "three vectors", "two vectors"],
)
def test_all_that_crosses_is_clipped_together(
    algorithm: Any, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = list(clipped_lengths(make_trainer, monkeypatch, algorithm))
    assert max(lengths) <= 0.05 * (1 + 1e-6)
    assert max(lengths) == pytest.approx(0.05), "the clip must bind"


@NEEDS_LIBRARY
def test_noise_alone_tells_a_private_first_round_from_another(make_trainer: MakeTrainer) -> None:
    settings = {"clip": 0.5, "sampling": "every"}
    quiet = fitted(
        make_trainer, max_rounds=1, clients_per_round=6, privacy=ClientPrivacy(noise_multiplier=0, **settings)
    )
    noisy = fitted(
        make_trainer,
        max_rounds=1,
        clients_per_round=6,
        privacy=ClientPrivacy(noise_multiplier=2, delta=0.01, **settings),
    )
    difference = vector(noisy[0]) - vector(quiet[0])
    assert np.std(difference) == pytest.approx(2 * 0.5 / 6, rel=0.5)
    assert noisy[1].history["privacy/noise"][0] == pytest.approx(2 * 0.5 / 6)


@NEEDS_LIBRARY
def test_a_round_to_which_nobody_comes_releases_noise_and_counts(make_trainer: MakeTrainer) -> None:
    privacy = ClientPrivacy(noise_multiplier=1, delta=0.01, sampling="every")
    torch.default_generator.manual_seed(0)
    before = vector(Perceptron())
    torch.default_generator.manual_seed(0)
    module, trainer = fitted(make_trainer, privacy=privacy, dropout_rate=0.999999, max_rounds=2, clients_per_round=6)
    assert [int(row["clients/accepted"]) for row in trainer.fit_loop.rows] == [0, 0]
    assert np.std(vector(module) - before) == pytest.approx(sqrt(2) / 6, rel=0.5)
    assert sum(trainer.run.features["privacy"].events.values()) == 2


def test_poisson_cohorts_have_the_mean_and_the_variance_of_coins() -> None:
    sizes = np.array([0, *[3] * 40])
    population = Population(sizes, 10, sampling="poisson")
    run = Run(0, NO_LAYOUT, NO_LAYOUT, torch.zeros(1), torch.zeros(0), {})
    counts = []
    taken: Counter[int] = Counter()
    for run.round in range(2000):
        cohort = population.select(run)
        assert len(set(cohort)) == len(cohort)
        counts.append(len(cohort))
        taken.update(cohort)
    variance = 40 * 0.25 * 0.75
    assert abs(np.mean(counts) - 10) < 4 * sqrt(variance / 2000)
    # The variance of a sample variance of nearly normal numbers is 2σ⁴/n.
    assert abs(np.var(counts) - variance) < 4 * variance * sqrt(2 / 2000)
    assert 0 not in taken
    assert all(abs(taken[client] - 500) < 5 * sqrt(2000 * 0.25 * 0.75) for client in range(1, 41))


@NEEDS_LIBRARY
def test_epsilon_is_logged_after_validated_rounds_and_grows(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    privacy = ClientPrivacy(noise_multiplier=1, delta=1e-3)
    _, trainer = fitted(make_trainer, privacy=privacy, max_rounds=5, val_every_n_rounds=2, **keeps_files)
    rows = read_rows(tmp_path)
    spent = [float(row["privacy/epsilon"]) for row in rows if row["privacy/epsilon"]]
    assert [bool(row["privacy/epsilon"]) for row in rows] == [False, True, False, True, True]
    assert spent == sorted(spent)
    assert {float(row["privacy/clip"]) for row in rows} == {1.0}
    assert trainer.privacy_in_words == (f"ε {spent[-1]:.3g} at δ 0.001 (one client more or less, Poisson, RDP)")


@NEEDS_LIBRARY
def test_a_resumed_private_run_equals_a_whole_one(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    states = {}
    for part, stops in (("whole", [4]), ("resumed", [2, 4])):
        for number, stop in enumerate(stops):
            torch.default_generator.manual_seed(0)
            module = Perceptron()
            trainer = make_trainer(
                max_rounds=4,
                privacy=ClientPrivacy(noise_multiplier=1.5, delta=0.01),
                val_every_n_rounds=2,
                **{**keeps_files, "default_root_dir": tmp_path / part},
            )
            fit_until(trainer, stop, module, federation(), FedAdam(), ckpt_path="last" if number else None)
        states[part] = trainer.run.state_dict(), [row["privacy/epsilon"] for row in read_rows(tmp_path / part)]
    assert states["whole"][0]["features"]["privacy"]["events"] == [["poisson", 1.5, 0.5, 0.0, 4]]
    assert equal_states(states["whole"][0], states["resumed"][0])
    assert states["whole"][1] == states["resumed"][1]


OTHERS: dict[str, dict[str, Any]] = {
    "rate": {"rate": 0.2},
    "model": {"start": 1},
    "clip": {"privacy": {"noise_multiplier": 5.0, "clip": 0.5}},
    "noise": {"privacy": {"noise_multiplier": 2.0}},
    "method": {"algorithm": FedProx(mu=0.1)},
    "work": {"local_epochs": 2},
    "samples": {"sizes": (4, 4, 4, 9, 12, 7)},
}
"""Runs of one seed that differ in a single setting."""


def noise_of(make_trainer: MakeTrainer, kind: type, folder: Path, **given: Any) -> np.ndarray:
    """Return the change of the model in two rounds whose uploads are clipped to nothing, per standard deviation of the noise."""
    settings = {"clip": 1e-6, "delta": 0.01, **given.pop("privacy", {"noise_multiplier": 5.0})}
    torch.default_generator.manual_seed(given.pop("start", 0))
    rate, sizes, algorithm = given.pop("rate", 0.1), given.pop("sizes", SIZES), given.pop("algorithm", FedAvg())
    module = Perceptron(configure=lambda m: torch.optim.SGD(m.parameters(), lr=rate))
    before = vector(module).copy()
    flags = {"max_rounds": 2, "clients_per_round": 6, "default_root_dir": folder, **given}
    make_trainer(privacy=kind(**settings), **flags).fit(module, federation(sizes), algorithm)
    change: np.ndarray = (vector(module) - before) / (settings["clip"] * settings["noise_multiplier"])
    return change / np.linalg.norm(change)


@NEEDS_LIBRARY
@pytest.mark.parametrize("kind", [ClientPrivacy, LocalPrivacy])
def test_runs_of_one_seed_share_no_noise(make_trainer: MakeTrainer, kind: type, tmp_path: Path) -> None:
    """Test that directions of the noise in 26 dimensions are independent, and that the same run draws the same noise again."""
    first, again = (noise_of(make_trainer, kind, tmp_path) for _ in range(2))
    assert abs(float(first @ again)) > 0.999
    for name, other in OTHERS.items():
        assert abs(float(first @ noise_of(make_trainer, kind, tmp_path, **other))) < 0.8, name


@NEEDS_LIBRARY
@pytest.mark.parametrize("kind", [ClientPrivacy, LocalPrivacy])
def test_runs_of_different_length_share_no_noise(make_trainer: MakeTrainer, kind: type) -> None:
    """Test this also because a schedule that ends with the run lets the models of the same rounds differ."""
    keys = []
    for rounds in (1, 2):
        trainer = make_trainer(privacy=kind(noise_multiplier=1.0, delta=0.01), max_rounds=rounds, clients_per_round=6)
        trainer.fit(Perceptron(), federation(), FedAvg())
        keys.append(trainer.run.features["privacy"].noise_key)
    assert keys[0] != keys[1]


@NEEDS_LIBRARY
@pytest.mark.parametrize("kind", [ClientPrivacy, LocalPrivacy])
def test_a_resumed_run_keeps_its_noise_whatever_changes(
    make_trainer: MakeTrainer, kind: type, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    keys = []
    for rounds, rate, path in ((1, 0.1, None), (2, 0.2, "last")):
        files = {**keeps_files, "default_root_dir": tmp_path, "max_rounds": rounds, "clients_per_round": 6}
        trainer = make_trainer(privacy=kind(noise_multiplier=1.0, delta=0.01), **files)
        module = Perceptron(configure=lambda m, rate=rate: torch.optim.SGD(m.parameters(), lr=rate))
        trainer.fit(module, federation(), FedAvg(), ckpt_path=path)
        keys.append(trainer.run.features["privacy"].noise_key)
    assert keys[0] == keys[1] > 0


@NEEDS_LIBRARY
def test_a_target_is_met_and_a_longer_run_keeps_its_noise(
    make_trainer: MakeTrainer, keeps_files: dict[str, Any]
) -> None:
    privacy = ClientPrivacy(epsilon=3.0, delta=0.01, sampling="every")
    trainer = make_trainer(max_rounds=2, privacy=privacy, clients_per_round=6, **keeps_files)
    trainer.fit(Perceptron(), federation(), FedAvg())
    noise_multiplier = trainer.run.features["privacy"].noise_multiplier
    assert 2.9 < trainer.history["privacy/epsilon"].iloc[-1] <= 3.0
    longer = make_trainer(max_rounds=3, privacy=privacy, clients_per_round=6, **keeps_files)
    with pytest.warns(UserWarning, match=r"3 rounds cost epsilon .*, above the 3 of privacy.epsilon"):
        longer.fit(Perceptron(), federation(), FedAvg(), ckpt_path="last")
    assert longer.run.features["privacy"].noise_multiplier == noise_multiplier


@NEEDS_LIBRARY
def test_a_bound_ends_the_run_before_the_round_that_would_pass_it(make_trainer: MakeTrainer) -> None:
    def rounds(bound: float) -> tuple[int, list[float]]:
        privacy = ClientPrivacy(noise_multiplier=1, delta=0.01, max_epsilon=bound, sampling="every")
        trainer = fitted(make_trainer, max_rounds=6, privacy=privacy, clients_per_round=6)[1]
        return trainer.run.round, list(trainer.history["privacy/epsilon"])

    unbound = ClientPrivacy(noise_multiplier=1, delta=0.01, sampling="every")
    whole = fitted(make_trainer, max_rounds=6, privacy=unbound, clients_per_round=6)[1]
    spent = list(whole.history["privacy/epsilon"])
    assert rounds((spent[2] + spent[3]) / 2) == (3, spent[:3])
    assert rounds(spent[-1]) == (6, spent)
    with pytest.raises(UserError, match=r"max_epsilon is 0.1, but one round costs epsilon"):
        rounds(0.1)


@NEEDS_LIBRARY
def test_an_undone_round_counts(make_trainer: MakeTrainer) -> None:
    from toys import Served

    from lightning_fl.features.loss_guard import LossGuard

    privacy = ClientPrivacy(noise_multiplier=30, delta=0.01, sampling="every")
    guard = LossGuard(rounds=1.01)
    _, trainer = fitted(make_trainer, data=Served(9), privacy=privacy, loss_guard=guard, clients_per_round=6)
    assert sum(row["guard/undone"] for row in trainer.fit_loop.rows) > 0
    assert sum(trainer.run.features["privacy"].events.values()) == 3


@NEEDS_LIBRARY
def test_an_open_run_is_not_resumed_as_a_private_one(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    make_trainer(max_rounds=1, **keeps_files).fit(Perceptron(), federation(), FedAvg())
    privacy = ClientPrivacy(noise_multiplier=1, delta=0.01)
    with pytest.raises(UserError, match=r"other settings: trainer.privacy None → ClientPrivacy"):
        make_trainer(privacy=privacy, **keeps_files).fit(Perceptron(), federation(), FedAvg(), ckpt_path="last")
    path = tmp_path / "checkpoints" / "last.ckpt"
    checkpoint = checkpoint_file.load(path)
    del checkpoint["federation"]["settings"]["trainer.privacy"]  # the run itself says it, too
    torch.save(checkpoint, path)
    with pytest.raises(UserError, match=r"1 rounds were trained without trainer.privacy"):
        make_trainer(privacy=privacy, **keeps_files).fit(Perceptron(), federation(), FedAvg(), ckpt_path="last")


def test_an_open_run_has_no_columns_and_imports_no_accountant(make_trainer: MakeTrainer) -> None:
    trainer = fitted(make_trainer)[1]
    assert not [name for name in trainer.history if name.startswith("privacy/")]
    assert "privacy" not in trainer.run.state_dict()
    assert not [name for name, _ in trainer.fit_loop.rows[0].items() if "epsilon" in name]


@NEEDS_LIBRARY
@pytest.mark.slow
def test_two_processes_add_the_same_noise(tmp_path: Path) -> None:
    words = (
        *(
            "--model.network",
            "linear",
            "--trainer.privacy",
            "ClientPrivacy",
            "--trainer.privacy.noise_multiplier",
            "0.5",
        ),
        *("--trainer.max_rounds", "3", "--trainer.privacy.delta", "0.01"),
    )
    one = ran(tmp_path / "one", *words, algorithm="FedAvg")
    agree(one, ran(tmp_path / "two", *words, num_processes=2, algorithm="FedAvg"))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, r"one of noise_multiplier and epsilon, got None and None"),
        ({"noise_multiplier": 1, "epsilon": 2}, r"one of noise_multiplier and epsilon, got 1 and 2"),
        ({"noise_multiplier": -1}, r"privacy.noise_multiplier must be at least 0, got -1"),
        ({"noise_multiplier": 1, "clip": inf}, r"noise needs a clip"),
        ({"noise_multiplier": 1, "clip": 0}, r"privacy.clip must be positive"),
        ({"noise_multiplier": 1, "denominator": "received"}, r"denominator received divides by the clients that came"),
        ({"noise_multiplier": 0, "max_epsilon": 3}, r"max_epsilon needs noise"),
        ({"noise_multiplier": 1, "weights": "samples"}, r"give a cap, such as 100"),
        ({"noise_multiplier": 1, "cap": 5}, r"with weights samples, got weights uniform and cap 5"),
        ({"noise_multiplier": 1, "sampling": "fixd"}, r"privacy.sampling 'fixd' is unknown; did you mean 'fixed'"),
        (
            {"noise_multiplier": 1, "sampling": "fixed", "accountant": "pld"},
            r"pld knows the samplings poisson and every",
        ),
        ({"noise_multiplier": 1, "scales": {"model": 0}}, r"the scale of model in privacy.scales must be positive"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        ClientPrivacy(**settings)


@NEEDS_LIBRARY
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"delta": 0.2}, r"privacy.delta is 0.2, but must be below 1/N = 0.166667 for 6 clients"),
        ({"sampling": "every"}, r"sampling every takes all 6 clients in each round, but clients_per_round is 3"),
    ],
)
def test_settings_that_do_not_fit_the_federation_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        CentralMechanism.of(ClientPrivacy(noise_multiplier=1, **settings), np.array(SIZES), 3)
    mechanism = CentralMechanism.of(ClientPrivacy(noise_multiplier=1), np.array(SIZES), 3)
    assert mechanism.delta == pytest.approx(6**-1.1)


def test_what_was_spent_survives_a_checkpoint_without_pickled_classes(tmp_path: Path) -> None:
    spent = SpentPrivacy(1.0, 0.5, Counter({("poisson", 1.0, 0.1, 0.0): 3}), {7: 2.0})
    torch.save(spent.state_dict(), tmp_path / "state")
    assert SpentPrivacy.from_state(torch.load(tmp_path / "state", weights_only=True)) == spent

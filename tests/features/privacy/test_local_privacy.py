"""Test noise that clients add themselves, and the buffers of private runs."""

from math import sqrt
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from compared_runs import NOTHING, MakeTrainer, equal_states, roles_that_train
from hypothesis import given
from hypothesis import strategies as st
from toys import Normalised, Perceptron, Served, federation, read_rows, vector

from lightning_fl import UserError
from lightning_fl.aggregators import CoordinateMedian
from lightning_fl.algorithms import HDFL, Algorithm, FedAdam, FedAvg, FedLDF, FedNova, LocalOnly, ServerM
from lightning_fl.exchanges import WithSampleCount
from lightning_fl.features.loss_guard import LossGuard
from lightning_fl.features.privacy import ClientPrivacy, LocalPrivacy
from lightning_fl.features.privacy.accountant import local_epsilon
from lightning_fl.features.privacy.buffers import above_least_variance
from lightning_fl.features.privacy.local_privacy import LocalMechanism
from lightning_fl.features.privacy.mechanism import joint_norm
from lightning_fl.features.selection import ByNorm
from lightning_fl.slots import Result
from lightning_fl.state.run_state import Run
from lightning_fl.vectors.layout import NO_LAYOUT, Layout

NEEDS_LIBRARY = pytest.mark.skipif(
    not __import__("importlib.util").util.find_spec("dp_accounting"), reason="needs the extra privacy"
)

NOISY_BUFFERS: dict[str, tuple[int, ...]] = {"buffers": (), "uploads/buffers": (4,)}
"""Entries of a merged message that have noisy buffers, with their leading dimensions."""


def new_run(round_index: int = 0) -> Run:
    return Run(3, NO_LAYOUT, NO_LAYOUT, torch.zeros(1), torch.zeros(0), {}, round=round_index)


def result(client: int, message: dict[str, torch.Tensor]) -> Result:
    return Result(client, message, 1.0, {}, {}, {}, num_steps=1)


def sent(mechanism: LocalMechanism, message: dict[str, torch.Tensor], client: int = 0, round_index: int = 0) -> Any:
    job: Any = SimpleNamespace(run=new_run(round_index))
    roles = mechanism.around(roles_that_train(lambda job, clients: iter([result(client, message)])), NOTHING)
    return next(roles.train(job, [client])).message


def test_results_are_clipped_together_before_they_are_sent() -> None:
    mechanism = LocalMechanism(LocalPrivacy(clip=0.5, noise_multiplier=0, scales={"moments/first": 2.0}))
    message = {"model": torch.tensor([3.0, 4.0]), "moments/first": torch.tensor([6.0])}
    found = sent(mechanism, message)
    assert joint_norm(found, {"moments/first": 2.0}) == pytest.approx(0.5)
    for name, entry in message.items():
        torch.testing.assert_close(found[name] * 26, entry)
    inside = {"model": torch.tensor([0.1, 0.2]), "moments/first": torch.tensor([0.0])}
    assert all(torch.equal(sent(mechanism, inside)[name], entry) for name, entry in inside.items())


@pytest.mark.long
def test_every_client_and_round_has_noise_of_its_own() -> None:
    size = 200_000
    mechanism = LocalMechanism(LocalPrivacy(clip=0.5, noise_multiplier=3, scales={"buffers": 4.0}))
    message = {"model": torch.zeros(size), "buffers": torch.zeros(size)}
    draws = [sent(mechanism, message), sent(mechanism, message, client=1), sent(mechanism, message, round_index=1)]
    for one in draws:
        assert one["model"].dtype == torch.float32
        for name, std in {"model": 1.5, "buffers": 1.5 / 4}.items():
            assert abs(float(one[name].mean())) < 4 * std / sqrt(size)
            assert float(one[name].std()) == pytest.approx(std, rel=4 / sqrt(2 * size))
    together = torch.stack([entry for one in draws for entry in one.values()]).double()
    correlations = torch.corrcoef(together) - torch.eye(len(together), dtype=torch.float64)
    assert float(correlations.abs().max()) < 5 / sqrt(size)
    assert torch.equal(sent(mechanism, message)["model"], draws[0]["model"])


def test_what_is_not_finite_stays_so_that_it_is_rejected() -> None:
    mechanism = LocalMechanism(LocalPrivacy())
    for bad in (float("nan"), float("inf")):
        found = sent(mechanism, {"model": torch.tensor([1.0, bad])})["model"]
        assert not bool(torch.isfinite(found).all())


def fitted(make_trainer: MakeTrainer, algorithm: Algorithm | None = None, module: Any = None, **flags: Any) -> Any:
    torch.default_generator.manual_seed(0)
    module = Perceptron() if module is None else module()
    trainer = make_trainer(**{"max_rounds": 3, **flags})
    trainer.fit(module, federation(), FedAvg() if algorithm is None else algorithm)
    return module, trainer


def test_without_noise_and_with_a_long_clip_a_run_is_itself(make_trainer: MakeTrainer) -> None:
    plain = fitted(make_trainer, FedAdam())[0]
    privacy = LocalPrivacy(clip=1e30, noise_multiplier=0, weights="samples", cap=1e9)
    private = fitted(make_trainer, FedAdam(), privacy=privacy)[0]
    assert equal_states(plain.state_dict(), private.state_dict())


@NEEDS_LIBRARY
@pytest.mark.parametrize(
    ("algorithm", "selection"),
    [(FedAvg(), None), (FedLDF(n=4), None), (FedAvg(exchange=WithSampleCount()), None), (FedAvg(), ByNorm(4))],
    ids=repr,
)
@pytest.mark.parametrize(("counted", "is_told"), [({}, False), ({"weights": "samples", "cap": 20}, True)])
def test_numbers_of_samples_cross_only_if_they_are_declared_public(
    algorithm: Algorithm,
    selection: ByNorm | None,
    counted: dict[str, Any],
    is_told: bool,
    make_trainer: MakeTrainer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Test two federations that differ in the data of one client, and send nothing but noise, the same for once."""
    monkeypatch.setattr("lightning_fl.trainer.fit_loop.noise_key", lambda settings: 1)
    models = []
    for first in (1, 39):
        torch.default_generator.manual_seed(0)
        module = Perceptron(configure=lambda m: torch.optim.SGD(m.parameters(), lr=0.0))
        privacy = LocalPrivacy(noise_multiplier=100, **counted)
        cohort = 2 if selection else 4
        trainer = make_trainer(max_rounds=1, clients_per_round=cohort, privacy=privacy, selection=selection)
        trainer.fit(module, federation((first, 1, 1, 1)), algorithm)
        models.append(vector(module))
    assert (models[0] == models[1]).all() == (not is_told)


@NEEDS_LIBRARY
@pytest.mark.parametrize(
    ("algorithm", "flags"),
    [
        (FedLDF(n=1), {}),
        (FedAvg(aggregator=CoordinateMedian()), {}),
        (FedAdam(), {}),
        (FedAvg(), {"selection": ByNorm(6), "clients_per_round": 2}),
    ],
    ids=repr,
)
def test_whatever_follows_is_post_processing(
    algorithm: Algorithm, flags: dict[str, Any], make_trainer: MakeTrainer
) -> None:
    privacy = LocalPrivacy(clip=1.0, noise_multiplier=20)
    _, trainer = fitted(make_trainer, algorithm, privacy=privacy, **{"clients_per_round": 6, **flags})
    assert trainer.run.features["privacy"].uploads == {client: pytest.approx(3 / 400) for client in range(6)}
    assert trainer.history["privacy/epsilon"].iloc[-1] == pytest.approx(local_epsilon(3 / 400, 1e-5))


@NEEDS_LIBRARY
@pytest.mark.parametrize(
    ("algorithm", "num_senders"),
    [(FedAvg(), 6), (HDFL(n=1), 1), (HDFL(n=4), 4), (FedLDF(n=1), 6), (LocalOnly(), 0)],
    ids=["FedAvg", "HDFL(1)", "HDFL(4)", "FedLDF", "LocalOnly"],
)
def test_only_clients_that_send_spend(algorithm: Algorithm, num_senders: int, make_trainer: MakeTrainer) -> None:
    """Test that clients of HDFL which the server has not drawn tell nothing, and those of FedLDF their divergences."""
    privacy = LocalPrivacy(noise_multiplier=20)
    _, trainer = fitted(make_trainer, algorithm, privacy=privacy, clients_per_round=6, max_rounds=3)
    assert sum(trainer.run.features["privacy"].uploads.values()) * 400 == pytest.approx(3 * num_senders)
    assert (float(trainer.callback_metrics["privacy/epsilon"]) > 0) == (num_senders > 0)


@NEEDS_LIBRARY
def test_the_column_is_that_of_the_client_with_most_uploads(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    privacy = LocalPrivacy(noise_multiplier=20, delta=1e-4)
    for rounds, path in ((3, None), (6, "last")):
        trainer = make_trainer(max_rounds=rounds, privacy=privacy, dropout_rate=0.4, clients_per_round=4, **keeps_files)
        trainer.fit(Perceptron(), federation(), FedAvg(), ckpt_path=path)
    uploads = {client: total * 400 for client, total in trainer.run.features["privacy"].uploads.items()}
    arrived = sum(int(row["clients/accepted"]) for row in read_rows(tmp_path))
    assert sum(uploads.values()) == pytest.approx(arrived)
    assert len(set(np.round(list(uploads.values())))) > 1
    most = max(uploads.values())
    assert float(read_rows(tmp_path)[-1]["privacy/epsilon"]) == pytest.approx(local_epsilon(most / 400, 1e-4))
    assert trainer.privacy_in_words.endswith("(all data of a client replaced, the client with most uploads, exact)")


@NEEDS_LIBRARY
@pytest.mark.parametrize(
    ("algorithm", "sentence"),
    [(FedNova(), "send 'scalars/normaliser', no vector of the model"), (FedAvg(), "clients send buffers such as")],
)
def test_what_noise_would_not_cover_is_refused(algorithm: Algorithm, sentence: str, make_trainer: MakeTrainer) -> None:
    module = Normalised if sentence.startswith("clients send") else Perceptron
    with pytest.raises(UserError, match=sentence):
        fitted(make_trainer, algorithm, module, privacy=LocalPrivacy())


@pytest.mark.parametrize("privacy", [ClientPrivacy, LocalPrivacy])
def test_buffers_stay_the_servers_or_enter_the_sum(privacy: Any, make_trainer: MakeTrainer) -> None:
    flags = {"max_rounds": 1, "clients_per_round": 6}
    torch.default_generator.manual_seed(0)
    before = Normalised().state_dict()
    kept, trainer = fitted(
        make_trainer, module=Normalised, privacy=privacy(clip=1e6, noise_multiplier=0, buffers="keep"), **flags
    )
    moved, plain = fitted(
        make_trainer, module=Normalised, privacy=privacy(clip=1e6, noise_multiplier=0, buffers="clip"), **flags
    )
    names = [name for name in before if "running_" in name]
    assert names
    for name in names:
        assert torch.equal(kept.state_dict()[name], before[name])
        assert not torch.equal(moved.state_dict()[name], before[name])
    assert not torch.equal(kept.state_dict()["hidden.weight"], before["hidden.weight"])
    assert trainer.run.ledger.round_bits["up"]["buffers"] == 0 < plain.run.ledger.round_bits["up"]["buffers"]


@NEEDS_LIBRARY
@pytest.mark.parametrize("buffers", ["keep", "clip"])
@pytest.mark.parametrize("privacy", [ClientPrivacy, LocalPrivacy])
def test_counts_of_clients_stay_with_them(privacy: Any, buffers: str, make_trainer: MakeTrainer) -> None:
    noisy = privacy(noise_multiplier=1, delta=0.01, buffers=buffers)
    module = fitted(make_trainer, module=Normalised, privacy=noisy, clients_per_round=6, max_rounds=2)[0]
    assert module.norm.num_batches_tracked == 0


@NEEDS_LIBRARY
@pytest.mark.parametrize(
    ("privacy", "algorithm"),
    [
        (ClientPrivacy, FedAvg()),
        (ClientPrivacy, ServerM()),
        (LocalPrivacy, FedAvg()),
        (LocalPrivacy, FedAvg(aggregator=CoordinateMedian())),
    ],
    ids=["central", "momentum", "local", "median"],
)
def test_what_the_optimiser_lacks_gets_no_noise(privacy: Any, algorithm: Any, make_trainer: MakeTrainer) -> None:
    module = Perceptron(configure=lambda m: torch.optim.SGD(m.output.parameters(), lr=0.1))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    noisy = privacy(noise_multiplier=5, delta=0.01)
    make_trainer(max_rounds=2, clients_per_round=6, privacy=noisy).fit(module, federation(), algorithm)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]) == name.startswith("hidden"), name


@NEEDS_LIBRARY
@pytest.mark.parametrize("privacy", [ClientPrivacy, LocalPrivacy])
def test_noisy_variances_stay_positive(privacy: Any, make_trainer: MakeTrainer) -> None:
    noisy = privacy(clip=10.0, noise_multiplier=5, delta=0.01, buffers="clip")
    module = fitted(make_trainer, module=Normalised, privacy=noisy, clients_per_round=6)[0]
    variances = [entry for name, entry in module.state_dict().items() if name.endswith("running_var")]
    assert variances
    assert min(float(entry.min()) for entry in variances) >= float(torch.tensor(1e-5))


@pytest.mark.long
@given(st.integers(0, 10**6), st.floats(1e-5, 1e3), st.floats(0, 100))
def test_steps_see_noisy_variances_above_0_and_other_buffers_as_they_are(
    seed: int, variance: float, std: float
) -> None:
    layout = Layout(("norm.running_mean", "norm.running_var"), ((3,), (3,)))
    present = torch.tensor([0.0, 1.0, 2.0, *[variance] * 3])
    generator = torch.Generator().manual_seed(seed)
    merged = {name: std * torch.randn(*rows, 6, generator=generator) for name, rows in NOISY_BUFFERS.items()}
    merged["model"] = torch.tensor([1.0])
    found = above_least_variance(merged, present, layout, "clip")
    assert found["model"] is merged["model"]
    for name in NOISY_BUFFERS:
        expected = (present + merged[name])[..., 3:].clamp(min=1e-5)
        assert torch.equal(found[name][..., :3], merged[name][..., :3])
        assert bool(((present + found[name])[..., 3:] >= 0).all())
        torch.testing.assert_close((present + found[name])[..., 3:], expected, rtol=1e-5, atol=1e-4)
    assert above_least_variance(merged, present, layout, "keep") is merged


@NEEDS_LIBRARY
@pytest.mark.parametrize("privacy", [ClientPrivacy, LocalPrivacy])
def test_the_loss_guard_measures_noisy_variances_above_0(privacy: Any, make_trainer: MakeTrainer) -> None:
    noisy = privacy(clip=10.0, noise_multiplier=5, delta=0.01, buffers="clip")
    trainer = make_trainer(max_rounds=3, clients_per_round=6, privacy=noisy, loss_guard=LossGuard(rounds=1e30))
    torch.default_generator.manual_seed(0)
    trainer.fit(Normalised(), Served(9), FedAvg())
    assert np.isfinite(trainer.history["guard/loss"]).all()
    assert not trainer.history["guard/undone"].any()


def test_bad_settings_are_refused() -> None:
    for settings, sentence in (
        ({"clip": 0}, "privacy.clip must be positive"),
        ({"noise_multiplier": -1}, "privacy.noise_multiplier must be at least 0"),
        ({"delta": 1}, r"privacy.delta must lie in \(0, 1\)"),
        ({"buffers": "drop"}, "privacy.buffers 'drop' is unknown"),
    ):
        with pytest.raises(UserError, match=sentence):
            LocalPrivacy(**settings)

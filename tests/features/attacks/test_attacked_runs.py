"""Test runs in which some clients attack: who, what the server sees, and the same answer however a run goes on."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import inf, sqrt
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from compared_runs import NOTHING, MakeTrainer, agree, ran, roles_that_train
from torch.utils.data import DataLoader, TensorDataset, default_collate
from toys import Normalised, Perceptron, Recorded, Served, federation, read_rows, vector

from lightning_fl import FederatedTrainer, UserError
from lightning_fl.aggregators import (
    Bucketing,
    Bulyan,
    CoordinateMedian,
    GeometricMedian,
    KeepUploads,
    MultiKrum,
    NormBound,
    TrimmedMean,
    WeightedMean,
)
from lightning_fl.algorithms import (
    SCAFFOLD,
    Algorithm,
    Centralised,
    DeviceM,
    FedADP,
    FedAvg,
    FedBuff,
    FedKT,
    FedLDF,
    FedNova,
    HeteroFL,
    LocalOnly,
)
from lightning_fl.clients.client_job import ClientJob
from lightning_fl.data import Digits, Federated
from lightning_fl.exchanges import DrawnClients, LayerDivergence, OneShot
from lightning_fl.features.attacks import (
    ALIE,
    IPM,
    Adversary,
    Attack,
    Backdoor,
    FangKrum,
    FangTrim,
    FreeRider,
    GaussianUpload,
    LabelFlip,
    MinMax,
    NotFinite,
    SignFlip,
)
from lightning_fl.features.attacks.attackers import Attackers
from lightning_fl.features.clock import ClientClock
from lightning_fl.features.privacy import ClientPrivacy
from lightning_fl.features.privacy.central import CentralMechanism
from lightning_fl.features.privacy.mechanism import Mechanism
from lightning_fl.modules import ImageClassifier
from lightning_fl.slots import Aggregator, Exchange, Result, RoundContext, Rule, Step, Upload
from lightning_fl.state.run_state import ATTACK, Run
from lightning_fl.steps import CentredClipping, TrustScores
from lightning_fl.vectors.layout import NO_LAYOUT, Layout
from lightning_fl.vectors.submodel import Submodel

ON_UPLOADS: tuple[Attack, ...] = (
    *(SignFlip(2), GaussianUpload(), FreeRider("last_change", 0.01), NotFinite()),
    *(ALIE(), IPM(3), FangTrim(), FangKrum(), MinMax()),
)


def digits(**options: Any) -> Digits:
    return Digits(**{"num_clients": 6, "image_size": 8, "batch_size": 40, **options})


def linear() -> ImageClassifier:
    torch.manual_seed(0)
    return ImageClassifier("linear", in_channels=1, image_size=8, learning_rate=0.2)


@pytest.fixture
def fitted(make_trainer: MakeTrainer) -> Callable[..., tuple[FederatedTrainer, np.ndarray]]:
    def fit(
        adversary: Adversary | None,
        algorithm: Algorithm | None = None,
        module: Any = None,
        data: Any = None,
        **flags: Any,
    ) -> tuple[FederatedTrainer, np.ndarray]:
        torch.manual_seed(0)
        module = (Normalised if module is None else module)()
        trainer = make_trainer(**{"clients_per_round": 6, "adversary": adversary, **flags})
        trainer.fit(module, federation() if data is None else data, FedAvg() if algorithm is None else algorithm)
        return trainer, vector(module)

    return fit


UNIFORM = partial(Mechanism().weights, WeightedMean("uniform"))
"""Weights of clients in a mean that counts them alike."""
BY_SAMPLES = partial(Mechanism().weights, WeightedMean())
Fitted = Callable[..., tuple[FederatedTrainer, np.ndarray]]


@pytest.mark.parametrize("runner", ["serial", "stacked"])
def test_without_attackers_a_run_is_the_clean_one(runner: str, fitted: Fitted) -> None:
    clean, model = fitted(None, runner=runner)
    with pytest.warns(UserWarning, match=r"has no attackers: 0.1 of 6 clients is less than one"):
        trainer, same = fitted(Adversary(ALIE(), 0.1), runner=runner)
    np.testing.assert_array_equal(same, model)
    later, same = fitted(Adversary(SignFlip(10), [1], start=2), runner=runner)
    np.testing.assert_array_equal(same, model)
    for one in (trainer, later):
        assert list(one.history["attack/attackers"]) == [0, 0]
        columns = [name for name in one.history.columns if name != "attack/attackers"]
        assert columns == list(clean.history.columns)
    assert clean.run.state_dict().keys() == trainer.run.state_dict().keys()


def test_attackers_without_samples_are_named(fitted: Fitted) -> None:
    with pytest.warns(UserWarning, match="without samples, and so in no round, clients 0, 2 cannot attack"):
        trainer, _ = fitted(Adversary(SignFlip(), [0, 1, 2]), data=federation(sizes=(0, 4, 0, 3)), clients_per_round=2)
    assert list(trainer.history["attack/attackers"]) == [1] * trainer.num_rounds


def test_attackers_are_those_of_the_seed_whatever_else_differs(make_trainer: MakeTrainer, monkeypatch: Any) -> None:
    def attackers(seed: int, data: Any, **flags: Any) -> set[int]:
        monkeypatch.setenv("PL_GLOBAL_SEED", str(seed))
        seen = Recorded()
        trainer = make_trainer(adversary=Adversary(GaussianUpload(1e3, 0), 0.34), callbacks=[seen], **flags)
        trainer.fit(Perceptron(), data, FedAvg())
        messages = [message for entries in seen.rounds.values() for message in entries]
        return {message.client for message in messages if float(message.sent["model"].min()) == 1e3}

    whole = attackers(3, federation(), clients_per_round=6)
    assert len(whole) == 2
    for rounds, cohort, runner in ((9, 2, "serial"), (2, 6, "stacked")):
        assert attackers(3, federation(), max_rounds=rounds, clients_per_round=cohort, runner=runner) <= whole
    assert len({frozenset(attackers(seed, federation(), clients_per_round=6)) for seed in range(6)}) > 1


@dataclass(frozen=True)
class Without(Aggregator):
    """Mean of the uploads without those of some clients, who are not there for it."""

    clients: tuple[int, ...]
    keeps_uploads = False
    is_mean = True
    uses = frozenset[str]()

    def weighs_equally(self, name: str) -> bool:
        return False

    def add(self, accumulator: dict[str, Any], upload: Upload) -> None:
        if upload.result.client not in self.clients:
            WeightedMean().add(accumulator, upload)

    def finish(self, accumulator: dict[str, Any]) -> Any:
        return WeightedMean().finish(accumulator)


@pytest.mark.parametrize("runner", ["serial", "stacked"])
def test_uploads_that_are_not_finite_are_as_if_absent_but_for_their_bits(runner: str, fitted: Fitted) -> None:
    trainer, model = fitted(Adversary(NotFinite(), [1, 4]), runner=runner, max_rounds=3)
    absent, expected = fitted(None, Algorithm(aggregator=Without((1, 4))), runner=runner, max_rounds=3)
    np.testing.assert_array_equal(model, expected)
    assert list(trainer.history["clients/rejected"]) == [2, 2, 2]
    assert trainer.run.ledger.total_bytes("up") == absent.run.ledger.total_bytes("up")


@pytest.mark.parametrize("attack", ON_UPLOADS, ids=repr)
def test_the_server_sees_what_the_attack_makes_of_the_honest_uploads(attack: Attack, fitted: Fitted) -> None:
    seen, clean = Recorded(), Recorded()
    fitted(Adversary(attack, [0, 5]), runner="serial", callbacks=[seen], max_rounds=1)
    fitted(None, runner="serial", callbacks=[clean], max_rounds=1)
    own = {message.client: message.sent for message in clean.rounds[0]}
    arrived = {message.client: message.sent for message in seen.rounds[0]}
    honest = {
        name: torch.stack([own[client][name] for client in range(1, 5)]).double().numpy()
        for name in ("model", "buffers")
    }
    for client in range(1, 5):
        assert all(torch.equal(arrived[client][name], own[client][name]) for name in own[client])
    forged = {name: arrived[0][name].double().numpy() for name in own[0]}
    same = all(torch.equal(arrived[0][name], arrived[5][name]) for name in own[0])
    if isinstance(attack, SignFlip):
        expected = {name: -2 * own[0][name].numpy() for name in own[0]}
    elif isinstance(attack, IPM):
        expected = {name: -3 * rows.mean(0) for name, rows in honest.items()}
    elif isinstance(attack, ALIE):
        # 6 uploads, 2 attackers: s = 2, z = Φ⁻¹(2/4) = 0
        expected = {name: rows.mean(0) for name, rows in honest.items()}
    elif isinstance(attack, MinMax):
        rows = honest["model"]
        widest = max(np.linalg.norm(a - b) for a in rows for b in rows)
        assert max(np.linalg.norm(forged["model"] - row) for row in rows) == pytest.approx(widest, rel=1e-4)
        expected = forged
    else:
        expected = forged
        assert any((forged[name] != own[0][name].numpy()).any() for name in own[0])
    for name in own[0]:
        np.testing.assert_allclose(forged[name], expected[name], rtol=1e-4, atol=1e-6)
    assert same == isinstance(attack, ALIE | IPM | FangKrum | MinMax)


@pytest.mark.parametrize(
    ("algorithm", "attack"),
    [
        (SCAFFOLD(), MinMax()),
        (FedNova(), ALIE()),
        (DeviceM(local_beta=0.8, variant="mime"), FangTrim()),  # two turns, both attacked
        (DeviceM(local_beta=0.8, variant="mime"), NotFinite()),
        (FedLDF(), SignFlip(2)),
        (FedAvg(uplink="TopK"), FangKrum()),
        (FedAvg(uplink="TopK"), FreeRider("last_change", 0.01)),
    ],
    ids=repr,
)
def test_stacks_give_the_answer_of_single_clients(algorithm: Algorithm, attack: Attack, fitted: Fitted) -> None:
    one, two = (fitted(Adversary(attack, [0, 3]), algorithm, runner=runner)[1] for runner in ("serial", "stacked"))
    np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("attack", [LabelFlip(), LabelFlip(3, 5), Backdoor(), Backdoor(replace=True)], ids=repr)
def test_only_attackers_train_on_poisoned_samples(attack: Attack, fitted: Fitted) -> None:
    uploads = []
    for adversary, runner in (
        (None, "serial"),
        (Adversary(attack, [0, 3]), "serial"),
        (Adversary(attack, [0, 3]), "stacked"),
    ):
        seen = Recorded()
        fitted(adversary, module=linear, data=digits(), runner=runner, callbacks=[seen], max_rounds=1)
        uploads.append({message.client: message.sent["model"].numpy() for message in seen.rounds[0]})
    clean, serial, stacked = uploads
    for client in range(6):
        assert np.array_equal(clean[client], serial[client]) == (client not in (0, 3))
        np.testing.assert_allclose(serial[client], stacked[client], rtol=1e-3, atol=1e-6)


def test_triggers_are_in_attackers_samples_alone_and_begin_with_the_attack() -> None:
    data = digits()
    data.setup()
    adversary = Adversary(Backdoor(share=1.0, target=4), [2], start=3)
    attackers = Attackers(adversary, data, SimpleNamespace(world_size=1), UNIFORM)  # type: ignore[arg-type]
    run = Run(0, NO_LAYOUT, NO_LAYOUT, torch.zeros(0), torch.zeros(0), {})
    run.round = 2
    assert attackers.among(run, range(6)) == frozenset()
    run.round = 3
    read = attackers.poisoned_data(attackers.among(run, range(6)))
    for client in range(6):
        images, labels = (torch.cat(parts) for parts in zip(*read.client(client).batches(40), strict=True))
        clean, classes = (torch.cat(parts) for parts in zip(*data.client(client).batches(40), strict=True))
        assert torch.equal(images, clean) == (client != 2)
        assert torch.equal(labels, classes) == (client != 2)
        if client == 2:
            assert (images[..., 5:, 5:] == 1).all()
            assert (labels == 4).all()
    assert torch.equal(next(iter(data.val_dataloader()))[0], next(iter(read.val_dataloader()))[0])


def test_a_client_that_trains_again_on_a_model_attacks_as_before() -> None:
    """Test that the attackers of a run are one set, for every version of the model and every training on it."""
    data: Any = SimpleNamespace(num_clients=40, client_sizes=np.ones(40))
    attackers = Attackers(Adversary(SignFlip(), 0.5), data, SimpleNamespace(world_size=1), UNIFORM)  # type: ignore[arg-type]
    run = Run(3, NO_LAYOUT, NO_LAYOUT, torch.zeros(0), torch.zeros(0), {})
    sets = {attackers.among(run.as_of(version, again), range(40)) for version in (1, 2, 9) for again in (0, 1, 2)}
    assert len(sets) == 1
    assert len(*sets) == 20


@pytest.mark.parametrize(
    "settings",
    [None, {}, {"weights": "samples", "cap": 5.0}, {"weights": "samples", "cap": 5.0, "denominator": "received"}],
    ids=repr,
)
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("who", [[2], [2, 0, 3]])
def test_replacement_makes_the_mean_the_attackers_model(
    weighting: Any, who: list[int], settings: dict[str, Any] | None
) -> None:
    """Test that the mean, also of a private run, is that of the attackers' deltas if the others do not change the model."""
    sizes, cohort = np.array([3, 5, 4, 9, 20, 2]), [0, 1, 2, 3]
    data: Any = SimpleNamespace(client_sizes=sizes, num_clients=6)
    mean, mechanism = WeightedMean(weighting), Mechanism()
    if settings is not None:
        mechanism = CentralMechanism.of(ClientPrivacy(clip=inf, noise_multiplier=0, **settings), sizes, len(cohort))
    layout = Layout(("a",), ((5,),))
    run, context = Run(0, layout, NO_LAYOUT, torch.zeros(5), torch.zeros(0), {}), RoundContext(layout, NO_LAYOUT, 6)
    mechanism.begin(run, 1)
    adversary, weigh = Adversary(Backdoor(replace=True), who), partial(mechanism.weights, mean)
    attackers = Attackers(adversary, data, SimpleNamespace(world_size=1), weigh)  # type: ignore[arg-type]
    deltas = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)).double()
    job: Any = SimpleNamespace(run=run, received={"model": run.params}, context=context, answering=cohort, smaller={})
    results = (Result(k, {"model": deltas[k] * (k in who)}, float(sizes[k]), {}, {}, {}, num_steps=1) for k in cohort)
    accumulator: dict[str, Any] = {}
    engine: Any = SimpleNamespace(algorithm=Algorithm(aggregator=mean), run=run)
    roles = replace(roles_that_train(NOTHING), aggregator=lambda context: mean)
    aggregator = mechanism.around(roles, engine).aggregator(context)
    for result in attackers.attacked(results, job, frozenset(who)):
        assert result.attacking == (result.client in who)
        aggregator.add(accumulator, Upload(result, result.message))
    weights = torch.ones(4)
    if weighting == "samples" and settings != {}:
        weights = torch.from_numpy(sizes[:4]).double().clamp(max=inf if settings is None else 5.0)
    expected = sum(weights[k] * deltas[k] for k in who) / sum(weights[k] for k in who)
    torch.testing.assert_close(aggregator.finish(accumulator)["model"], expected)


def test_honest_uploads_that_are_not_finite_do_not_reach_colluding_attackers() -> None:
    data: Any = SimpleNamespace(client_sizes=np.ones(4), num_clients=4)
    layout = Layout(("a",), ((2,),))
    run = Run(0, layout, NO_LAYOUT, torch.zeros(2), torch.zeros(0), {})
    job: Any = SimpleNamespace(run=run, received={"model": run.params}, answering=[0, 1, 2, 3], smaller={})
    values = {0: 1.0, 1: float("nan"), 2: 3.0, 3: 5.0}
    for attack in (IPM(1.0), MinMax()):
        attackers = Attackers(
            Adversary(attack, [3]),
            data,
            SimpleNamespace(world_size=1, device="cpu"),
            UNIFORM,  # type: ignore[arg-type]
        )
        results = (Result(k, {"model": torch.full((2,), x)}, 1.0, {}, {}, {}, num_steps=1) for k, x in values.items())
        found = {r.client: r for r in attackers.attacked(results, job, frozenset([3]))}
        assert list(found) == [0, 1, 2, 3], "attackers wait for the others"
        assert found[3].message["model"].isfinite().all()
    del found
    results = (Result(k, {"model": torch.full((2,), x)}, 1.0, {}, {}, {}, num_steps=1) for k, x in values.items())
    attackers = Attackers(Adversary(IPM(1.0), [3]), data, SimpleNamespace(world_size=1), UNIFORM)  # type: ignore[arg-type]
    *_, last = attackers.attacked(results, job, frozenset([3]))
    assert last.message["model"].tolist() == [-2.0, -2.0]


FOUR = Layout(("a",), ((4,),))
HALF = Submodel.from_masks(FOUR, NO_LAYOUT, torch.tensor([True, True, False, False]))


def sent_in_parts(
    attack: Attack, values: dict[int, float], in_half: set[int], who: list[int], exchange: Exchange | None = None
) -> dict[int, Any]:
    """Return what clients send of a model of four numbers, of which some clients have only two; each sends one value."""
    run = Run(0, FOUR, NO_LAYOUT, torch.zeros(4), torch.zeros(0), {})
    smaller = {client: (SimpleNamespace(sent=HALF), {}) for client in in_half}
    job: Any = SimpleNamespace(run=run, received={"model": run.params}, answering=[*values], smaller=smaller)
    data: Any = SimpleNamespace(client_sizes=np.arange(1, 1 + len(values)), num_clients=len(values))
    attackers = Attackers(
        Adversary(attack, who), data, SimpleNamespace(world_size=1), BY_SAMPLES, exchange or OneShot()
    )  # type: ignore[arg-type]
    results = []
    for client, value in values.items():
        part = HALF if client in in_half else None
        vector = torch.full((4,), value) * (1 if part is None else part.params)
        results.append(Result(client, {"model": vector}, client + 1.0, {}, {}, {}, num_steps=1, submodel=part))
    return {result.client: result.message["model"] for result in attackers.attacked(iter(results), job, frozenset(who))}


def test_attackers_take_no_number_for_sent_that_a_client_does_not_send() -> None:
    values = {0: 1.0, 1: 3.0, 2: 5.0, 3: 0.5, 4: 0.5}
    found = sent_in_parts(IPM(2.0), values, {1, 3}, [3, 4])
    assert found[3].tolist() == [-6, -6, 0, 0], "an attacker sends its part alone"
    assert found[4].tolist() == [-6, -6, -6, -6]
    shift = NormalDist().inv_cdf(2 / 3)  # 3 honest of 5
    found = sent_in_parts(ALIE(), values, {1, 3}, [3, 4])
    expected = 3 - shift * torch.tensor([2, 2, sqrt(8), sqrt(8)])  # of 1, 3, 5, and of 1, 5
    torch.testing.assert_close(found[4], expected)


def test_a_replacement_counts_the_clients_that_send_each_number() -> None:
    found = sent_in_parts(Backdoor(replace=True), {0: 0.0, 1: 0.0, 2: 0.0, 3: 1.0, 4: 1.0}, {1, 3}, [3, 4])
    first, last = 15 / 9, 9 / 5  # clients have 1 to 5 samples; the last two numbers are those of clients 0, 2 and 4
    assert found[3].tolist() == pytest.approx([first, first, 0, 0])
    assert found[4].tolist() == pytest.approx([first, first, last, last])


@pytest.mark.parametrize(
    ("exchange", "who", "factor"),
    [
        (OneShot(), [4], 3),
        (LayerDivergence(n=5), [4], 3),
        (LayerDivergence(n=3), [4], 2),  # two of the other four, of half the weight
        (LayerDivergence(n=1), [4], 1),
        (LayerDivergence(n=2), [2, 3, 4], 1),
        (LayerDivergence(n=3, choose="least"), [4], 3),
        (DrawnClients(n=3), [4], 3),  # on average over the draws
    ],
    ids=repr,
)
def test_a_replacement_counts_the_clients_that_send_each_layer(
    exchange: Exchange, who: list[int], factor: float
) -> None:
    found = sent_in_parts(Backdoor(replace=True), dict.fromkeys(range(5), 1.0), set(), who, exchange)
    assert found[4].tolist() == pytest.approx([factor] * 4)


def test_attackers_of_a_run_know_who_sends_each_layer(fitted: Fitted) -> None:
    flags = {"algorithm": FedLDF(n=1), "module": linear, "data": digits(), "max_rounds": 1}
    models = [fitted(Adversary(Backdoor(replace=replaces), [0]), **flags)[1] for replaces in (False, True)]
    np.testing.assert_array_equal(*models)


@pytest.mark.parametrize("attack", [NotFinite(), IPM(1.0), MinMax()], ids=repr)
def test_nobody_attacks_in_a_rehearsal_of_the_messages(attack: Attack) -> None:
    """Test that a job without samples, by which bits are planned, is done as without attackers."""
    data: Any = SimpleNamespace(num_clients=4, client_sizes=np.ones(4))
    attackers = Attackers(Adversary(attack, [0]), data, SimpleNamespace(world_size=1), UNIFORM)  # type: ignore[arg-type]
    run = Run(0, NO_LAYOUT, NO_LAYOUT, torch.zeros(0), torch.zeros(0), {})
    job = ClientJob(Rule(), None, {}, None, run)  # type: ignore[arg-type]
    planned = Result(0, {"model": torch.ones(2)}, 1.0, {}, {}, {}, num_steps=1)
    (sent,) = attackers.around(roles_that_train(lambda job, clients: iter([planned])), NOTHING).train(job, [0])
    assert sent.message["model"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("attack", [FreeRider("last_change", 0.1), ALIE(), FangTrim(), GaussianUpload()], ids=repr)
def test_a_resumed_run_is_the_uninterrupted_one(attack: Attack, tmp_path: Path, make_trainer: Any) -> None:
    def fit(rounds: int, folder: str, ckpt_path: str | None = None) -> np.ndarray:
        torch.manual_seed(0)
        module = Normalised()
        flags = {"default_root_dir": tmp_path / folder, "enable_checkpointing": True, "clients_per_round": 4}
        trainer = make_trainer(max_rounds=rounds, adversary=Adversary(attack, 0.5, per_round=True), **flags)
        trainer.fit(module, federation(), FedAvg(), ckpt_path=ckpt_path)
        return vector(module)

    whole = fit(4, "whole")
    fit(2, "part")
    np.testing.assert_array_equal(fit(4, "part", "last"), whole)


def test_free_riders_send_the_last_change(fitted: Fitted) -> None:
    seen = Recorded()
    models: list[torch.Tensor] = []

    class Models(Recorded):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            models.append(trainer.run.params.clone())

    fitted(Adversary(FreeRider("last_change"), [1]), module=Perceptron, callbacks=[seen, Models()], max_rounds=3)
    sent = {
        round: next(message.sent["model"] for message in messages if message.client == 1)
        for round, messages in seen.rounds.items()
    }
    assert not sent[0].any()
    for round in (1, 2):
        assert torch.equal(sent[round], models[round] - models[round - 1])


def test_a_share_of_each_cohort_attacks(fitted: Fitted) -> None:
    trainer, _ = fitted(Adversary(SignFlip(), 0.5, per_round=True), clients_per_round=4, max_rounds=6)
    assert list(trainer.history["attack/attackers"]) == [2] * 6
    fixed, _ = fitted(Adversary(SignFlip(), 0.34), clients_per_round=3, max_rounds=12)
    assert set(fixed.history["attack/attackers"]) == {0, 1, 2}
    run = fixed.run
    assert (
        run.random(ATTACK, in_round=0).permutation(6).tolist() == run.random(ATTACK, in_round=0).permutation(6).tolist()
    )


@pytest.mark.parametrize(
    ("aggregator", "steps"),
    [
        (CoordinateMedian(), None),
        (TrimmedMean(1), None),
        (MultiKrum(1), None),
        (Bulyan(0), None),
        (GeometricMedian(), None),
        (NormBound(0.1), None),
        (Bucketing(GeometricMedian(), 2), None),
        (KeepUploads(WeightedMean()), [CentredClipping(0.1)]),
        (KeepUploads(WeightedMean()), [TrustScores()]),
    ],
    ids=repr,
)
def test_robust_parts_report_what_they_keep_of_attackers(
    aggregator: Aggregator, steps: Sequence[Step] | None, fitted: Fitted
) -> None:
    def history(adversary: Adversary | None, runner: str) -> Any:
        method = Algorithm(aggregator=aggregator, steps=steps)
        return fitted(adversary, method, data=Served(12), runner=runner, module=Perceptron)[0].history

    attacked = history(Adversary(SignFlip(1000), [2]), "serial")
    assert ((attacked["robust/kept"] >= 1) & (attacked["robust/kept"] <= 6)).all()
    assert ((attacked["robust/attackers_kept"] >= 0) & (attacked["robust/attackers_kept"] <= 1)).all()
    small = 0.1 if not isinstance(aggregator, Bucketing | Bulyan) else 0.5
    if steps != [TrustScores()]:  # which believes a client that turns round if the server's own update says so
        assert attacked["robust/attackers_kept"].max() < small, "less than the share of the attackers"
    stacked = history(Adversary(SignFlip(1000), [2]), "stacked")
    np.testing.assert_allclose(attacked["robust/attackers_kept"], stacked["robust/attackers_kept"], atol=1e-4)
    assert "robust/attackers_kept" not in history(None, "serial")


@pytest.mark.trains
@pytest.mark.matrix
def test_the_mean_breaks_under_sign_flips_and_the_median_does_not(fitted: Fitted) -> None:
    """Test acceptance 16: digits IID, 4 of 20 clients send −10 times their change."""

    def accuracy(adversary: Adversary | None, aggregator: Aggregator) -> float:
        flags = {"clients_per_round": 20, "max_rounds": 12, "val_every_n_rounds": 12, "local_epochs": 3}
        trainer, _ = fitted(adversary, FedAvg(aggregator=aggregator), linear, digits(num_clients=20), **flags)
        return float(trainer.callback_metrics["val/accuracy"])

    adversary = Adversary(SignFlip(10))
    assert accuracy(adversary, WeightedMean()) < 0.2
    clean = accuracy(None, CoordinateMedian())
    assert clean > 0.7
    assert accuracy(adversary, CoordinateMedian()) > clean - 0.05


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("adversary", "algorithm", "said"),
    [
        (Adversary(SignFlip()), LocalOnly(), "those of LocalOnly send nothing"),
        (Adversary(SignFlip()), Centralised(), "those of Centralised send nothing"),
        (Adversary(SignFlip(), [6]), FedAvg(), "attackers lists client 6, but the last of the 6 clients is 5"),
        (Adversary(MinMax(), [1]), HeteroFL(), "MinMax compares whole uploads, and clients of HeteroFL send parts of"),
        (
            Adversary(Backdoor(replace=True)),
            FedADP(),
            "those of FedADP choose their numbers after the training: use scale",
        ),
        (Adversary(LabelFlip(), [1]), FedAvg(), "LabelFlip changes classes, which Arrays does not have"),
        (Adversary(ALIE(), [1]), FedBuff(), "FedBuff does not wait for the clients of a round, which ALIE needs"),
        (Adversary(FreeRider("last_change"), [1]), FedBuff(), "which FreeRider needs: use a method that does"),
        (Adversary(SignFlip(), 0.5, per_round=True), FedBuff(), "which trainer.adversary.per_round needs"),
    ],
)
def test_attacks_that_do_not_fit_are_refused(
    adversary: Adversary, algorithm: Algorithm, said: str, fitted: Fitted
) -> None:
    flags = {"clock": ClientClock(devices="phones"), "clients_per_round": 3} if algorithm.pace is not None else {}
    with pytest.raises(UserError, match=said):
        fitted(adversary, algorithm, module=Perceptron, **flags)


@pytest.mark.parametrize(
    ("classes", "fits"),
    [(lambda y: y // 2, False), (lambda y: 9 - y, False), (lambda y: y, True)],
    ids=["coarse", "other", "same"],
)
def test_labels_are_flipped_only_where_they_are_the_classes(
    classes: Callable[[Any], Any], fits: bool, make_trainer: MakeTrainer
) -> None:
    y = torch.arange(8) % 4
    samples = DataLoader(TensorDataset(torch.randn(8, 1, 8, 8), y), batch_size=8)
    loader: Any = SimpleNamespace(train_dataloader=lambda: samples)
    trainer = make_trainer(adversary=Adversary(LabelFlip(), [0, 1]), clients_per_round=2, max_rounds=1)
    said = r"LabelFlip changes the second .* other numbers, such as \d where it has \d: let class_of"
    with nullcontext() if fits else pytest.raises(UserError, match=said):
        trainer.fit(linear(), Federated(loader, num_clients=2, class_of=classes(y).numpy(), num_classes=10))


def test_batches_in_another_order_or_with_copies_are_flipped(make_trainer: MakeTrainer) -> None:
    def twice(rows: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = default_collate(sorted(rows * 2, key=lambda row: -int(row[1])))
        return x, y

    samples = DataLoader(TensorDataset(torch.randn(8, 1, 8, 8), torch.arange(8) % 4), batch_size=3, collate_fn=twice)
    loader: Any = SimpleNamespace(train_dataloader=lambda: samples)
    trainer = make_trainer(adversary=Adversary(LabelFlip(), [0, 1]), clients_per_round=2, max_rounds=1)
    trainer.fit(linear(), Federated(loader, num_clients=2))


def test_a_backdoor_needs_images_and_a_method_rounds(fitted: Fitted) -> None:
    with pytest.raises(UserError, match=r"Backdoor changes images \(B, C, H, W\) and classes \(B,\)"):
        fitted(Adversary(Backdoor(), [1]), module=Perceptron, data=Served(3))
    with pytest.raises(UserError, match="those of FedKT send nothing"):
        fitted(Adversary(SignFlip()), FedKT(mode="one_shot"), linear, digits(server_fraction=0.1))


def test_single_attacks_work_without_rounds_that_wait(fitted: Fitted) -> None:
    flags: dict[str, Any] = {"clock": ClientClock(devices="phones"), "clients_per_round": 3, "max_rounds": 4}
    seen, clean = Recorded(), Recorded()
    fitted(Adversary(SignFlip(4), [0, 1, 2]), FedBuff(), Perceptron, callbacks=[seen], **flags)
    fitted(None, FedBuff(), Perceptron, callbacks=[clean], **flags)
    for attacked, honest in zip(seen.rounds[0], clean.rounds[0], strict=True):
        factor = -4 if attacked.client in (0, 1, 2) else 1
        torch.testing.assert_close(attacked.sent["model"], factor * honest.sent["model"])


@pytest.mark.parametrize(
    ("algorithm", "flags"),
    [
        (FedBuff(buffer_size=2), {"clock": ClientClock(devices="phones"), "clients_per_round": 5}),
        (FedAvg(), {"dropout_rate": 0.4}),
    ],
    ids=["FedBuff", "FedAvg"],
)
def test_attackers_are_counted_among_the_uploads_that_a_round_takes(
    algorithm: Algorithm, flags: dict[str, Any], fitted: Fitted
) -> None:
    """Test that a client which began before the attack does not count, though its upload comes after."""
    seen = Recorded()
    adversary = Adversary(GaussianUpload(1e3, 0), [0, 1, 2, 4, 5], start=3)
    trainer, _ = fitted(adversary, algorithm, Perceptron, callbacks=[seen], max_rounds=8, **flags)
    forged = [sum(1e3 in message.sent["model"] for message in seen.rounds.get(number, [])) for number in range(8)]
    assert list(trainer.history["attack/attackers"]) == forged
    assert len(set(forged)) > 2


# ---------------------------------------------------------------------------------------------------------- command line


def test_an_adversary_is_named_at_the_command_line(lightning_fl: Any) -> None:
    words = (
        "fit --config quickstart --trainer.max_rounds 1 --model.network linear --data.image_size 8 --trainer.threads 1 "
        "--trainer.adversary.attack Backdoor --trainer.adversary.attack.replace true --trainer.adversary.attackers 0.3 "
        "--trainer.callbacks+=BackdoorProbe --trainer.default_root_dir run"
    )
    done = lightning_fl(*words.split())
    assert done.code == 0, done.err
    (row,) = read_rows(Path("run"))
    assert 0 <= float(row["attack/success"]) <= 1
    line = next(line for line in done.out.splitlines() if line.startswith("attack"))
    assert line.split(None, 1)[1] == (
        f"success {float(row['attack/success']):.2f} (Backdoor, {float(row['attack/attackers']):.2f} attackers a round)"
    )


@pytest.mark.process
@pytest.mark.parametrize("attack", ["ALIE", "MinMax", "LabelFlip"])
def test_two_processes_give_the_answer_of_one(attack: str, tmp_path: Path) -> None:
    words = ("--model.network", "linear", "--trainer.max_rounds", "3", "--trainer.adversary.attack", attack)
    words += ("--trainer.adversary.attackers", "0.4")
    algorithm = "FedAvg --algorithm.aggregator CoordinateMedian"
    one = ran(tmp_path / "one", *words, algorithm=algorithm)
    assert any(float(row["attack/attackers"]) for row in one[0])
    assert all(float(row["robust/attackers_kept"]) >= 0 for row in one[0])
    agree(one, ran(tmp_path / "two", *words, num_processes=2, algorithm=algorithm))

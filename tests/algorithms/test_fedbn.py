"""Test FedBN: the paper's loop, its limits, exact bits, and the norms that clients keep through every edge of a run."""

import copy
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from compared_runs import RUNNERS, MakeTrainer, equal_states, fits, resumed_like_whole
from lightning.pytorch import Callback
from roster import problem
from toys import SIZES, Normalised, Perceptron, Served, federation, read_rows, samples, vector

from lightning_fl import FederatedTrainer, UserError
from lightning_fl.algorithms import SCAFFOLD, Algorithm, DeviceM, FedAvg, FedBN, FedDP, FedKT, FedProx
from lightning_fl.callbacks import FilterPruning, MagnitudePruning
from lightning_fl.data import Arrays
from lightning_fl.modules import ImageClassifier

SHARED = slice(0, 26)
COUNTER = "personal/counters/norm.num_batches_tracked"


def without_lone_batches() -> Any:
    """Return data whose clients have no last batch of one sample."""
    return federation(sizes=(3, 6, 4, 10, 12, 7))


def states_of(trainer: FederatedTrainer) -> dict[int, Any]:
    return dict(trainer.run.clients.items())


@RUNNERS
def test_is_the_papers(runner: str, make_trainer: MakeTrainer) -> None:
    module = Normalised()
    start = copy.deepcopy(module.norm.state_dict())
    w, norms = oracle.fedbn(problem(rounds=5, epochs=2), vector(module)[SHARED])
    trainer = make_trainer(max_rounds=5, local_epochs=2, precision="64-true", runner=runner)
    trainer.fit(module, federation(), FedBN())
    np.testing.assert_allclose(vector(module)[SHARED], w, rtol=0, atol=1e-10)
    assert states_of(trainer).keys() == norms.keys()
    for client, norm in norms.items():
        state = trainer.run.clients[client]
        np.testing.assert_allclose(state["personal"], np.concatenate([norm.scale, norm.shift]), rtol=0, atol=1e-10)
        np.testing.assert_allclose(state["personal/buffers"], np.concatenate([norm.mean, norm.var]), rtol=0, atol=1e-10)
        assert int(state[COUNTER]) == norm.batches
    assert equal_states(start, dict(module.norm.state_dict())), "the exported model has the initial norm"


@RUNNERS
@pytest.mark.parametrize("base", [FedAvg, partial(FedProx, mu=0.5), SCAFFOLD], ids=["FedAvg", "FedProx", "SCAFFOLD"])
def test_without_norms_it_is_its_base_bit_for_bit(
    base: Callable[[], Algorithm], runner: str, make_trainer: MakeTrainer
) -> None:
    plain, runs = Perceptron(), []

    def fit(algorithm: Algorithm) -> None:
        module = copy.deepcopy(plain)
        trainer = make_trainer(max_rounds=4, local_epochs=2, runner=runner)
        trainer.fit(module, federation(), algorithm)
        run = {**trainer.run.state_dict(), "clients": states_of(trainer), "client_memory": {}}
        runs.append({"model": dict(module.state_dict()), "run": run})

    fit(base())
    with pytest.warns(UserWarning, match=r"no batch norm, so clients keep none of their own.*norms='all' keeps"):
        fit(FedBN(base()))
    assert equal_states(*runs)


def test_one_client_alone_trains_as_under_fedavg(make_trainer: MakeTrainer) -> None:
    """Check N = 1: the client's model is that of FedAvg, whose only client trains all layers."""
    plain, flags = Normalised(), {"max_rounds": 3, "clients_per_round": 1, "precision": "64-true"}
    module = copy.deepcopy(plain)
    make_trainer(**flags).fit(plain, federation(sizes=(10,)), FedAvg())
    trainer = make_trainer(**flags)
    trainer.fit(module, federation(sizes=(10,)), FedBN())
    state = trainer.run.clients[0]
    np.testing.assert_allclose(vector(module)[SHARED], vector(plain)[SHARED], rtol=0, atol=1e-12)
    np.testing.assert_allclose(state["personal"], vector(plain.norm), rtol=0, atol=1e-12)
    statistics = torch.cat([plain.norm.running_mean, plain.norm.running_var])
    torch.testing.assert_close(state["personal/buffers"], statistics, rtol=0, atol=1e-12)
    assert torch.equal(state[COUNTER], plain.norm.num_batches_tracked)


BASES: dict[str, Callable[[], Algorithm]] = {
    "FedAvg": FedAvg,
    "SCAFFOLD": SCAFFOLD,
    "Mime, which reads gradients at the received model": lambda: DeviceM(local_beta=0.5, variant="mime"),
    "a head that stays, too": lambda: Algorithm(personal=["output"]),
}


@pytest.mark.parametrize("base", BASES)
def test_runners_agree_and_norms_count_each_batch_once(base: str, make_trainer: MakeTrainer) -> None:
    module = Normalised()
    flags = {"precision": "64-true", "local_epochs": 2, "clients_per_round": 5, "clients_at_once": 5}
    (_, one), (_, other) = fits(make_trainer, module, federation, FedBN(BASES[base]()), **flags)
    torch.testing.assert_close(one.run.params, other.run.params, rtol=0, atol=1e-12)
    assert states_of(one).keys() == states_of(other).keys()
    for client, state in one.run.clients.items():
        torch.testing.assert_close(state, dict(other.run.clients[client]), rtol=0, atol=1e-12)
        batches = 2 * (SIZES[client] // 4 + (SIZES[client] % 4 > 1))
        turns = int(state[COUNTER]) / batches
        assert turns == int(turns) <= 3, "one batch, one count"
        statistics = state["personal/buffers"]
        assert (statistics != torch.tensor([0.0] * 3 + [1.0] * 3)).all()


@pytest.mark.parametrize("norms", ["batch", "all"])
def test_norms_are_found_by_their_types(norms: Any) -> None:
    class Mixed(Normalised):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.group = torch.nn.LayerNorm(3), torch.nn.GroupNorm(1, 3)
            self.instance = torch.nn.InstanceNorm1d(3, affine=True, track_running_stats=True)
            self.layer.bias.requires_grad_(False)

    algorithm = FedBN(Algorithm(personal=["output.bias"]), norms=norms)
    statistics = [f"norm.{leaf}" for leaf in ("running_mean", "running_var", "num_batches_tracked")]
    more = ["layer.weight", "group.weight", "group.bias", "instance.weight", "instance.bias"]
    expected = ["output.bias", "norm.weight", "norm.bias", *(more if norms == "all" else [])]
    owned = algorithm.owned(Mixed())
    assert owned.parameters == set(expected)
    assert owned.buffers >= set(statistics)
    assert len(owned.buffers) == (6 if norms == "all" else 3)


@pytest.mark.matrix
def test_bits_of_vgg11_bn(make_trainer: MakeTrainer) -> None:
    """Count by hand: 9,756,426 parameters, of which the 2,752 channels of eight norms keep two each; no statistics cross."""
    images = torch.zeros(6, 32, 32, 3, dtype=torch.uint8).random_().numpy()
    labels = np.arange(6) % 10
    data = Arrays(train=(images, labels), test=(images, labels), num_clients=1, batch_size=2)
    channels = 64 + 128 + 2 * 256 + 4 * 512
    assert channels == 2752
    trainer = make_trainer(max_rounds=1, clients_per_round=1, local_epochs=None, local_steps=1, limit_val_batches=0)
    trainer.fit(ImageClassifier("vgg11_bn", num_classes=10), data, FedBN())
    for direction in ("up", "down"):
        bits = {kind: count for kind, count in trainer.run.ledger.round_bits[direction].items() if count}
        assert bits == {"model": 32 * (9_756_426 - 2 * 2752)}
    state = trainer.run.clients[0]
    assert sum(x.numel() for name, x in state.items() if "counters" not in name) == 4 * channels
    assert sum("counters" in name for name in state) == 8


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_resumed_equals_uninterrupted(where: str, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Check bit for bit, with a new module whose norm begins elsewhere; afterwards `validate` gives the last round's values."""

    def elsewhere() -> Normalised:
        module = Normalised()
        torch.nn.init.constant_(module.norm.running_var, 7.0)
        torch.nn.init.constant_(module.norm.weight, 3.0)
        return module

    module, _ = resumed_like_whole(
        make_trainer, tmp_path, Normalised, algorithm=FedBN, later=elsewhere, client_states=where
    )
    assert torch.equal(module.norm.running_var, torch.ones(3))
    checkpoint = tmp_path / "resumed" / "checkpoints" / "last.ckpt"
    (measured,) = make_trainer().validate(Normalised(), federation(), ckpt_path=checkpoint, algorithm=FedBN())
    row = read_rows(tmp_path / "resumed")[-1]
    assert {name: float(row[name]) for name in measured} == pytest.approx(measured, abs=1e-7)


def test_each_client_predicts_with_its_own_norms_and_newcomers_with_the_initial_ones(make_trainer: MakeTrainer) -> None:
    module = Normalised()
    trainer = make_trainer(max_rounds=2, clients_per_round=2)
    trainer.fit(module, federation(), FedBN())
    losses = []
    x, y = samples(10, seed=1)
    for client in range(len(SIZES)):
        own = copy.deepcopy(module).eval()
        if client in trainer.run.clients:
            state = trainer.run.clients[client]
            own.norm.weight.data, own.norm.bias.data = state["personal"].split(3)
            own.norm.running_mean, own.norm.running_var = state["personal/buffers"].split(3)
        losses.append(float(own.loss((x, y))))
    assert 0 < len(states_of(trainer)) < len(SIZES)
    assert float(trainer.callback_metrics["val/loss"]) == pytest.approx(np.mean(losses), rel=1e-5)


class Poisoned(Normalised):
    """Module whose running mean is not finite after samples with a first feature beyond 100; its loss is."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss((batch[0].clamp(max=100), batch[1]))
        if batch[0][:, 0].max() > 100:
            self.norm.running_mean = torch.full_like(self.norm.running_mean, torch.nan)
        return loss


def test_a_client_whose_statistics_are_not_finite_is_rejected_and_keeps_its_norms(make_trainer: MakeTrainer) -> None:
    x, y = samples(sum(SIZES))
    data = federation()
    data.setup("fit")
    x[data.client_indices[0]] = 1000.0
    trainer = make_trainer(max_rounds=2, clients_per_round=6)
    trainer.fit(Poisoned(), federation(train=(x, y)), FedBN())
    assert trainer.callback_metrics["clients/rejected"] == 1
    assert states_of(trainer).keys() == {1, 2, 3, 4, 5}
    assert all(torch.isfinite(entry).all() for state in trainer.run.clients.values() for entry in state.values())


def test_a_mask_leaves_norms_whole(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=4, callbacks=MagnitudePruning(rate=0.6, prune_epoch=1))
    trainer.fit(Normalised(), federation(), FedBN())
    assert trainer.run.mask is not None
    assert trainer.run.mask.shape == (26,)
    assert all((state["personal"][:3] != 0).all() for state in trainer.run.clients.values()), "the scales"


def test_stragglers_and_absent_clients_keep_what_they_have(make_trainer: MakeTrainer) -> None:
    kept: list[Any] = [{}]

    class Watch(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            kept.append(copy.deepcopy(states_of(trainer)))

    trainer = make_trainer(max_rounds=5, straggler_rate=0.5, dropout_rate=0.3, local_epochs=3, callbacks=Watch())
    trainer.fit(Normalised(), without_lone_batches(), FedBN())
    for before, now in pairwise(kept):
        changed = {k for k in now if k not in before or not equal_states(now[k], before[k])}
        assert len(changed) <= 3
        assert all(int(now[k][COUNTER]) > int(before.get(k, {COUNTER: 0})[COUNTER]) for k in changed)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FedBN(norms="layer"), ["norms", "'layer'", "batch", "all"]),
        (lambda: FedBN(FedBN()), ["base", "FedBN itself"]),
        (lambda: FedBN("FedAvg"), ["base", "'FedAvg'", "FedProx()"]),  # type: ignore[arg-type]
        (lambda: FedBN(FedKT(mode="one_shot")), ["base", "trains clients in rounds", "FedKT"]),
    ],
)
def test_bad_input_is_refused_in_a_sentence(make: Callable[[], Algorithm], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        make()
    assert [word for word in words if word not in str(error.value)] == []


def test_structured_pruning_of_kept_norms_is_refused(make_trainer: MakeTrainer) -> None:
    images = torch.zeros(24, 8, 8, 1, dtype=torch.uint8).random_().numpy()
    labels = np.arange(24) % 2
    data = Arrays(train=(images, labels), test=(images, labels), num_clients=2, batch_size=4)

    class Network(torch.nn.Sequential):
        def __init__(self) -> None:
            norm = torch.nn.BatchNorm2d(4, affine=False)  # statistics alone
            super().__init__(
                torch.nn.Conv2d(1, 4, 3), norm, torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 2)
            )

    class Classifier(Perceptron):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.output = Network(), torch.nn.Identity()
            self.example_input_array = torch.zeros(1, 1, 8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.hidden(x)

        def loss(self, batch: Any) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

    trainer = make_trainer(
        clients_per_round=2,
        limit_val_batches=0,
        callbacks=FilterPruning(rate=0.5, prune_epoch=1, importance="magnitude"),
    )
    with pytest.raises(UserError, match=r"'hidden\.1\.running_mean', which is personal to each client"):
        trainer.fit(Classifier(), data, FedBN())


def test_gates_over_fedbn_are_kept_beside_the_norms() -> None:
    algorithm = FedDP(FedBN(), variant="threshold", pruning_threshold=0.0)
    assert algorithm.owned(Normalised()) == FedBN().owned(Normalised())
    assert algorithm.owned(Normalised()).parameters == {"norm.weight", "norm.bias"}


def test_models_trained_before_the_first_round_have_no_kept_parts(make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match=r"clients keep 'norm\.weight': use a method that trains in rounds only"):
        make_trainer().fit(Normalised(), Served(9), FedBN(FedKT(s=1, t=2)))

"""Test methods whose clients keep second models: an untouched base method, and these models through every edge of a run."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer, equal_states, resumed_like_whole
from lightning.pytorch import Callback
from torchmetrics import MeanMetric
from toys import SIZES, Normalised, Perceptron, Pruning, federation, own_models, read_rows, samples, vector

from lightning_fl import UserError
from lightning_fl.algorithms import APFL, SCAFFOLD, Algorithm, Ditto, FedAvg, FedBN, FedKT, FedProx, PFedMe, ServerM
from lightning_fl.callbacks import MagnitudePruning
from lightning_fl.features.clock.simulated_clock import SimulatedClock

EACH = pytest.mark.parametrize("method", [Ditto, APFL])
EACH_WITH_MODELS = pytest.mark.parametrize(
    "method", [Ditto, APFL, partial(PFedMe, strength=5.0)], ids=["Ditto", "APFL", "PFedMe"]
)


class Logging(Normalised):
    """Module with dropout and a norm, which logs a value and a torchmetrics object."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss((torch.nn.functional.dropout(batch[0], 0.2), batch[1]))
        self.mean(loss)
        self.log("mean", self.mean)
        self.log("loss", loss)
        return loss


BASES: dict[str, Callable[[], Algorithm]] = {
    "FedAvg": FedAvg,
    "FedProx": partial(FedProx, mu=0.5),
    "SCAFFOLD": SCAFFOLD,
    "ServerM": ServerM,
}


WITH_COMPANIONS = [
    partial(Ditto, strength=0.0),
    partial(Ditto, strength=1.0),
    partial(APFL, alpha=0.0),
    partial(APFL, alpha=0.7),
    partial(APFL, alpha=1.0, adaptive=False),
]


@pytest.mark.parametrize(
    ("base", "make"),
    [
        *(("FedAvg", make) for make in WITH_COMPANIONS),
        *(
            (base, make)
            for base in BASES
            if base != "FedAvg"
            for make in (partial(Ditto, strength=1.0), partial(APFL, alpha=0.7))
        ),
    ],
    ids=lambda given: given if isinstance(given, str) else f"{given.func.__name__}-{given.keywords}",
)
def test_the_server_does_not_notice_it(
    base: str, make: Callable[..., Algorithm], make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    """Check models, bits, logs and the base method's states bit for bit; only what a client predicts with differs."""
    plain, runs, counts = Logging(), [], []
    for name, algorithm in (("base", BASES[base]()), ("other", make(BASES[base]()))):
        module = copy.deepcopy(plain)
        flags = {"max_rounds": 3, "local_epochs": 2, "straggler_rate": 0.3, "runner": "serial"}
        trainer = make_trainer(default_root_dir=tmp_path / name, **flags, **keeps_files)
        trainer.fit(module, federation(), algorithm)
        states = {
            k: {n: x for n, x in state.items() if not n.startswith("own/")} for k, state in trainer.run.clients.items()
        }
        rows = [
            {n: x for n, x in row.items() if not n.startswith(("val/", "time/"))} for row in read_rows(tmp_path / name)
        ]
        counts.append([int(row.pop("clients/samples")) for row in rows])
        ledger = trainer.run.ledger.state_dict()
        kept = {k: state for k, state in states.items() if state}
        runs.append([dict(module.state_dict()), trainer.run.server, kept, rows, ledger, trainer.run.num_steps])
    for expected, found in zip(*runs, strict=True):
        assert equal_states(expected, found)
    assert counts[1] == [2 * trained for trained in counts[0]], "each client trains two models"


@EACH_WITH_MODELS
def test_the_servers_model_is_measured_beside_those_of_the_clients(
    method: Callable[[], Algorithm], make_trainer: MakeTrainer
) -> None:
    """Check validation and test, with newcomers and without; under Ditto and APFL the server's values are FedAvg's."""
    plain, found = Normalised(), []
    for algorithm, clients in ((method(), 2), (method(), 6), (FedAvg(), 6)):
        module = copy.deepcopy(plain)
        trainer = make_trainer(clients_per_round=clients, runner="serial")
        trainer.fit(module, federation(), algorithm)
        found.append(trainer.callback_metrics)
        (tested,) = trainer.test(verbose=False)
        loss = module.eval().loss(samples(10, seed=1)).item()
        end = "" if isinstance(algorithm, FedAvg) else "_server"
        assert float(found[-1][f"val/loss{end}"]) == pytest.approx(loss, rel=1e-6)
        assert tested[f"test/loss{end}"] == pytest.approx(loss, rel=1e-6)
        assert not end or tested["test/loss"] != pytest.approx(loss, rel=1e-6)
    if method in (Ditto, APFL):
        assert all(found[1][f"val/{name}_server"] == found[2][f"val/{name}"] for name in ("loss", "accuracy"))


def test_without_models_of_clients_the_server_has_no_columns_of_its_own(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    trainer.fit(Normalised(), federation(), FedBN())
    assert not any(name.endswith("_server") for name in trainer.callback_metrics)


@EACH_WITH_MODELS
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_resumed_equals_uninterrupted_and_validate_gives_the_same(
    where: str, method: Callable[[], Algorithm], make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    resumed_like_whole(make_trainer, tmp_path, Normalised, algorithm=method, client_states=where)
    checkpoint = tmp_path / "resumed" / "checkpoints" / "last.ckpt"
    (measured,) = make_trainer().validate(Normalised(), federation(), ckpt_path=checkpoint, algorithm=method())
    row = read_rows(tmp_path / "resumed")[-1]
    assert {name: float(row[name]) for name in measured} == pytest.approx(measured, abs=1e-7)


class Poisoned(Perceptron):
    """Module whose loss may be NaN."""

    poisoned = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch) * (torch.nan if self.poisoned else 1.0)


@EACH_WITH_MODELS
def test_a_rejected_client_keeps_its_own_model(method: Callable[[], Algorithm], make_trainer: MakeTrainer) -> None:
    kept: list[dict[int, np.ndarray]] = []

    class Watch(Callback):
        def on_client_download(self, trainer: Any, pl_module: Any, client: int) -> None:
            pl_module.poisoned = client == 0 and trainer.current_epoch == 1

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            kept.append(own_models(trainer))

    trainer = make_trainer(max_rounds=2, clients_per_round=6, callbacks=Watch())
    with pytest.warns(UserWarning, match="own model is not finite after its training, so the client keeps the earlier"):
        trainer.fit(Poisoned(), federation(), method())
    assert trainer.callback_metrics["clients/rejected"] == 1
    np.testing.assert_array_equal(kept[0][0], kept[1][0])
    assert all((kept[0][k] != kept[1][k]).any() for k in range(1, 6))


class Diverging(Perceptron):
    """Module whose second loss in a client's round may be NaN: that of a client's own model, if its samples are one batch."""

    poisoned, calls = False, 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.calls += 1
        return self.loss(batch) * (torch.nan if self.poisoned and self.calls == 2 else 1.0)


@EACH
def test_an_own_model_that_is_not_finite_is_replaced_by_the_earlier_one(
    method: type[Algorithm], make_trainer: MakeTrainer
) -> None:
    kept: list[dict[int, dict[str, torch.Tensor]]] = []

    class Watch(Callback):
        def on_client_download(self, trainer: Any, pl_module: Any, client: int) -> None:
            pl_module.poisoned, pl_module.calls = client == 0 and trainer.current_epoch == 1, 0

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            kept.append(dict(trainer.run.clients.items()))

    trainer = make_trainer(max_rounds=2, callbacks=Watch())
    with pytest.warns(UserWarning, match="own model is not finite after its training, so the client keeps the earlier"):
        trainer.fit(Diverging(), federation(sizes=(4, 4, 4)), method())
    assert trainer.callback_metrics["clients/rejected"] == 0
    assert equal_states(kept[0][0], kept[1][0])
    assert not any(equal_states(kept[0][k], kept[1][k]) for k in (1, 2))


@EACH_WITH_MODELS
def test_the_progress_bar_counts_each_batch_that_callbacks_see(
    method: Callable[[], Algorithm], make_trainer: MakeTrainer
) -> None:
    planned, seen = [], [0]

    class Watch(Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            planned.append(trainer.num_training_batches)

        def on_train_batch_end(self, *arguments: Any) -> None:
            seen[0] += 1

    make_trainer(max_rounds=2, callbacks=Watch()).fit(Perceptron(), federation(), method())
    assert sum(planned) == seen[0] > 0


@EACH_WITH_MODELS
def test_a_mask_and_a_pruning_reach_own_models(method: Callable[[], Algorithm], make_trainer: MakeTrainer) -> None:
    masked = make_trainer(max_rounds=4, callbacks=MagnitudePruning(rate=0.6, prune_epoch=1))
    masked.fit(Perceptron(), federation(), method())
    assert masked.run.mask is not None
    assert 0 < int(masked.run.mask.sum()) < 26
    assert all((model[~masked.run.mask.numpy()] == 0).all() for model in own_models(masked).values())
    cut = make_trainer(max_rounds=4, callbacks=Pruning(when=2))
    module = Perceptron()
    cut.fit(module, federation(), method())
    assert {len(model) for model in own_models(cut).values()} == {20}


@EACH
def test_twice_the_work_takes_twice_the_simulated_time(method: type[Algorithm], make_trainer: MakeTrainer) -> None:
    seconds = []
    for algorithm in (FedAvg(), method()):
        trainer = make_trainer(clock=SimulatedClock(computation_seconds=5.0))
        trainer.fit(Perceptron(), federation(), algorithm)
        seconds.append(trainer.run.simulated_seconds)
    assert seconds[1] - seconds[0] == pytest.approx(2 * 5.0)


@EACH
@pytest.mark.parametrize(
    ("make", "flags", "words"),
    [
        (lambda method: method(), {"runner": "stacked"}, ["runner 'stacked'", "'serial'"]),
        (lambda method: method(method()), {}, ["base", "{} itself"]),
        (lambda method: method(FedKT(mode="one_shot")), {}, ["base", "one model of each client", "FedKT"]),
        (
            lambda method: method(Algorithm(personal=["output"])),
            {},
            ["{}'s clients", "'output.weight'", "personal parts"],
        ),
        (lambda method: method(FedBN()), {}, ["'norm.weight'", "personal parts"]),
        (lambda method: FedBN(method()), {}, ["FedBN's clients", "'norm.weight'", "personal parts"]),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    make: Callable[..., Algorithm],
    flags: dict[str, Any],
    words: list[str],
    method: type[Algorithm],
    make_trainer: MakeTrainer,
) -> None:
    with pytest.raises(UserError) as error:
        make_trainer(**flags).fit(Normalised(), federation(), make(method))
    said = str(error.value)
    assert [word for word in words if word.format(method.__name__) not in said] == []


@pytest.mark.parametrize("algorithm", [Ditto(strength=0), APFL(alpha=1.0, adaptive=False)], ids=["Ditto", "APFL"])
def test_own_models_have_norms_of_their_own(algorithm: Algorithm, make_trainer: MakeTrainer) -> None:
    """Check one client that trains alone, in three rounds: its own model, norm included, is that of FedAvg's client."""
    plain = Normalised()
    module = copy.deepcopy(plain)
    flags = {"max_rounds": 3, "clients_per_round": 1, "precision": "64-true"}
    make_trainer(**flags).fit(plain, federation(sizes=(10,)), FedAvg())
    trainer = make_trainer(**flags)
    trainer.fit(module, federation(sizes=(10,)), algorithm)
    state = trainer.run.clients[0]
    np.testing.assert_allclose(own_models(trainer)[0], vector(plain), rtol=0, atol=1e-12)
    statistics = torch.cat([plain.norm.running_mean, plain.norm.running_var])
    torch.testing.assert_close(state["own/buffers"], statistics, rtol=0, atol=1e-12)
    assert torch.equal(state["own/scalars/norm.num_batches_tracked"], plain.norm.num_batches_tracked)


@EACH_WITH_MODELS
def test_each_client_predicts_with_its_own_model_and_newcomers_with_the_servers(
    method: Any, make_trainer: MakeTrainer
) -> None:
    """Check the mean loss on the common samples; the model of APFL's client is a mixture of its own and the server's."""
    module = Normalised()
    trainer = make_trainer(max_rounds=3, clients_per_round=2)
    trainer.fit(module, federation(), method())
    losses = []
    for client in range(len(SIZES)):
        model = copy.deepcopy(module).eval()
        if client in trainer.run.clients:
            state, w = trainer.run.clients[client], torch.from_numpy(vector(module)).float()
            share = state.get("own/share/scalars", torch.ones(()))
            torch.nn.utils.vector_to_parameters(share * state["own/model"] + (1 - share) * w, model.parameters())
            model.norm.running_mean, model.norm.running_var = state["own/buffers"].split(3)
        losses.append(float(model.loss(samples(10, seed=1)).detach()))
    assert 0 < len(trainer.run.clients) < len(SIZES)
    assert float(trainer.callback_metrics["val/loss"]) == pytest.approx(np.mean(losses), rel=1e-5)
    assert float(module.eval().loss(samples(10, seed=1)).detach()) != pytest.approx(np.mean(losses), rel=1e-5)

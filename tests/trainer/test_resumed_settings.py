"""Test what a resumed run may change, and what it must keep."""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer
from toys import Perceptron, federation, vector

from lightning_fl import (
    Algorithm,
    FederatedTrainer,
    UserError,
    aggregators,
    algorithms,
    codecs,
    data,
    exchanges,
    personal,
    rules,
    steps,
)
from lightning_fl.algorithms import APFL, Ditto, FedAP, FedProx, ServerM
from lightning_fl.checks import parameters_of
from lightning_fl.codecs import ErrorFeedback, Followed, OneBit, TopK
from lightning_fl.data import Digits, Federated, Shards
from lightning_fl.features.loss_guard import LossGuard
from lightning_fl.modules import ImageClassifier
from lightning_fl.rules import Proximal
from lightning_fl.steps import Apply, Compress, Momentum

DATA: dict[str, Any] = {"num_clients": 6, "batch_size": 20, "client_fraction": 0.2, "server_fraction": 0.05}
FOLLOWED = {
    "uplink": ErrorFeedback(TopK(0.2)),
    "steps": [Apply(), Compress(TopK(0.2))],
    "downlink": Followed(TopK(0.2)),
}


def composed(**slots: Any) -> Algorithm:
    return Algorithm(**{"rule": Proximal(0.1), "uplink": TopK(0.2), "steps": [Apply(), Momentum(0.5)], **slots})


def fit(make_trainer: MakeTrainer, folder: Path, rounds: int, **given: Any) -> tuple[FederatedTrainer, torch.Tensor]:
    """Fit digits with flags, data parameters, hyper-parameters of the model (model_…) and an algorithm; resume if possible."""
    of_data = {**DATA, **{name: given.pop(name) for name in list(given) if hasattr(Digits(), name)}}
    model = {name.removeprefix("model_"): given.pop(name) for name in list(given) if name.startswith("model_")}
    torch.manual_seed(0)
    module = ImageClassifier("linear", 10, 1, 8, **{"learning_rate": 0.1, **model})
    algorithm = given.pop("algorithm", None) or composed()
    flags = {"logger": True, "enable_checkpointing": True, "max_rounds": rounds, "default_root_dir": folder, **given}
    trainer = make_trainer(**flags)
    resumes = (folder / "checkpoints" / "last.ckpt").is_file()
    trainer.fit(module, Digits(**of_data), algorithm, ckpt_path="last" if resumes else None)
    return trainer, torch.from_numpy(vector(module))


@pytest.fixture
def said() -> Iterator[list[str]]:
    """Collect what the run prints."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def changes_in(said: list[str]) -> list[str]:
    return [line for line in said if "Changed since the checkpoint" in line]


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "partition": ({"partition": Shards()}, r"data\.partition IID → Shards"),
    "seed of the data": ({"seed": 1}, r"data\.seed 0 → 1"),
    "number of clients": ({"num_clients": 7}, r"data\.num_clients 6 → 7"),
    "clients' fraction": ({"client_fraction": 0.3}, r"data\.client_fraction 0\.2 → 0\.3"),
    "server's fraction": ({"server_fraction": 0.1}, r"data\.server_fraction 0\.05 → 0\.1"),
    "samples for validation": ({"val_fraction": 0.25}, r"data\.val_fraction 0\.0 → 0\.25"),
    "normalisation": ({"normalize": True}, r"data\.normalize False → True"),
    "uplink": ({"algorithm": composed(uplink=OneBit())}, r"algorithm\.uplink TopK → OneBit"),
    "share that a codec keeps": ({"algorithm": composed(uplink=TopK(0.3))}, r"algorithm\.uplink\.alpha 0\.2 → 0\.3"),
    "error feedback": ({"algorithm": composed(uplink=ErrorFeedback(TopK(0.2)))}, r"uplink TopK → ErrorFeedback"),
    "steps": ({"algorithm": composed(steps=[Apply()])}, r"steps \['Apply', 'Momentum'\] → \['Apply'\]"),
    "dampening": (
        {"algorithm": composed(steps=[Apply(), Momentum(0.5, dampening=False)])},
        r"algorithm\.steps\.1\.dampening True → False",
    ),
    "plain SGD": ({"client_optimizer": "sgd"}, r"trainer\.client_optimizer module → sgd"),
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of one round."""
    folder = tmp_path_factory.mktemp("begun")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PL_GLOBAL_SEED", "0")
        quiet = {"enable_model_summary": False, "enable_progress_bar": False, "num_sanity_val_steps": 0}
        fit(lambda **flags: FederatedTrainer(accelerator="cpu", clients_per_round=3, **quiet, **flags), folder, 1)
    return folder


@pytest.mark.parametrize("change", REFUSED)
def test_a_change_that_gives_other_samples_or_states_is_refused(
    change: str, begun: Path, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    shutil.copytree(begun, tmp_path / "run")
    given, sentence = REFUSED[change]
    before = files_in(tmp_path / "run")
    with pytest.raises(UserError, match=rf"last\.ckpt belongs to a run with other settings: .*{sentence}") as refused:
        fit(make_trainer, tmp_path / "run", 2, **given)
    assert "data.samples" not in str(refused.value)
    assert files_in(tmp_path / "run") == before


ALLOWED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "learning rate": ({"model_learning_rate": 0.05}, ["model.learning_rate 0.1 → 0.05"]),
    "momentum": ({"model_momentum": 0.5}, ["model.momentum 0.0 → 0.5"]),
    "batch size": ({"batch_size": 10}, ["data.batch_size 20 → 10"]),
    "epochs": ({"local_epochs": 2}, ["trainer.local_epochs 1 → 2"]),
    "steps": ({"local_steps": 2}, ["trainer.local_epochs 1 → None", "trainer.local_steps None → 2"]),
    "clients of a round": ({"clients_per_round": 2}, ["trainer.clients_per_round 3 → 2"]),
    "all clients": ({"clients_per_round": 1.0}, ["trainer.clients_per_round 3 → 1.0"]),
    "clients that drop out": ({"dropout_rate": 0.9}, ["trainer.dropout_rate 0.0 → 0.9"]),
    "stragglers": ({"straggler_rate": 1.0}, ["trainer.straggler_rate 0.0 → 1.0"]),
    "clipping": ({"gradient_clip_val": 0.01}, ["trainer.gradient_clip_val None → 0.01"]),
    "precision": ({"precision": "bf16-mixed"}, ["trainer.precision 32-true → bf16-mixed"]),
    "accumulation": ({"accumulate_grad_batches": 2}, ["trainer.accumulate_grad_batches 1 → 2"]),
    "limit": ({"limit_train_batches": 1}, ["trainer.limit_train_batches 1.0 → 1"]),
    "mu": ({"algorithm": composed(rule=Proximal(0.9))}, ["algorithm.rule.mu 0.1 → 0.9"]),
    "server's rate": (
        {"algorithm": composed(steps=[Apply(0.5), Momentum(0.5)])},
        ["algorithm.steps.0.learning_rate 1.0 → 0.5"],
    ),
    "two at once": ({"local_epochs": 2, "batch_size": 10}, ["trainer.local_epochs 1 → 2", "data.batch_size 20 → 10"]),
}


@pytest.mark.parametrize("change", ALLOWED)
def test_a_change_that_is_allowed_is_printed_and_takes_effect(
    change: str, begun: Path, make_trainer: MakeTrainer, tmp_path: Path, said: list[str]
) -> None:
    given, lines = ALLOWED[change]
    found = {}
    for name, more in (("as before", {}), ("changed", given)):
        shutil.copytree(begun, tmp_path / name)
        said.clear()
        trainer, found[name] = fit(make_trainer, tmp_path / name, 2, **more)
        assert trainer.run.round == 2
    listed = ", ".join(["trainer.max_rounds 1 → 2", *lines])
    assert changes_in(said) == [f"Changed since the checkpoint: {listed}."]
    assert not torch.equal(found["as before"], found["changed"])


def test_a_resumed_run_without_changes_prints_none(make_trainer: MakeTrainer, tmp_path: Path, said: list[str]) -> None:
    _, whole = fit(make_trainer, tmp_path, 2)
    (tmp_path / "checkpoints" / "previous.ckpt").replace(tmp_path / "checkpoints" / "last.ckpt")
    _, resumed = fit(make_trainer, tmp_path, 2)
    assert any("after round 1 of 2" in line for line in said)
    assert not changes_in(said)
    assert torch.equal(whole, resumed)


def test_the_next_leg_compares_with_the_last_one(
    begun: Path, make_trainer: MakeTrainer, tmp_path: Path, said: list[str]
) -> None:
    shutil.copytree(begun, tmp_path / "run")
    fit(make_trainer, tmp_path / "run", 2, local_epochs=2)
    said.clear()
    fit(make_trainer, tmp_path / "run", 3, local_epochs=2)
    assert changes_in(said) == ["Changed since the checkpoint: trainer.max_rounds 2 → 3."]


def test_codecs_inside_other_codecs_are_kept(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    fit(make_trainer, tmp_path, 1, algorithm=Algorithm(**FOLLOWED))
    with pytest.raises(UserError, match=r"uplink ErrorFeedback → Dense, algorithm\.downlink Followed → Dense"):
        fit(make_trainer, tmp_path, 2, algorithm=Algorithm())
    with pytest.raises(UserError, match=r"algorithm\.uplink\.codec TopK → OneBit\."):
        fit(make_trainer, tmp_path, 2, algorithm=Algorithm(**{**FOLLOWED, "uplink": ErrorFeedback(OneBit())}))


def test_a_method_s_parameters_are_kept_with_their_parts(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Test recipes, whose parameters are in parts, in callbacks or in the method itself."""
    fit(make_trainer, tmp_path / "server", 1, algorithm=ServerM(beta=0.5))
    with pytest.raises(UserError, match=r"algorithm\.steps\.1\.dampening True → False"):
        fit(make_trainer, tmp_path / "server", 2, algorithm=ServerM(beta=0.5, dampening=False))
    with pytest.raises(UserError, match=r"algorithm\.steps \['Apply', 'Momentum'\] → \['Apply', 'Yogi'\]"):
        fit(make_trainer, tmp_path / "server", 2, algorithm=ServerM(beta=0.5, variant="yogi"))
    fit(make_trainer, tmp_path / "prox", 1, algorithm=FedProx(0.1))
    trainer, _ = fit(make_trainer, tmp_path / "prox", 2, algorithm=FedProx(0.2))
    assert trainer.settings.values["algorithm.rule.mu"] == 0.2


def test_the_parameters_of_clients_own_models_are_kept(
    make_trainer: MakeTrainer, tmp_path: Path, said: list[str]
) -> None:
    fit(make_trainer, tmp_path / "apfl", 1, algorithm=APFL(alpha=0.5))
    with pytest.raises(UserError, match=r"algorithm\.personal\.0\.alpha 0\.5 → 0\.25"):
        fit(make_trainer, tmp_path / "apfl", 2, algorithm=APFL(alpha=0.25))
    fit(make_trainer, tmp_path / "ditto", 1, algorithm=Ditto(FedProx(0.1)))
    fit(make_trainer, tmp_path / "ditto", 2, algorithm=Ditto(FedProx(0.1), strength=0.5, solver="implicit"))
    (line,) = changes_in(said)
    assert "algorithm.personal.0.rule.strength 1.0 → 0.5, algorithm.personal.0.rule.solver explicit → implicit" in line


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"prune_round": 3}, r"AdaptivePruning\.prune_epoch 9 → 3"),
        ({"rate": 0.5}, r"AdaptivePruning\.rate 0\.2 → 0\.5"),
    ],
)
def test_the_pruning_of_a_method_is_kept(
    change: dict[str, Any], sentence: str, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    pruning = {"prune_round": 9, "rate_mode": "fixed", "rate": 0.2}
    fit(make_trainer, tmp_path, 1, algorithm=FedAP(**pruning))
    with pytest.raises(UserError, match=sentence):
        fit(make_trainer, tmp_path, 2, algorithm=FedAP(**{**pruning, **change}))


def test_another_seed_is_refused(
    begun: Path, make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(begun, tmp_path / "run")
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    with pytest.raises(UserError, match=r"seed_everything 0 → 7"):
        fit(make_trainer, tmp_path / "run", 2)
    monkeypatch.delenv("PL_GLOBAL_SEED")  # without a seed it is that of the checkpoint
    assert fit(make_trainer, tmp_path / "run", 2)[0].run.seed == 0


def test_other_samples_are_noticed_even_if_no_setting_says_so(
    make_trainer: MakeTrainer, keeps_files: dict[str, Any]
) -> None:
    """Test a data module of the user's, whose labels or order change from one leg to the next."""

    class Own(L.LightningDataModule):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.count = count

        def train_dataloader(self) -> Any:
            x = torch.zeros(self.count, 3)
            return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, torch.zeros(self.count, 2)), 4)

    make_trainer(max_rounds=1, **keeps_files).fit(Perceptron(), Federated(Own(20), 4))
    with pytest.raises(UserError, match=r"other samples than in the checkpoint .*last\.ckpt"):
        make_trainer(max_rounds=2, **keeps_files).fit(Perceptron(), Federated(Own(21), 4), ckpt_path="last")
    make_trainer(max_rounds=2, **keeps_files).fit(Perceptron(), Federated(Own(20), 4), ckpt_path="last")


class Rates(L.Callback):
    """Callback that reads the learning rate of each round."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(float(trainer.optimizers[0].param_groups[0]["lr"]))


def test_a_new_learning_rate_follows_the_schedule_from_its_beginning(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    for name, rounds, rate, decay, expected in (
        ("run", 2, 0.1, 0.5, [0.1, 0.05]),
        ("run", 4, 0.2, 0.5, [0.05, 0.025]),
        ("run", 5, 0.2, 0.9, [0.2 * 0.9**4]),
        ("run", 6, 0.2, 1.0, [0.2]),
        ("run", 7, 0.2, 0.5, [0.2 * 0.5**6]),
    ):
        rates = Rates()
        fit(make_trainer, tmp_path / name, rounds, model_learning_rate=rate, model_lr_decay=decay, callbacks=rates)
        assert rates.seen == pytest.approx(expected)


def watching(rate: float) -> Perceptron:
    def configure(module: L.LightningModule) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=rate)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val/loss"}}

    return Perceptron(configure=configure)


def test_rates_that_follow_from_metrics_stay(make_trainer: MakeTrainer, keeps_files: dict[str, Any]) -> None:
    make_trainer(max_rounds=1, **keeps_files).fit(watching(0.1), federation())
    with pytest.raises(UserError, match=r"ReduceLROnPlateau .*optimizer\.lr 0\.1 → 0\.2"):
        make_trainer(max_rounds=2, **keeps_files).fit(watching(0.2), federation(), ckpt_path="last")
    make_trainer(max_rounds=2, **keeps_files).fit(watching(0.1), federation(), ckpt_path="last")


def test_an_optimiser_without_hyper_parameters_says_what_changed(
    make_trainer: MakeTrainer, keeps_files: dict[str, Any], said: list[str]
) -> None:
    def adam(module: L.LightningModule) -> Any:
        return torch.optim.Adam(module.parameters(), lr=0.1)

    make_trainer(max_rounds=1, **keeps_files).fit(Perceptron(), federation())
    make_trainer(max_rounds=2, **keeps_files).fit(Perceptron(configure=adam), federation(), ckpt_path="last")
    assert changes_in(said) == [
        "Changed since the checkpoint: trainer.max_rounds 1 → 2, optimizer SGD → Adam.",
    ]


def test_callbacks_that_come_and_go_are_printed(
    begun: Path, make_trainer: MakeTrainer, tmp_path: Path, said: list[str]
) -> None:
    shutil.copytree(begun, tmp_path / "run")
    fit(make_trainer, tmp_path / "run", 2, callbacks=Rates(), loss_guard=LossGuard(rounds=9.0))
    (line,) = changes_in(said)
    assert "trainer.callbacks [] → ['Rates']" in line
    assert "trainer.loss_guard.rounds None → 9.0" in line


PARTS = [
    found
    for room in (aggregators, algorithms, codecs, exchanges, rules, steps, data)
    for found in vars(room).values()
    if isinstance(found, type) and isinstance(getattr(found, "changeable", None), frozenset)
]


@pytest.mark.parametrize("part", PARTS)
def test_what_may_change_is_a_parameter(part: type) -> None:
    assert getattr(part, "changeable") <= parameters_of(part).keys()  # noqa: B009


def test_the_number_of_rounds_may_be_numpy_s() -> None:
    assert FederatedTrainer(max_rounds=np.int64(3), accelerator="cpu").max_rounds == 3
    with pytest.raises(UserError, match=r"max_rounds .*True"):
        FederatedTrainer(max_rounds=True)


@pytest.mark.parametrize(("before", "after"), [("64-true", "32-true"), ("32-true", "64-true")])
@pytest.mark.parametrize(
    "slots",
    [
        {"rule": rules.ControlVariates(), "steps": [Apply(), steps.ControlUpdate()]},
        {"uplink": ErrorFeedback(codecs.LowRank(1))},
        {"exchange": exchanges.TwoTurns(1)},
        {
            "uplink": ErrorFeedback(TopK(0.2)),
            "exchange": exchanges.LayerDivergence(n=3),
            "aggregator": aggregators.MaskedMean(),
        },
        {"downlink": codecs.Changes()},
        {"steps": [Apply(), steps.Adam()]},
        {"personal": [personal.MixedModel()]},
        FOLLOWED,
    ],
    ids=["SCAFFOLD", "LowRank", "TwoTurns", "FedLDF", "Changes", "Adam", "APFL", "Followed"],
)
def test_another_precision_holds_from_now_on(
    before: str, after: str, slots: dict[str, Any], make_trainer: MakeTrainer, keeps_files: dict[str, Any]
) -> None:
    """Test that all numbers that cross have the width of a run that began with it, and that states have its dtype."""
    flags, method = {"clients_per_round": 6, "max_rounds": 4}, Algorithm(**slots)
    make_trainer(**{**flags, "max_rounds": 2}, **keeps_files, precision=before).fit(Perceptron(), federation(), method)
    resumed, fresh = (make_trainer(**flags, **more, precision=after) for more in (keeps_files, {}))
    resumed.fit(Perceptron(), federation(), method, ckpt_path="last")
    fresh.fit(Perceptron(), federation(), method)
    run, dtype = resumed.run, fresh.run.params.dtype
    for direction, bits in run.ledger.round_bits.items():  # positions depend on the numbers, too
        assert bits | {"mask": 0} == fresh.run.ledger.round_bits[direction] | {"mask": 0}
    kept = [*run.clients.values(), *run.client_memory.values(), *run.server.values(), run.server_memory]
    floats = [x for state in (*kept, {"model": run.params}) for x in state.values() if x.is_floating_point()]
    assert {x.dtype for x in floats} == {dtype}

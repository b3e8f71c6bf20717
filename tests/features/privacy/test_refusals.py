"""Test what a private run refuses, and that nothing else is refused."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from compared_runs import MakeTrainer
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint
from roster import ROSTER
from torch.optim.lr_scheduler import ReduceLROnPlateau
from toys import Normalised, Perceptron, Sizes, federation, samples

from lightning_fl import UserError
from lightning_fl.aggregators import CoordinateMedian, WeightedMean
from lightning_fl.algorithms import (
    IMC,
    Algorithm,
    Ditto,
    FedAdam,
    FedAP,
    FedAvg,
    FedBN,
    FedBuff,
    FedDP,
    FedProx,
    HeteroFL,
    HybridFL,
)
from lightning_fl.callbacks import (
    AdaptivePruning,
    ClientEvaluation,
    CommunicationMeter,
    EnergyMeter,
    FilterPruning,
    MagnitudePruning,
    TargetReached,
)
from lightning_fl.data import Arrays
from lightning_fl.exchanges import OneShot
from lightning_fl.features.clock import ClientClock, SimulatedClock
from lightning_fl.features.loss_guard import LossGuard
from lightning_fl.features.privacy import ClientPrivacy, LocalPrivacy
from lightning_fl.features.privacy.mechanism import Privacy
from lightning_fl.features.privacy.refusals import check_privacy
from lightning_fl.features.selection import BySize
from lightning_fl.slots import ServerTurn, State, Step, has_client_models
from lightning_fl.steps import Apply

ALIKE = ClientPrivacy(noise_multiplier=0)
SILENT = ClientPrivacy(noise_multiplier=0, side_channels="drop")
TREE = ClientPrivacy(noise_multiplier=0, sampling="passes", mechanism="tree")
BY_SAMPLES = ClientPrivacy(noise_multiplier=0, weights="samples", cap=100)
LOCAL = LocalPrivacy(buffers="keep")
REASONS = {
    "Centralised": "Centralised has all samples in one place",
    "LocalOnly": "clients of LocalOnly send nothing",
    "DeviceM-mime": "clients of CorrectedMomentum send their gradient on all samples",
    "SCAFFOLD": "clients of ControlVariates keep a copy of what they sent",
    "ProxSkip": "clients of ProxSkip keep a copy of what they sent",
    "DASHA": "Differences builds each message on those before",
    "IFCA": "MeanOfEach needs more than a sum of uploads",
    "FedDyn": "clients of DynamicRegularisation keep a copy of what they sent",
    "FedExP": "ExtrapolatedMean needs more than a sum of uploads: use WeightedMean",
    "FedNova": "NormalisedMean needs more than a sum of uploads: use WeightedMean",
    "FedDU": "DynamicServerUpdate asks clients before the first round",
    "FedDF": "Distillation looks at single clients",
    "FedKT": "clients of FedKT send something before the first round",
    "FedLDF": "LayerDivergence chooses what single clients send",
    "RandomLayers": "DrawnLayers chooses what single clients send",
    "HDFL": "DrawnClients chooses what single clients send",
    "FedADP": "PrunedUnits chooses what single clients send",
    "HeteroFL": "FirstUnits chooses what single clients send",
    "FjORD": "FirstUnits chooses what single clients send",
    "FederatedDropout": "DrawnUnits chooses what single clients send",
    "PruneFL": "send 'scalars/importance', no vector of the model",
    "OneBitAdam": "WarmedUpAdam sends other entries in some rounds than in others",
}
"""Methods of the roster that are refused, each with one of the reasons."""
ALSO_REFUSED = {"FedDUDA": "FedDU", "FedDUM": "FedDU", "FedDUSM": "FedDU", "FedDUDM": "FedDU"}


class Curious(Step):
    """A user's step that does not say what it reads."""

    def __call__(self, turn: ServerTurn, state: State) -> State:
        turn.proposal = turn.proposal * len(turn.clients)
        return state


class Loud(Callback):
    """A user's callback that does not say what it logs."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.log("my/client_3_loss", 0.25)


class Quiet(Loud):
    """The same, and its class says that this is not of clients."""

    tells_of_clients = False


class Honest(Quiet):
    """One that says that it is."""

    tells_of_clients = True


class Watching(Perceptron):
    """Module with a hook of clients."""

    def on_client_upload(self, client: int, position: int, total: int) -> None:
        """Do nothing."""


def refusal(algorithm: Algorithm, privacy: Privacy = ALIKE, has_server_samples: bool = True, **given: Any) -> str:
    """Return the sentence with which a run is refused; empty if it is not."""
    trainer: Any = SimpleNamespace(
        **{
            "privacy": privacy,
            "callbacks": [*algorithm.configure_callbacks()],
            "lightning_module": None,
            "by_lightning": False,
            "loss_guard": LossGuard(),
            "over_selection": None,
            "deadline": None,
            "availability": None,
            "max_steps": -1,
            "min_steps": None,
            "clock": SimulatedClock(),
            "secure_aggregation": None,
            "selection": None,
            "given_metric": (None, None),
            **given,
        }
    )
    owned = algorithm.owned(Normalised())
    owns = bool(owned.parameters or owned.buffers) or has_client_models(algorithm.personal)
    buffers, schedulers, hold_out = (given.pop(name, ()) for name in ("buffers", "schedulers", "hold_out"))
    try:
        check_privacy(trainer, algorithm, schedulers, buffers, has_server_samples, owns, bool(hold_out))
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.long
def test_methods_of_the_roster_are_refused_with_their_reason_or_not_at_all() -> None:
    wrong = []
    for name, entry in ROSTER.items():
        method = name.partition("-")[0]
        expected = REASONS.get(name) or REASONS.get(ALSO_REFUSED.get(method, method))
        privacy = BY_SAMPLES if method == "HybridFL" else ALIKE
        found = refusal(entry.algorithm(), privacy)
        if (expected is None) != (found == "") or (expected or "") not in found:
            wrong.append((name, expected, found))
    assert not wrong


@pytest.mark.parametrize(
    ("algorithm", "given", "sentence"),
    [
        (
            FedAvg(aggregator=CoordinateMedian()),
            {},
            "CoordinateMedian needs more than a sum of uploads: use WeightedMean",
        ),
        (FedBuff(), {}, "FedBuff does not wait for the clients of a round"),
        (
            HybridFL(),
            {},
            "ServerAsClient weighs the server's samples against the clients': use privacy.weights samples",
        ),
        (Algorithm(steps=[Apply(), Curious()]), {}, "Curious looks at single clients"),
        (
            FedAvg(aggregator=WeightedMean("uniform")),
            {"privacy": BY_SAMPLES},
            "its aggregator counts clients alike, and privacy.weights is samples: use uniform",
        ),
        (FedAP(), {}, "AdaptivePruning asks clients, who answer without noise"),
        (
            FedAvg(),
            {"callbacks": [AdaptivePruning(rate_mode="fixed", rate=0.5)], "has_server_samples": False},
            "AdaptivePruning asks clients",
        ),
        (
            FedAvg(),
            {"loss_guard": LossGuard(clients=3)},
            "loss_guard.clients compares clients' losses: use loss_guard.rounds",
        ),
        (
            FedAvg(),
            {"callbacks": [EarlyStopping("train/loss")]},
            "EarlyStopping acts on train/loss, which tells of clients",
        ),
        (
            FedAvg(),
            {"callbacks": [EarlyStopping("clients/accepted")]},
            "EarlyStopping acts on clients/accepted, which tells",
        ),
        (
            FedAvg(),
            {"callbacks": [EarlyStopping("val/accuracy_clients_min")]},
            "acts on val/accuracy_clients_min, which",
        ),
        (
            FedAvg(),
            {"callbacks": [EarlyStopping("comm/total_uplink_bytes")]},
            "acts on comm/total_uplink_bytes, which depends on clients .*, or set privacy.side_channels to drop",
        ),
        (
            FedAvg(),
            {"callbacks": [EarlyStopping("time/simulated_seconds")], "privacy": LocalPrivacy()},
            r"acts on time/simulated_seconds, which depends on clients without noise: let it watch val/accuracy\.",
        ),
        (FedAvg(), {"max_steps": 5}, "trainer.max_steps ends the run by clients' numbers of steps"),
        (FedAvg(), {"min_steps": 5, "privacy": LocalPrivacy()}, "trainer.min_steps ends .*: use max_rounds\\."),
        (
            FedAvg(),
            {"callbacks": [CommunicationMeter(9)]},
            "CommunicationMeter ends the run by the bytes of the clients",
        ),
        (
            Ditto(),
            {"callbacks": [EarlyStopping("val/accuracy")]},
            "acts on val/accuracy, which Ditto measures with what",
        ),
        (Ditto(), {"callbacks": [TargetReached(0.9)]}, "TargetReached acts on val/accuracy, which Ditto measures"),
        (
            FedAvg(),
            {"callbacks": [TargetReached(0.1)], "given_metric": ("train/loss", "min")},
            "TargetReached acts on train/loss, which tells of clients",
        ),
        (
            FedAvg(),
            {"callbacks": [TargetReached(0.9)], "hold_out": True},
            "TargetReached acts on val/accuracy, which is",
        ),
        (FedBN(), {"callbacks": [EarlyStopping("val_loss")]}, "acts on val_loss, which FedBN measures with what"),
        (
            FedAvg(),
            {"callbacks": [ModelCheckpoint(monitor="val/loss_local")]},
            "ModelCheckpoint acts on val/loss_local",
        ),
        (
            FedAvg(),
            {"callbacks": [EarlyStopping("val/accuracy")], "hold_out": True},
            "acts on val/accuracy, which is measured on samples that clients hold out, .*: set data.val_fraction to 0",
        ),
        (
            FedAvg(),
            {"schedulers": [SimpleNamespace(scheduler=object(), monitor="val/loss")], "hold_out": True},
            "object acts on val/loss, which is measured on samples that clients hold out",
        ),
        (FedAvg(), {"privacy": SILENT, "hold_out": True}, "drop has no val/… .*: set data.val_fraction to 0"),
        (
            FedAvg(),
            {"callbacks": [MagnitudePruning(rate=0.5)], "privacy": TREE},
            "MagnitudePruning prunes the model, and privacy.mechanism tree takes back noise of a model of another size",
        ),
        (IMC(), {"privacy": TREE}, "prunes the model, and privacy.mechanism tree"),
        (FedAvg(), {"clock": ClientClock(), "privacy": SILENT}, "drop has no expected time with a clock of clients"),
        (IMC(), {"privacy": SILENT}, "drop has no expected bits with .*, whose mask goes to clients as they come"),
        (
            FedAvg(),
            {"callbacks": [ClientEvaluation()], "privacy": SILENT},
            "nothing of single clients, which ClientEvaluation reads",
        ),
        (
            FedAvg(),
            {"callbacks": [EnergyMeter("wifi")], "privacy": SILENT},
            "nothing of single clients, which EnergyMeter reads",
        ),
        (
            FedAvg(),
            {"callbacks": [Loud()], "privacy": SILENT},
            "whether Loud logs, writes or sends .*: leave it out, or declare tells_of_clients = False in its class",
        ),
        (FedAvg(), {"callbacks": [LambdaCallback()], "privacy": SILENT}, "whether LambdaCallback logs"),
        (FedAvg(), {"callbacks": [Honest()], "privacy": SILENT}, "which Honest reads"),
        (FedAvg(), {"lightning_module": Watching(), "privacy": SILENT}, "whether Watching logs"),
        (FedAvg(), {"by_lightning": True, "privacy": SILENT}, "sends loggers no single steps"),
        (FedAvg(), {"over_selection": 1.5}, "trainer.over_selection decides who takes part"),
        (FedAvg(), {"deadline": 60.0}, "trainer.deadline decides who takes part"),
        (
            FedAvg(),
            {"deadline": 60.0, "privacy": LocalPrivacy()},
            "deadline lets the time that a client trains tell of",
        ),
        (
            HeteroFL([1.0, 0.5], deadline=60.0),
            {"privacy": LocalPrivacy()},
            "the deadline of HeteroFL lets the time that a client trains, and so its width, tell of its samples",
        ),
        (
            FedAvg(),
            {"selection": BySize(), "privacy": LocalPrivacy()},
            "trainer.selection BySize reads clients' numbers of samples, which are public only with privacy.weights samples",
        ),
        (HybridFL(), {"privacy": LocalPrivacy()}, "ServerAsClient weighs the server's samples"),
        (FedAvg(), {"availability": "there.csv"}, "trainer.availability decides who takes part"),
        (FedAvg(), {"buffers": ["norm.running_mean"]}, "clients send buffers such as norm.running_mean, .* GroupNorm"),
        (
            HeteroFL(),
            {"privacy": LOCAL, "has_server_samples": False, "lightning_module": Normalised()},
            "are computed from the samples of HeteroFL's clients, without noise: give the server samples",
        ),
        (
            FedAvg(),
            {"schedulers": [SimpleNamespace(scheduler=object(), monitor="train/loss")]},
            "object acts on train/loss",
        ),
    ],
)
def test_what_would_make_the_claim_false_is_refused(algorithm: Algorithm, given: dict[str, Any], sentence: str) -> None:
    assert re.search(sentence, refusal(algorithm, **given)), refusal(algorithm, **given)


@pytest.mark.parametrize("method", ["Centralised", "LocalOnly", "SCAFFOLD"])
def test_what_a_method_lacks_is_said_before_what_the_federation_lacks(method: str, make_trainer: MakeTrainer) -> None:
    """Test a δ that is too large for one client, of which Centralised has made one."""
    trainer = make_trainer(privacy=ClientPrivacy(noise_multiplier=1, delta=0.9), clients_per_round=2)
    with pytest.raises(UserError, match=REASONS[method]):
        trainer.fit(Perceptron(), federation(), ROSTER[method].algorithm())


@pytest.mark.parametrize("kind", [ClientPrivacy, LocalPrivacy])
@pytest.mark.parametrize(
    ("name", "algorithm", "given", "said"),
    [
        ("model", FedAvg(), {}, ""),
        ("moments/second", FedAdam(), {}, ""),
        ("buffers", FedAvg(), {"buffers": "clip"}, ""),
        (
            "moment/second",
            FedAdam(),
            {},
            "'moment/second', which clients of FedAdam do not send; did you mean 'moments/second'?",
        ),
        ("moments/second", FedAvg(), {}, "'moments/second', which clients of FedAvg do not send; allowed: model."),
        ("buffers", FedAvg(), {"buffers": "keep"}, "which clients of FedAvg do not send; allowed: model."),
    ],
)
def test_scales_are_of_what_clients_send(
    kind: Any, name: str, algorithm: Algorithm, given: dict[str, Any], said: str
) -> None:
    privacy = kind(noise_multiplier=0, scales={name: 2.0}, **given)
    found = refusal(algorithm, privacy, buffers=["norm.running_mean"] if given else [])
    assert said in found
    assert bool(found) == bool(said)


def test_what_changes_no_claim_is_allowed() -> None:
    callbacks = [
        AdaptivePruning(rate_mode="fixed", rate=0.5),
        FilterPruning(rate=0.5),
        MagnitudePruning(rate=0.5),
        EarlyStopping("val/loss"),
        TargetReached(0.9),
    ]
    allowed = [FedAvg(), FedProx(), FedDP(base=FedAvg()), FedAvg(exchange=OneShot())]
    assert [refusal(method, callbacks=callbacks, over_selection=1.0) for method in allowed] == [""] * len(allowed)
    assert (
        refusal(FedAvg(), SILENT, callbacks=[Quiet(), ModelCheckpoint(), EarlyStopping("val/loss"), TargetReached(0.9)])
        == ""
    )
    assert refusal(FedAvg(), callbacks=[Loud()], lightning_module=Watching()) == ""
    assert refusal(FedBN(), callbacks=callbacks[:3], over_selection=1.0) == ""
    assert refusal(Ditto(), callbacks=[EarlyStopping("val/loss_server")]) == ""
    assert refusal(FedAvg(), loss_guard=LossGuard(rounds=3, server_steps=2)) == ""
    assert refusal(FedAvg(), callbacks=[*callbacks[:3], EarlyStopping("test/loss")], hold_out=True) == ""
    costs = [EarlyStopping("comm/total_bytes"), CommunicationMeter(9)]
    assert refusal(FedAvg(), SILENT, callbacks=[*costs, EarlyStopping("time/simulated_seconds")], max_steps=5) == ""
    assert refusal(FedAvg(), LocalPrivacy(), callbacks=costs) == ""
    assert refusal(FedAvg(), LocalPrivacy(weights="samples", cap=9), selection=BySize()) == ""
    assert refusal(HeteroFL(), LOCAL, lightning_module=Normalised()) == ""
    assert refusal(HeteroFL(), LOCAL, has_server_samples=False, lightning_module=Perceptron()) == ""


def test_who_holds_out_validation_samples_is_seen_in_a_run(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(privacy=ALIKE, callbacks=[EarlyStopping("val/loss")])
    data = Arrays(train=samples(40), test=samples(10, seed=1), num_clients=6, partition=Sizes(), val_fraction=0.2)
    with pytest.raises(UserError, match="acts on val/loss, which is measured on samples that clients hold out"):
        trainer.fit(Perceptron(), data, FedAvg())


@pytest.mark.long
def test_without_privacy_nothing_is_refused() -> None:
    assert {refusal(entry.algorithm(), privacy=None) for entry in ROSTER.values()} == {""}  # type: ignore[arg-type]


class Naming(Perceptron):
    """Module that logs in training under names of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("mine", loss, on_step=True, on_epoch=True)
        self.log("train_acc", loss, on_step=False, on_epoch=True)
        return loss


class Plateau(Naming):
    """The same with a scheduler that acts on one of these values."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "mine"}}


class Monitoring(Quiet):
    """A user's callback that names what it acts on, which the end of a round calls."""

    monitor = "mine"
    num_acted = 0

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.num_acted += 1


@pytest.mark.parametrize("privacy", [ALIKE, SILENT, LocalPrivacy(noise_multiplier=0)], ids=["keep", "drop", "local"])
@pytest.mark.parametrize(
    ("module", "make", "said"),
    [
        (Naming, lambda: EarlyStopping("mine", check_on_train_epoch_end=True), "EarlyStopping acts on mine"),
        (Naming, lambda: EarlyStopping("mine_epoch", strict=False), "EarlyStopping acts on mine_epoch"),
        (Naming, lambda: ModelCheckpoint(monitor="mine"), "ModelCheckpoint acts on mine"),
        (Naming, lambda: ModelCheckpoint(monitor="mine", every_n_train_steps=1), "ModelCheckpoint acts on mine"),
        (Naming, lambda: TargetReached(1e9, "mine"), "TargetReached acts on mine"),
        (Naming, Monitoring, "Monitoring acts on mine"),
        (Plateau, Quiet, "ReduceLROnPlateau acts on mine"),
    ],
)
def test_what_acts_on_a_value_of_the_training_is_refused_when_its_name_is_known(
    privacy: Privacy, module: Any, make: Any, said: str, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    callback = make()
    trainer = make_trainer(privacy=privacy, callbacks=[callback], enable_checkpointing=True)
    sentence = f"{said}, which is logged while clients train, without noise: let it watch val/accuracy"
    with pytest.raises(UserError, match=rf"^{type(privacy).__name__} does not hold for FedAvg here: {sentence}\.$"):
        trainer.fit(module(), federation(), FedAvg())
    assert (trainer.run.round, trainer.should_stop) == (1, False)
    assert getattr(callback, "num_acted", 0) == 0
    assert not list(tmp_path.rglob("*.ckpt"))
    with pytest.raises(UserError, match=sentence):
        make_trainer(privacy=privacy, callbacks=[make()]).plan(module(), federation(), FedAvg())


def test_a_target_on_the_metric_that_is_found_in_training_is_refused(make_trainer: MakeTrainer) -> None:
    flags = {"max_rounds": 3, "limit_val_batches": 0, "callbacks": [TargetReached(0.0)]}
    trainer = make_trainer(privacy=ALIKE, **flags)
    with pytest.raises(UserError, match="TargetReached acts on train_acc, which is logged while clients train"):
        trainer.fit(Naming(), federation(), FedAvg())
    assert trainer.run.round == 1
    make_trainer(**flags).fit(Naming(), federation(), FedAvg())


@pytest.mark.parametrize("runner", ["serial", "stacked", "lightning"])
def test_values_of_the_training_that_nobody_acts_on_stay(runner: str, make_trainer: MakeTrainer) -> None:
    callbacks = [EarlyStopping("val/loss"), ModelCheckpoint(monitor="val/accuracy"), TargetReached(2.0)]
    trainer = make_trainer(privacy=ALIKE, callbacks=callbacks, runner=runner, enable_checkpointing=True)
    trainer.fit(Naming(), federation(), FedAvg())
    assert {"mine", "train_acc"} <= set(trainer.history)
    refused = make_trainer(privacy=ALIKE, callbacks=[EarlyStopping("mine_step")], runner=runner)
    with pytest.raises(UserError, match="EarlyStopping acts on mine_step, which is logged while clients train"):
        refused.fit(Naming(), federation(), FedAvg())

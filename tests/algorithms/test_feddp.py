"""Test FedDP over each of its bases: the paper's formulas, limits, bits sent, metrics, refusals."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import oracle
import pytest
import torch
from compared_runs import RUNNERS, MakeTrainer, equal_states, resumed_like_whole
from roster import problem
from torch import Tensor, nn
from toys import BATCH_SIZE, SIZES, Convolved, Perceptron, Sizes, federation, read_rows, samples, vector

from lightning_fl import FederatedTrainer, UserError
from lightning_fl.algorithms import SCAFFOLD, Algorithm, FedAvg, FedDP, FedNova, FedProx
from lightning_fl.codecs import Dense
from lightning_fl.data import Arrays
from lightning_fl.features.clock import ClientClock
from lightning_fl.gates import add_gates, gates_of
from lightning_fl.rules import Thresholded
from lightning_fl.slots import Message, Payload, RoundContext, Rule, State, Traits

BASES: dict[str, Callable[[], Algorithm]] = {
    "FedAvg": FedAvg,
    "FedProx": partial(FedProx, mu=0.5),
    "FedNova": FedNova,
    "SCAFFOLD": SCAFFOLD,
}
each_base = pytest.mark.parametrize("base", BASES)


class Convolutions(Perceptron):
    """Toy perceptron as two 1×1 convolutions: a sample is an image of one pixel and three channels."""

    def __init__(self, configure: Callable[[L.LightningModule], Any] | None = None) -> None:
        super().__init__(configure=configure)
        self.hidden, self.output = nn.Conv1d(3, 4, 1), nn.Conv1d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.unsqueeze(2)).squeeze(2)


def first_gates(keep: float = 0.5) -> np.ndarray:
    """Return the initial gates of all clients as one vector."""
    gates = add_gates(Convolutions(), keep)
    return np.concatenate([p.detach().double().numpy().ravel() for gate in gates.values() for p in gate.parameters()])


def own(trainer: FederatedTrainer) -> dict[int, np.ndarray]:
    return {client: state["personal"].double().numpy() for client, state in trainer.run.clients.items()}


@RUNNERS
@pytest.mark.parametrize(
    ("base", "mode"), [*((base, "ste") for base in BASES), ("SCAFFOLD", "multiply"), ("FedAvg", "index")]
)
def test_is_the_papers(base: str, runner: str, mode: Any, make_trainer: MakeTrainer) -> None:
    module = Convolutions(configure=lambda m: torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.01))
    mu = 0.5 if base == "FedProx" else 0.0
    # The gates are initialised in float32 and trained in float64.
    w, gates, variates = oracle.feddp(
        problem(rounds=5, epochs=2), vector(module), first_gates(), base, 0.02, mode, decay=0.01, mu=mu
    )
    trainer = make_trainer(max_rounds=5, local_epochs=2, precision="64-true", runner=runner)
    algorithm = FedDP(BASES[base](), keep=0.5, penalty=0.02, gate_mode=mode)
    trainer.fit(module, federation(), algorithm)
    np.testing.assert_allclose(vector(module), w, rtol=0, atol=1e-10)
    assert own(trainer).keys() == gates.keys()
    for client, expected in gates.items():
        np.testing.assert_allclose(own(trainer)[client], expected, rtol=0, atol=1e-10)
    for client, expected in variates.items():
        control = trainer.run.clients[client]["control"].double().numpy()
        np.testing.assert_allclose(control, expected, rtol=0, atol=1e-10)
    start = first_gates()
    assert all(np.abs(gate - start).max() > 1e-3 for gate in gates.values())


@RUNNERS
def test_masked_correction_decides_whether_closed_channels_are_corrected(
    runner: str, make_trainer: MakeTrainer
) -> None:
    """Check both readings against the oracle, and that they differ: some steps' samples close a channel together."""
    results = {}
    for corrected in (True, False):
        torch.manual_seed(0)
        module = Convolutions(configure=lambda m: torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.01))
        w, _, variates = oracle.feddp(
            problem(rounds=6, epochs=1),
            vector(module),
            first_gates(),
            "SCAFFOLD",
            0.02,
            decay=0.01,
            masked_correction=corrected,
        )
        trainer = make_trainer(max_rounds=6, precision="64-true", runner=runner)
        trainer.fit(module, federation(), FedDP(keep=0.5, penalty=0.02, masked_correction=corrected))
        np.testing.assert_allclose(vector(module), w, rtol=0, atol=1e-10)
        for client, expected in variates.items():
            control = trainer.run.clients[client]["control"].double().numpy()
            np.testing.assert_allclose(control, expected, rtol=0, atol=1e-10)
        results[corrected] = w
    assert np.abs(results[True] - results[False]).max() > 1e-4


@pytest.mark.parametrize("corrected", [True, False])
def test_a_deadline_knows_the_bits_before_the_training(corrected: bool, make_trainer: MakeTrainer) -> None:
    """Check that the expected seconds, which at this speed are those of the messages alone, tell who is late."""
    late = []
    for deadline in (1e9, 1e-9):
        clock = ClientClock(macs_per_second=1e30, uplink_sigma=1.0)
        trainer = make_trainer(clock=clock, deadline=deadline, max_rounds=1)
        trainer.fit(Convolutions(), federation(), FedDP(keep=0.5, masked_correction=corrected))
        late.append(trainer.fit_loop.rows[0]["clients/late"])
    assert late == [0, trainer.fit_loop.rows[0]["clients/selected"]]


@each_base
@RUNNERS
@pytest.mark.parametrize("options", [{"keep": 1.0}, {"variant": "threshold", "pruning_threshold": 0.0}], ids=str)
def test_without_pruning_it_is_its_base_bit_for_bit(
    base: str, runner: str, options: dict[str, Any], make_trainer: MakeTrainer
) -> None:
    plain = Convolutions()
    module = copy.deepcopy(plain)
    runs = []
    for fitted, algorithm in ((plain, BASES[base]()), (module, FedDP(BASES[base](), **options))):
        trainer = make_trainer(max_rounds=4, local_epochs=2, runner=runner)
        trainer.fit(fitted, federation(), algorithm)
        runs.append(trainer)
    if base in ("FedAvg", "FedNova") and "variant" in options and runner == "stacked":
        np.testing.assert_allclose(vector(module), vector(plain), rtol=0, atol=1e-6)
    else:
        np.testing.assert_array_equal(vector(module), vector(plain))
        assert equal_states(dict(runs[0].run.clients), dict(runs[1].run.clients))
    assert runs[0].run.ledger.state_dict() == runs[1].run.ledger.state_dict()


@dataclass(frozen=True)
class Watched(Dense):
    """Codec that records the bits sent."""

    traits = Traits.EXACT

    seen: list[tuple[str, int]] = field(default_factory=list)

    def applies_to(self, name: str) -> bool:
        return True

    def encode(self, message: Message, memory: State, context: RoundContext) -> tuple[Payload, State]:
        self.seen.extend((name, x.numel()) for name, x in message.items())
        return super().encode(message, memory, context)


@each_base
def test_gates_never_cross_and_the_bits_are_those_of_the_base(base: str, make_trainer: MakeTrainer) -> None:
    bits, crossed = [], []
    for gated in (False, True):
        plain, watched = BASES[base](), Watched()
        plain.uplink = plain.downlink = watched
        trainer = make_trainer(max_rounds=3)
        trainer.fit(Convolutions(), federation(), FedDP(plain, keep=0.5) if gated else plain)
        bits.append(trainer.run.ledger.state_dict())
        crossed.append(watched.seen)
    assert crossed[0] == crossed[1]
    assert {size for _, size in crossed[1]} <= {26, 1, 0}
    assert bits[0] == bits[1]


def test_its_base_is_scaffold_if_none_is_given(make_trainer: MakeTrainer) -> None:
    module = Convolutions()
    twin = copy.deepcopy(module)
    make_trainer(max_rounds=4).fit(module, federation(), FedDP(keep=0.5))
    trainer = make_trainer(max_rounds=4)
    trainer.fit(twin, federation(), FedDP(SCAFFOLD(), keep=0.5))
    np.testing.assert_array_equal(vector(module), vector(twin))
    assert all(state.keys() == {"control", "personal"} for state in trainer.run.clients.values())


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_resumed_equals_uninterrupted(where: str, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    method = partial(FedDP, keep=0.5)
    resumed_like_whole(make_trainer, tmp_path, Convolutions, algorithm=method, client_states=where)


@each_base
def test_order_of_clients_and_a_rejected_one(base: str, make_trainer: MakeTrainer) -> None:
    """Check that a client with an upload that is not finite counts as absent and keeps its previous gates: here none."""
    x, y = samples(sum(SIZES))
    data = federation()
    data.setup("fit")
    x[data.client_indices[3]] = torch.nan
    module = Convolutions()
    given = problem(rounds=3, cohort_size=6, absent=frozenset({3}))
    w, gates, _ = oracle.feddp(given, vector(module), first_gates(), base, mu=0.5 if base == "FedProx" else 0.0)
    trainer = make_trainer(max_rounds=3, clients_per_round=6, precision="64-true")
    trainer.fit(module, federation(train=(x, y)), FedDP(BASES[base](), keep=0.5, penalty=0.0))
    np.testing.assert_allclose(vector(module), w, rtol=0, atol=1e-10)
    assert own(trainer).keys() == gates.keys() == {0, 1, 2, 4, 5}


def accuracy(w: np.ndarray, gates: np.ndarray | None, x: Tensor, y: Tensor) -> float:
    x, y = x.double().numpy(), y.numpy()
    out = oracle.output(w, x) if gates is None else oracle.gated_forward(w, gates, x)[-1]
    return float(np.mean(out.argmax(1) == y.argmax(1)))


@pytest.mark.matrix
def test_what_is_measured(make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]) -> None:
    """Check metrics with a client's gates on all validation data, on its own part, and without gates, MACs and both costs."""
    x, y = samples(120)
    sizes = (20,) * 6

    def data() -> Arrays:
        partition, split = Sizes(sizes=sizes), {"num_clients": 6, "batch_size": BATCH_SIZE, "eval_batch_size": 7}
        return Arrays(train=(x, y), test=samples(30, seed=1), partition=partition, val_fraction=0.3, **split)

    module, split = Convolutions(), data()
    split.setup("fit")
    trainer = make_trainer(
        max_rounds=2,
        clients_per_round=2,
        precision="64-true",
        local_epochs=30,
        default_root_dir=tmp_path,
        **keeps_files,
    )
    trainer.fit(module, data(), FedDP(keep=0.5))
    w, start, metrics = vector(module), first_gates(), trainer.callback_metrics
    gates = [own(trainer).get(client, start) for client in range(6)]
    assert 2 <= len(own(trainer)) < 6
    everyone = np.concatenate(split.client_val_indices)
    gated = np.mean([accuracy(w, g, x[everyone], y[everyone]) for g in gates])
    local = np.mean([accuracy(w, g, x[rows], y[rows]) for g, rows in zip(gates, split.client_val_indices, strict=True)])
    dense = accuracy(w, None, x[everyone], y[everyone])
    assert len({gated, local, dense}) == 3
    expected = {
        "val/accuracy_gated": gated,
        "val/accuracy": gated,
        "val/accuracy_local": local,
        "val/accuracy_dense": dense,
    }
    for name, value in expected.items():
        assert float(metrics[name]) == pytest.approx(value), name
    assert float(read_rows(tmp_path)[-1]["val/accuracy_dense"]) == pytest.approx(dense)
    # 3·4 and 2·1 weights of the convolutions, and 3·4 and 4·2 of the gates.
    assert int(metrics["model/macs_gated"]) == 3 * 2 + 2 * 1 + 12 + 8
    assert int(metrics["feddp/paper_cost_bytes"]) == 4 * 26 * 2 * 2
    assert metrics["comm/total_uplink_bytes"] == 2 * 8 * 26 * 2 * 2, "actually two vectors of float64"

    for given in ({"ckpt_path": "last"}, {}):
        again = trainer.validate(module, data(), FedDP(keep=0.5), verbose=False, **given)[0]
        for name, value in expected.items():
            assert again[name] == pytest.approx(value), name
    assert gates_of(module) == {}


def test_validation_with_some_clients(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=3, clients_per_round=6)
    trainer.fit(Convolutions(), federation(), FedDP(keep=0.5, validation_clients=6))
    everyone = trainer.callback_metrics["val/loss_gated"]
    trainer = make_trainer(max_rounds=3, clients_per_round=6)
    torch.manual_seed(0)
    trainer.fit(Convolutions(), federation(), FedDP(keep=0.5, validation_clients=2))
    assert trainer.callback_metrics["val/loss_gated"] != everyone


def test_what_it_leaves_behind_has_no_gates(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    module = Convolutions()
    names = module.state_dict().keys()
    trainer = make_trainer(default_root_dir=tmp_path, **keeps_files)
    trainer.fit(module, federation(), FedDP(keep=0.5))
    assert module.state_dict().keys() == names
    assert "training_step" not in vars(module)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
    loaded = Convolutions.load_from_checkpoint(tmp_path / "model.ckpt")
    assert equal_states(dict(loaded.state_dict()), dict(module.state_dict()))
    # Rebuild a client's network.
    add_gates(module, keep=0.5)
    client, state = next(iter(trainer.run.clients.items()))
    module.load_state_dict(trainer.run.personal_layout.views(state["personal"]), strict=False)
    x, _ = samples(9)
    expected = oracle.gated_forward(vector(loaded), own(trainer)[client], x.double().numpy())[-1]
    np.testing.assert_allclose(module(x).detach().numpy(), expected, atol=1e-5)


@RUNNERS
@pytest.mark.parametrize("steps", [{"local_epochs": 3}, {"local_steps": 4}], ids=str)
def test_the_released_code_drops_small_weights_after_every_pass(
    runner: str, steps: dict[str, int], make_trainer: MakeTrainer
) -> None:
    module = Convolutions()
    given = problem(rounds=3, epochs=9)
    w, weights = vector(module), np.r_[0:12, 16:24]
    for t in range(3):
        cohort, models = given.cohort(t), []
        for k in cohort:
            y, batches_per_epoch, batches = w.copy(), -(-len(given.x[k]) // BATCH_SIZE), given.batches(t, k)
            for step in range(1, steps.get("local_steps", 3 * batches_per_epoch) + 1):
                y = y - 0.1 * oracle.gradient(y, *next(batches))
                if step % batches_per_epoch == 0:
                    y[weights] *= np.abs(y[weights]) > 0.1
            models.append(y)
        sizes = [len(given.x[k]) for k in cohort]
        w = sum(n * model for n, model in zip(sizes, models, strict=True)) / sum(sizes)
    trainer = make_trainer(max_rounds=3, precision="64-true", runner=runner, **{"local_epochs": None, **steps})
    trainer.fit(module, federation(), FedDP(FedAvg(), variant="threshold", pruning_threshold=0.1))
    np.testing.assert_allclose(vector(module), w, rtol=0, atol=1e-10)
    assert not trainer.run.clients


def test_only_the_weights_of_convolutions_are_set_to_zero(make_trainer: MakeTrainer) -> None:
    """Check a convolution and a linear layer whose weights are all below the threshold."""
    module = Convolved()
    make_trainer(max_rounds=1).fit(module, federation(), FedDP(FedAvg(), variant="threshold", pruning_threshold=1e3))
    assert not module.hidden.weight.any()
    assert module.hidden.bias.all()
    assert module.output.weight.all()


class WithToken(Convolutions):
    """Convolutions that add a parameter of three axes to their input, as transformers add positions."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.full((1, 1, 3), 0.01))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.token[0])


class TokenAlone(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.full((1, 1, 3), 0.01))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.token[0])


@RUNNERS
def test_a_parameter_with_three_axes_is_no_convolution(runner: str, make_trainer: MakeTrainer) -> None:
    method = FedDP(FedAvg(), variant="threshold", pruning_threshold=1e3)
    module = WithToken()
    make_trainer(max_rounds=1, runner=runner).fit(module, federation(), method)
    assert not module.hidden.weight.any()
    assert not module.output.weight.any()
    assert module.token.all()
    with pytest.raises(UserError, match="the network has no convolution"):
        make_trainer(max_rounds=1, runner=runner).fit(TokenAlone(), federation(), method)


@RUNNERS
@pytest.mark.parametrize(("weight", "is_kept"), [(0.25, False), (0.26, True)])
def test_a_weight_at_the_threshold_is_set_to_zero(
    weight: float, is_kept: bool, runner: str, make_trainer: MakeTrainer
) -> None:
    """Check weights that do not move, since all inputs are 0."""
    module, (x, y) = Convolved(), samples(sum(SIZES))
    nn.init.constant_(module.hidden.weight, weight)
    method = FedDP(FedAvg(), variant="threshold", pruning_threshold=0.25)
    make_trainer(max_rounds=1, runner=runner).fit(module, federation(train=(0 * x, y)), method)
    assert bool(module.hidden.weight.any()) == is_kept


def test_a_rule_around_another_is_the_other_in_all_but_its_step() -> None:
    """Check that every method of the rule is forwarded, and every property of its class but `reads_length`."""
    public = {name for name in vars(Rule) if not name.startswith("_")}
    methods = {name for name in public if callable(vars(Rule)[name])}
    assert methods <= vars(Thresholded).keys()
    other = object()
    inner = type("Other", (Rule,), dict.fromkeys(public - methods, other))()
    assert all(getattr(Thresholded(inner), name) is other for name in public - methods - {"reads_length"})
    assert Thresholded(inner).reads_length is True


def momentum(module: Any) -> Any:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda fit: FedDP(keep=0.0), ["keep", "(0, 1]", "got 0.0"]),
        (lambda fit: FedDP(keep=1.5), ["keep", "(0, 1]", "got 1.5"]),
        (lambda fit: FedDP(penalty=-0.1), ["penalty", "got -0.1"]),
        (lambda fit: FedDP(gate_mode="straight"), ["'straight'", "ste"]),  # type: ignore[arg-type]
        (lambda fit: FedDP(variant="thresholds"), ["did you mean 'threshold'"]),  # type: ignore[arg-type]
        (lambda fit: FedDP(variant="threshold", pruning_threshold=-1), ["threshold", "got -1"]),
        (lambda fit: FedDP(FedAvg(), masked_correction=False), ["for SCAFFOLD", "FedAvg does not"]),
        (lambda fit: FedDP(validation_clients=0), ["validation_clients", "got 0"]),
        (lambda fit: fit(Perceptron(), FedDP()), ["Perceptron has no convolution"]),
        (lambda fit: fit(Perceptron(), FedDP(variant="threshold")), ["no convolution"]),
        (
            lambda fit: fit(Convolutions(momentum), FedDP()),
            ["FedDP makes the clients' steps itself", "SGD with momentum 0.9", "momentum 0"],
        ),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    mistake: Callable[[Any], Any], words: list[str], make_trainer: MakeTrainer
) -> None:
    with pytest.raises(UserError) as error:
        mistake(lambda module, algorithm: make_trainer().fit(module, federation(), algorithm))
    assert [word for word in words if word not in str(error.value)] == []

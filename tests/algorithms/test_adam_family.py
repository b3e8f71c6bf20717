"""Test FedAdam and its sparse and quantised relatives: limits, states, the cost of a broadcast of changes, bad input."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from compared_runs import MakeTrainer
from lightning.pytorch import Callback
from roster import problem
from toys import SIZES, Perceptron, federation, samples, vector

from lightning_fl import FederatedTrainer, UserError
from lightning_fl.algorithms import Algorithm, EfficientAdam, FairnessTop, FedAdam, FedAdamSSM, FedAdamTop, OneBitAdam
from lightning_fl.codecs import Changes, ErrorFeedback, Followed, OneBit, Quantiser, SharedTopK, TopK
from lightning_fl.coding.top_k import positions_bits
from lightning_fl.rules import Proximal, SharedAdam, WarmedUpAdam
from lightning_fl.slots import LocalTraining, RoundContext
from lightning_fl.steps import Apply, Compress, Distillation, Moments, Momentum, MomentumInStages, WarmedUpMoments
from lightning_fl.vectors.layout import NO_LAYOUT

EPSILON = 0.01
QUANTISER = Quantiser(bits=4)


def fitted(make_trainer: MakeTrainer, algorithm: Algorithm, **flags: Any) -> FederatedTrainer:
    """Return a trainer after four rounds from one initial model."""
    torch.manual_seed(3)
    trainer = make_trainer(**{"max_rounds": 4, "local_epochs": 2, **flags})
    trainer.fit(Perceptron(), federation(), algorithm)
    return trainer


SPARSE = {
    "top": FedAdamTop,
    "ssm": FedAdamSSM,
    "ssm m": partial(FedAdamSSM, mask="first_moment"),
    "ssm v, union": partial(FedAdamSSM, mask="second_moment", downlink="union"),
    "fair": FairnessTop,
    "fair max, union": partial(FairnessTop, union="max", downlink="union"),
}


@pytest.mark.parametrize("make", SPARSE.values(), ids=SPARSE)
def test_alpha_one_is_fedadam_bit_for_bit(make: Callable[..., Algorithm], make_trainer: MakeTrainer) -> None:
    dense = fitted(make_trainer, FedAdam())
    limit = fitted(make_trainer, make(alpha=1.0))
    assert torch.equal(limit.run.params, dense.run.params)
    assert torch.equal(limit.run.server["1:Moments"]["second"], dense.run.server["1:Moments"]["second"])
    assert limit.run.ledger.bits("up") == dense.run.ledger.bits("up") == 3 * 3 * 32 * 26
    sparse = fitted(make_trainer, make(alpha=0.2))
    assert not torch.allclose(sparse.run.params, dense.run.params, atol=1e-3)


@pytest.mark.parametrize("warmup", [4, 1.0, 9])
def test_one_bit_adam_that_only_warms_up_is_fedadam_bit_for_bit(warmup: float, make_trainer: MakeTrainer) -> None:
    dense = fitted(make_trainer, FedAdam())
    limit = fitted(make_trainer, OneBitAdam(warmup=warmup))
    assert torch.equal(limit.run.params, dense.run.params)
    compressed = fitted(make_trainer, OneBitAdam(warmup=3))
    assert not torch.allclose(compressed.run.params, dense.run.params, atol=1e-3)


def test_a_warm_up_as_a_fraction_is_that_of_the_run(make_trainer: MakeTrainer) -> None:
    by_count, by_fraction = (fitted(make_trainer, OneBitAdam(warmup=w, epsilon=EPSILON)) for w in (2, 0.5))
    assert torch.equal(by_count.run.params, by_fraction.run.params)


def test_efficient_adam_with_32_bits_averages_the_models_of_local_adam(make_trainer: MakeTrainer) -> None:
    module = Perceptron()
    expected = oracle.efficient_adam(problem(rounds=4), vector(module), compress=lambda z: z, eps=EPSILON)
    make_trainer(max_rounds=4, precision="64-true").fit(module, federation(), EfficientAdam(bits=32, epsilon=EPSILON))
    np.testing.assert_allclose(vector(module), expected, rtol=0, atol=1e-10)


def test_coordinates_without_a_gradient_stay_where_they_are(make_trainer: MakeTrainer) -> None:
    moved = {}
    for masked in (True, False):
        torch.manual_seed(0)
        module = Perceptron()
        with torch.no_grad():
            module.output.weight[:, 0] = 0  # the first hidden unit gets no gradient in the first step …
            module.hidden.weight[0] = 0
            module.hidden.bias[0] = 0  # … and its output is 0
        before = copy.deepcopy(module)
        algorithm = OneBitAdam(warmup=1, momentum_mask=masked, epsilon=EPSILON)
        make_trainer(max_rounds=4).fit(module, federation(), algorithm)
        moved[masked] = not torch.equal(module.hidden.weight[0], before.hidden.weight[0])
    assert moved == {True: False, False: True}


@pytest.mark.parametrize("runner", ["serial", "stacked"])
def test_second_moments_above_one_scale_as_those_below(runner: str, make_trainer: MakeTrainer) -> None:
    """Check targets 128 times as large, a factor that rounds nothing, against the oracle."""
    x, y = samples(sum(SIZES))
    given = problem(rounds=4)
    given.y[:] = [128 * each for each in given.y]
    module = Perceptron()
    expected = oracle.one_bit_adam(given, vector(module), warmup=1, eps=EPSILON)
    trainer = make_trainer(max_rounds=4, precision="64-true", runner=runner)
    trainer.fit(module, federation(train=(x, 128 * y)), OneBitAdam(warmup=1, epsilon=EPSILON))
    assert (trainer.run.server["0:WarmedUpMoments"]["second"] > 1).any()
    np.testing.assert_allclose(vector(module), expected, rtol=0, atol=1e-10)


def test_a_client_without_a_step_sends_no_momentum() -> None:
    """Check a client alone, and in a stack beside one with a step."""
    context, path = RoundContext(NO_LAYOUT, NO_LAYOUT, num_clients=2), torch.tensor([[0.0, 0.0, 0.0], [0.2, 0.4, -0.2]])
    for rates, paths in ((0.0, path[0]), (torch.tensor([[0.0], [0.1]]), path)):
        local = LocalTraining(context, {}, torch.zeros_like(paths), torch.zeros_like(paths), lambda: None)
        local.memory, local.sum_learning_rate = {"scale": torch.ones_like(paths), "path": paths}, rates
        sent = WarmedUpAdam().finish(local)
        torch.testing.assert_close(sent["moments/momentum"], 10 * paths)
        torch.testing.assert_close(sent["scalars/learning_rate"].flatten(), torch.as_tensor(rates).flatten())


def test_the_second_moment_never_becomes_negative(make_trainer: MakeTrainer) -> None:
    counts = []

    class Watch(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            assert (trainer.run.server["1:Moments"]["second"] >= 0).all()
            counts.append(int(trainer.callback_metrics["moments/clamped"]))

    for mask in ("parameters", "first_moment", "second_moment"):
        fitted(make_trainer, FedAdamSSM(alpha=0.3, beta2=0.5, mask=mask), callbacks=Watch())
    assert len(counts) == 12


class Broadcasts(Callback):
    """Callback that records the server's state at the start of each round and the cost of its broadcast."""

    def __init__(self) -> None:
        self.held: list[list[torch.Tensor]] = []
        self.bits: list[int] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        moments = trainer.run.server["1:Moments"]
        self.held.append([trainer.run.params.clone(), moments["first"].clone(), moments["second"].clone()])

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.bits.append(int(trainer.callback_metrics["comm/downlink_bits"]))


@pytest.mark.parametrize("make", [FedAdamSSM, FedAdamTop, FairnessTop])
def test_the_union_downlink_costs_what_changed_and_changes_nothing(
    make: Callable[..., Algorithm], make_trainer: MakeTrainer
) -> None:
    dense = fitted(make_trainer, make(alpha=0.05))
    seen = Broadcasts()
    union = fitted(make_trainer, make(alpha=0.05, downlink="union"), callbacks=seen)
    assert torch.equal(union.run.params, dense.run.params)
    expected = [3 * 26 * 32]
    for before, after in zip(seen.held, seen.held[1:], strict=False):
        changed = torch.stack([x != y for x, y in zip(before, after, strict=True)]).any(0)
        u = int(changed.sum())
        assert u <= 3 * 3, "one coordinate of each vector from each of three clients"
        expected.append(min(3 * u * 32 + positions_bits(u, 26), 3 * 26 * 32))
    assert seen.bits == [6 * bits for bits in expected], "all six clients must receive it"
    assert max(expected[1:]) < expected[0]


def test_any_codec_serves_any_method(make_trainer: MakeTrainer) -> None:
    """Compare FedAvg, with top-k and error feedback up and quantised with error feedback down, with the plain loop."""
    module = Perceptron()
    w = vector(module)
    errors: dict[int, np.ndarray] = {}
    e_server: np.ndarray = np.zeros(26)
    task = problem(rounds=5)
    for t in range(5):
        cohort = task.cohort(t)
        total = sum(len(task.x[k]) for k in cohort)
        y = e_server.copy()
        for k in cohort:
            z = oracle.sgd(w, task.batches(t, k), task.learning_rate) - w + errors.get(k, 0)
            sent = np.zeros(26)
            sent[oracle.largest(z, 5)] = z[oracle.largest(z, 5)]
            errors[k] = z - sent
            y += len(task.x[k]) / total * sent
        down = oracle.quantise(y, oracle.uniform_levels(4), (slice(0, 26),))
        w, e_server = w + down, y - down
    quantiser = Quantiser("uniform", 4, "global")
    algorithm = Algorithm(
        uplink=ErrorFeedback(TopK(0.2)), downlink=Followed(quantiser), steps=(Apply(), Compress(quantiser))
    )
    trainer = make_trainer(max_rounds=5, precision="64-true")
    trainer.fit(module, federation(), algorithm)
    np.testing.assert_allclose(vector(module), w, rtol=0, atol=1e-10)
    assert trainer.run.ledger.bits("up") == 3 * (5 * 64 + min(26, 5 * 5))
    assert trainer.run.ledger.bits("down") == 6 * (4 * 26 + 64)


@pytest.mark.parametrize(
    "codec", [TopK(0.2), ErrorFeedback(SharedTopK(0.2)), ErrorFeedback(OneBit("l1")), Quantiser(bits=6)]
)
def test_other_rules_and_steps_take_them_too(codec: Any, make_trainer: MakeTrainer) -> None:
    algorithm = Algorithm(rule=Proximal(0.1), uplink=codec, steps=(Apply(), Momentum(0.5)))
    trainer = fitted(make_trainer, algorithm)
    assert 0 < trainer.run.ledger.bits("up") < 3 * 26 * 32
    assert torch.isfinite(trainer.run.params).all()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FedAdamTop(alpha=0), ["alpha", "(0, 1]", "got 0"]),
        (lambda: FedAdamSSM(alpha=1.5), ["alpha", "(0, 1]", "1.5"]),
        (lambda: FairnessTop(alpha=float("nan")), ["alpha", "nan"]),
        (lambda: FedAdamSSM(mask="first_momnt"), ["'first_momnt'", "did you mean 'first_moment'"]),  # type: ignore[arg-type]
        (lambda: FairnessTop(union="mx"), ["'mx'", "did you mean 'max'"]),  # type: ignore[arg-type]
        (lambda: FedAdamSSM(downlink="unions"), ["'unions'", "did you mean 'union'"]),  # type: ignore[arg-type]
        (lambda: FedAdamSSM(index_bits="exakt"), ["'exakt'", "did you mean 'exact'"]),  # type: ignore[arg-type]
        (lambda: FedAdam(weighting="sample"), ["'sample'", "did you mean 'samples'"]),  # type: ignore[arg-type]
        (lambda: FedAdam(beta1=1.0), ["beta1", "[0, 1)", "1.0"]),
        (lambda: FedAdam(beta2=-0.1), ["beta2", "-0.1"]),
        (lambda: FedAdam(epsilon=0), ["epsilon", "positive", "got 0"]),
        (lambda: OneBitAdam(scale="l22"), ["'l22'", "did you mean 'l2'"]),  # type: ignore[arg-type]
        (lambda: OneBitAdam(groups="tensors"), ["'tensors'", "did you mean 'tensor'"]),  # type: ignore[arg-type]
        (lambda: OneBitAdam(warmup=0), ["warmup", "at least 1", "got 0"]),
        (lambda: OneBitAdam(warmup=1.2), ["warmup", "(0, 1]", "1.2"]),
        (lambda: EfficientAdam(quantiser="logs"), ["'logs'", "did you mean 'log'"]),  # type: ignore[arg-type]
        (lambda: EfficientAdam(bits=1), ["bits", "from 2 to 32", "got 1"]),
        (lambda: EfficientAdam(bits=33), ["bits", "got 33"]),
        (
            lambda: Algorithm(uplink=SharedTopK(leader="moments/first")),
            ["SharedTopK", "'moments/first'", "LocalOptimizer"],
        ),
        (lambda: Algorithm(downlink=TopK(0.1)), ["TopK", "whole model", "Compress(TopK"]),
    ],
)
def test_bad_input_is_refused_in_a_sentence(make: Callable[[], Algorithm], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        make()
    assert [word for word in words if word not in str(error.value)] == []


@pytest.mark.parametrize("algorithm", [FedAdamSSM(), OneBitAdam(), EfficientAdam()], ids=lambda a: a.name)
def test_the_module_must_have_plain_sgd(algorithm: Algorithm, make_trainer: MakeTrainer) -> None:
    module = Perceptron(configure=lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9))
    with pytest.raises(UserError, match=rf"{algorithm.name} makes the clients' steps itself.*SGD with momentum 0.9"):
        make_trainer().fit(module, federation(), algorithm)


def test_a_warm_up_longer_than_the_run_is_worth_a_warning(make_trainer: MakeTrainer) -> None:
    with pytest.warns(UserWarning, match="takes 5 rounds and the run has 2: nothing will be compressed"):
        make_trainer(max_rounds=2).fit(Perceptron(), federation(), OneBitAdam(warmup=5))


def test_one_bit_adam_goes_on_compressing_when_the_run_is_made_longer(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    """Check that the warm-up is a fraction of the planned run: one of 4 rounds; it would be eight of 40."""
    for rounds in (4, 6):
        flags = {"max_rounds": 4 if rounds == 4 else 40, "default_root_dir": tmp_path, **keeps_files}
        stop = [] if rounds == 4 else [StopAfter(rounds)]
        trainer = make_trainer(**flags, callbacks=stop)
        trainer.fit(Perceptron(), federation(), OneBitAdam(), ckpt_path=None if rounds == 4 else "last")
    assert trainer.run.round == 6
    assert trainer.run.ledger.round_bits["up"]["model"] == 0, "the model is no longer sent up"


class StopAfter(Callback):
    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.should_stop = trainer.current_epoch + 1 >= self.rounds


@pytest.mark.parametrize(
    ("slots", "words"),
    [
        ({"downlink": Followed(QUANTISER)}, ["Followed", "last step must be Compress"]),
        ({"downlink": Followed(QUANTISER), "steps": (Apply(), Compress(Quantiser(bits=2)))}, ["same codec"]),
        ({"downlink": Followed(QUANTISER), "steps": (Apply(), Compress(QUANTISER), Momentum())}, ["last step"]),
        (
            {
                "rule": SharedAdam(),
                "downlink": Followed(QUANTISER),
                "steps": (Apply(), Moments(), Compress(QUANTISER)),
            },
            ["no other step may share"],
        ),
        ({"uplink": Followed(QUANTISER)}, ["fits the downlink only"]),
        ({"uplink": Changes()}, ["fits the downlink only"]),
        ({"steps": (Apply(), Distillation())}, ["each client's model", "WeightedMean"]),
        ({"rule": SharedAdam(), "steps": (WarmedUpMoments(QUANTISER),)}, ["moments/momentum"]),
    ],
    ids=["no carrier", "another codec", "not last", "moments", "followed up", "changes up", "members", "warm-up"],
)
def test_slots_that_would_miscount_or_fail_are_refused(slots: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        Algorithm(**slots)
    assert [word for word in words if word not in str(caught.value)] == [], caught.value


def test_compress_takes_codecs_of_one_vector() -> None:
    with pytest.raises(UserError, match="SharedTopK needs model"):
        Compress(SharedTopK(0.1))


@pytest.mark.parametrize("stages", [("Apply",), (Apply(), Moments())], ids=["a name", "a step with state"])
def test_stages_are_plain_steps(stages: Any) -> None:
    with pytest.raises(UserError, match="stage"):
        MomentumInStages(stages=stages, momentum=Momentum())


def ended(module: Any) -> Any:
    """Return SGD whose learning rate is 0 from the second round on."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: float(epoch == 0))]


def test_one_bit_adam_stands_still_at_a_learning_rate_of_zero(make_trainer: MakeTrainer) -> None:
    models, start = {}, Perceptron(configure=ended)
    for rounds in (1, 3):
        module = copy.deepcopy(start)
        make_trainer(max_rounds=rounds).fit(module, federation(), OneBitAdam(warmup=1))
        models[rounds] = vector(module)
    assert np.isfinite(models[3]).all()
    np.testing.assert_array_equal(models[1], models[3])


@pytest.mark.parametrize("runner", ["serial", "stacked"])
def test_one_bit_adam_steps_at_the_learning_rates_of_groups(runner: Any, make_trainer: MakeTrainer) -> None:
    """Check that a group with a learning rate of 0 keeps its numbers, and that the other moves."""
    module = Perceptron(
        configure=lambda m: torch.optim.SGD(
            [{"params": m.hidden.parameters(), "lr": 0.0}, {"params": m.output.parameters(), "lr": 0.1}]
        )
    )
    start = vector(module)
    make_trainer(max_rounds=3, local_epochs=2, runner=runner).fit(module, federation(), OneBitAdam(warmup=1))
    moved = vector(module) != start
    assert not moved[:16].any()
    assert moved[16:].all()

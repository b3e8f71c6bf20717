"""Test the methods in the limits of their hyper-parameters, and the composition of parts."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import oracle
import pytest
from compared_runs import MakeTrainer
from roster import problem
from torch.optim import SGD, Adagrad
from toys import Perceptron, Served, federation, vector

from lightning_fl import UserError
from lightning_fl.aggregators import KeepUploads, MaskedMean, WeightedMean
from lightning_fl.algorithms import (
    Algorithm,
    DeviceM,
    FedAvg,
    FedDA,
    FedDU,
    FedDUDA,
    FedDUDM,
    FedDUM,
    FedDUS,
    FedDUSM,
    FedOpt,
    FedProx,
    ServerAdagrad,
    ServerAdam,
    ServerM,
    ServerYogi,
)
from lightning_fl.codecs import TopK
from lightning_fl.rules import LocalOptimizer, Proximal, RestartedMomentum
from lightning_fl.slots import Gradients, Rule, ServerTurn, State, Step
from lightning_fl.steps import Apply, Compress, Distillation, Moments, Momentum, MomentumInStages, ServerOptimizer, Yogi


@pytest.mark.parametrize(
    ("limit", "same"),
    [
        (FedProx(mu=0), FedAvg()),
        (ServerM(beta=0), FedAvg()),
        (DeviceM(local_beta=0), FedAvg()),
        (FedDU(C=0), FedAvg()),
        (FedDUS(tau_eff=0), FedAvg()),
        (FedDA(beta=0), FedAvg()),
        (FedDA(beta=0, variant="frozen"), FedAvg()),
        (DeviceM(local_beta=0, variant="mime_lite"), FedAvg()),
        (FedDUDA(C=0, beta=0.7), FedDA(beta=0.7)),
        (FedDUDA(beta=0), FedDU()),
        (FedDUM(C=0, beta=0, local_beta=0), FedAvg()),
        (FedDUM(beta=0, local_beta=0), FedDU()),
        (FedDUM(beta=0, local_beta=0, two_stage=True), FedDU()),
        (FedDUSM(beta=0), FedDU()),
        (FedDUDM(local_beta=0), FedDU()),
        (FedDUM(beta=0.7, local_beta=0), FedDUSM(beta=0.7)),
        (FedDUM(beta=0, local_beta=0.7), FedDUDM(local_beta=0.7)),
        (FedDUSM(beta=0.7, C=0), ServerM(beta=0.7)),
        (FedDUDM(local_beta=0.7, C=0), DeviceM(local_beta=0.7)),
        (FedOpt(partial(SGD, lr=1.0)), FedAvg()),
        (
            FedOpt(partial(SGD, lr=0.7, momentum=0.6)),
            ServerM(beta=0.6, server_learning_rate=0.7, dampening=False),
        ),
        (
            FedOpt(partial(SGD, lr=0.7, momentum=0.6, dampening=0.6)),
            ServerM(beta=0.6, server_learning_rate=0.7, momentum_init="first"),
        ),
        (
            FedOpt(partial(Adagrad, lr=0.02, eps=1e-2, initial_accumulator_value=1e-4)),
            ServerAdagrad(learning_rate=0.02, tau=1e-2),
        ),
        (
            ServerYogi(learning_rate=0.02, beta1=0.6),
            ServerM(beta=0.6, server_learning_rate=0.02, variant="yogi"),
        ),
    ],
    ids=lambda algorithm: algorithm.name,
)
def test_is_another_method_in_the_limit(limit: Algorithm, same: Algorithm, make_trainer: MakeTrainer) -> None:
    one = Perceptron()
    other = copy.deepcopy(one)
    make_trainer(max_rounds=4, local_epochs=2).fit(one, Served(9), limit)
    make_trainer(max_rounds=4, local_epochs=2).fit(other, Served(9), same)
    np.testing.assert_allclose(vector(one), vector(other), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "algorithm", [FedProx(mu=0.5), ServerM(beta=0.5), DeviceM(local_beta=0.5)], ids=lambda algorithm: algorithm.name
)
def test_is_not_fedavg_away_from_the_limit(algorithm: Algorithm, make_trainer: MakeTrainer) -> None:
    average = Perceptron()
    other = copy.deepcopy(average)
    make_trainer(local_epochs=2).fit(average, federation(), FedAvg())
    make_trainer(local_epochs=2).fit(other, federation(), algorithm)
    assert np.abs(vector(other) - vector(average)).max() > 1e-4


@pytest.mark.parametrize(
    ("rule", "local"),
    [(Proximal(mu=0.5), oracle.proximal_sgd(0.5)), (RestartedMomentum(beta=0.7), oracle.momentum_sgd(0.7))],
    ids=["proximal", "restarted momentum"],
)
def test_any_rule_composes_with_server_momentum(rule: Rule, local: oracle.Local, make_trainer: MakeTrainer) -> None:
    module = Perceptron()
    expected = oracle.server_momentum(problem(rounds=4, epochs=2), vector(module), beta=0.4, eta=1.3, local=local)
    algorithm = Algorithm(rule=rule, steps=(Apply(), Momentum(beta=0.4, learning_rate=1.3)))
    make_trainer(max_rounds=4, local_epochs=2, precision="64-true").fit(module, federation(), algorithm)
    np.testing.assert_allclose(vector(module), expected, rtol=0, atol=1e-10)


def test_a_chain_may_hold_one_step_twice(make_trainer: MakeTrainer) -> None:
    module = Perceptron()
    start = vector(module)
    algorithm = Algorithm(steps=(Apply(), Momentum(beta=0.5), Momentum(beta=0.2)))
    make_trainer(max_rounds=2, precision="64-true").fit(module, federation(), algorithm)
    w, inner, outer = start, np.zeros(26), np.zeros(26)
    for t in range(2):
        delta = oracle.average(problem(rounds=2), t, w, oracle.sgd) - w
        inner = 0.5 * inner + 0.5 * delta
        outer = 0.2 * outer + 0.8 * inner
        w = w + outer
    np.testing.assert_allclose(vector(module), w, rtol=0, atol=1e-10)


@dataclass(frozen=True)
class NeedsControl(Rule):
    """Rule whose inputs no other part sends."""

    needs = frozenset({"moments/control", "moments/second"})


@dataclass(frozen=True)
class NeedsDivergence(Step):
    """Step whose input no other part sends."""

    needs = frozenset({"scalars/divergence"})

    def __call__(self, turn: ServerTurn, state: State) -> State:
        return state


@dataclass(frozen=True)
class SharesControl(NeedsDivergence):
    """Step that sends half of the inputs of `NeedsControl`."""

    provides = frozenset({"moments/control"})


def test_all_parts_that_do_not_fit_are_reported_at_once() -> None:
    with pytest.raises(UserError) as error:
        Algorithm(rule=NeedsControl(), steps=(Apply(), SharesControl()))
    sentence = str(error.value)
    for named in ("'moments/second'", "NeedsControl", "'scalars/divergence'"):
        assert named in sentence
    assert "'moments/control'" not in sentence
    with pytest.raises(UserError) as error:
        Algorithm(rule=NeedsControl(), steps=())
    assert "no server step" in str(error.value)
    assert "'moments/control', 'moments/second'" in str(error.value)


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (lambda: FedProx(mu=-0.1), "-0.1"),
        (lambda: FedProx(mu=float("nan")), "nan"),
        (lambda: ServerM(beta=1.0), "1.0"),
        (lambda: ServerM(beta=-0.5), "-0.5"),
        (lambda: ServerM(server_learning_rate=0.0), "0.0"),
        (lambda: ServerM(momentum_init="second"), "'second'"),  # type: ignore[arg-type]
        (lambda: DeviceM(local_beta=1.5), "1.5"),
        (lambda: DeviceM(variant="mime_light"), "did you mean 'mime_lite'"),  # type: ignore[arg-type]
        (lambda: ServerM(variant="yogy"), "did you mean 'yogi'"),  # type: ignore[arg-type]
        (lambda: ServerM(variant="yogi", dampening=False), "dampening"),
        (lambda: FedDA(beta=1.0), "1.0"),
        (lambda: FedDA(variant="froze"), "did you mean 'frozen'"),  # type: ignore[arg-type]
        (lambda: FedDU(C=-1.0), "-1.0"),
        (lambda: FedDU(decay=0.0), "0.0"),
        (lambda: FedDU(decay=1.01), "1.01"),
        (lambda: FedDU(f="one-minus"), "did you mean 'one_minus'"),  # type: ignore[arg-type]
        (lambda: FedDU(alpha_max=-0.5), "-0.5"),
        (lambda: FedDUS(tau_eff=-1), "-1"),
        (lambda: FedDUS(tau_eff="all"), "'all'"),  # type: ignore[arg-type]
        (lambda: FedDUM(beta=1.0), "1.0"),
        (lambda: FedDUM(local_beta=-0.1), "-0.1"),
        (lambda: ServerAdagrad(learning_rate=0.0), "0.0"),
        (lambda: ServerAdam(beta2=1.0), "1.0"),
        (lambda: ServerYogi(tau=-1e-3), "-0.001"),
        (lambda: FedOpt(weighting="sample"), "did you mean 'samples'"),  # type: ignore[arg-type]
    ],
)
def test_hyper_parameters_outside_their_range_are_refused(make: Callable[[], Algorithm], given: str) -> None:
    with pytest.raises(UserError, match=given):
        make()


def test_rules_say_whether_they_need_the_gradient() -> None:
    assert not LocalOptimizer().reads
    assert Proximal().reads is Gradients.MINIBATCH
    assert RestartedMomentum().own_step


@pytest.mark.parametrize(
    "steps",
    [
        [Momentum()],
        [Yogi(), Momentum()],
        [ServerOptimizer(SGD)],
        [Compress(codec=TopK(0.5))],
        [MomentumInStages(stages=(), momentum=Momentum())],
    ],
    ids=lambda steps: " ".join(type(step).__name__ for step in steps),
)
def test_a_chain_that_proposes_nothing_is_refused(steps: list[Step]) -> None:
    with pytest.raises(UserError, match=rf"no step of {type(steps[0]).__name__}.* would never learn: begin with Apply"):
        Algorithm(steps=steps)


def test_a_chain_of_stages_needs_what_its_stages_need() -> None:
    stages = MomentumInStages(stages=(Apply(), Distillation()), momentum=Momentum())
    with pytest.raises(UserError, match="each client's model, which WeightedMean does not keep"):
        Algorithm(steps=[stages])
    Algorithm(steps=[stages], aggregator=KeepUploads(WeightedMean()))
    with pytest.raises(UserError, match="must not keep or share state, but Moments does"):
        MomentumInStages(stages=(Apply(), Moments()), momentum=Momentum())


def test_to_a_mean_over_those_that_sent_a_codecs_gaps_are_no_change(make_trainer: MakeTrainer) -> None:
    """Check an exchange that sends all coordinates: none counts as unsent, although the codec omits some."""
    one = Perceptron()
    other = copy.deepcopy(one)
    make_trainer(max_rounds=3).fit(one, federation(), Algorithm(uplink=TopK(0.3), aggregator=MaskedMean()))
    make_trainer(max_rounds=3).fit(other, federation(), Algorithm(uplink=TopK(0.3), aggregator=WeightedMean()))
    np.testing.assert_allclose(vector(one), vector(other), rtol=0, atol=1e-7)

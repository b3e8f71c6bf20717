"""Test SCAFFOLD: limits, client states, learning rates that change or differ, refusals."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from compared_runs import MakeTrainer
from lightning.pytorch import Callback
from roster import problem
from torch import Tensor, nn
from toys import SIZES, Perceptron, federation, samples, vector

from lightning_fl import FederatedTrainer, UserError
from lightning_fl.algorithms import SCAFFOLD, Algorithm, FedAvg
from lightning_fl.exchanges import DrawnLayers
from lightning_fl.rules import ControlVariates
from lightning_fl.steps import Apply, ControlUpdate

N = len(SIZES)


def after(make_trainer: MakeTrainer, algorithm: Algorithm, sizes: tuple[int, ...] = SIZES, **flags: Any) -> np.ndarray:
    """Return the final model of a run from the test's seed."""
    torch.manual_seed(3)
    module = Perceptron()
    make_trainer(**{"local_epochs": 2, **flags}).fit(module, federation(sizes), algorithm)
    return vector(module)


def control(trainer: FederatedTrainer) -> Tensor:
    return trainer.run.server["1:ControlUpdate"]["control"]


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_a_federation_of_one_is_fedavg(weighting: Any, make_trainer: MakeTrainer) -> None:
    flags = {"sizes": (11,), "max_rounds": 8, "clients_per_round": 1}
    one = after(make_trainer, SCAFFOLD(weighting), **flags)
    np.testing.assert_allclose(one, after(make_trainer, FedAvg(), **flags), rtol=0, atol=1e-6)


def test_the_first_round_is_fedavg_and_no_other(make_trainer: MakeTrainer) -> None:
    apart = []
    for rounds in (1, 2):
        flags = {"max_rounds": rounds, "precision": "64-true"}
        apart.append(np.abs(after(make_trainer, SCAFFOLD(), **flags) - after(make_trainer, FedAvg(), **flags)).max())
    assert apart[0] < 1e-12
    assert apart[1] > 1e-4


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_the_servers_variate_is_the_mean_of_the_clients(weighting: Any, make_trainer: MakeTrainer) -> None:
    gaps = []

    class Watch(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            mean = torch.stack([state["control"] for state in trainer.run.clients.values()]).mean(0)
            gaps.append(float((control(trainer) - mean).abs().max()))
            assert float(mean.abs().max()) > 0.01

    after(make_trainer, SCAFFOLD(weighting), max_rounds=20, clients_per_round=N, callbacks=Watch())
    assert len(gaps) == 20
    assert max(gaps) < 1e-6


def test_those_who_take_part_change_their_variate_and_no_one_else(make_trainer: MakeTrainer) -> None:
    """Test drop-outs too: a client that received the model but sent no upload keeps its variate."""
    kept: list[dict[int, Tensor]] = [{}]
    uploads: list[set[int]] = []

    class Watch(Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            uploads.append(set())

        def on_client_upload(self, trainer: Any, module: Any, client: int, place: int, total: int) -> None:
            uploads[-1].add(client)

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            kept.append({client: state["control"].clone() for client, state in trainer.run.clients.items()})

    flags = {"max_rounds": 6, "clients_per_round": 4, "dropout_rate": 0.3, "callbacks": Watch()}
    after(make_trainer, SCAFFOLD(), **flags)
    for before, now, present in zip(kept[:-1], kept[1:], uploads, strict=True):
        assert now.keys() == before.keys() | present
        changed = {k for k in now if k not in before or not torch.equal(now[k], before[k])}
        assert changed == present
    assert 0 < sum(map(len, uploads)) < 6 * 4


def test_variates_are_those_of_the_paper(make_trainer: MakeTrainer) -> None:
    module, expected = Perceptron(), {}
    oracle.scaffold(problem(rounds=6), vector(module), controls=expected)
    trainer = make_trainer(max_rounds=6, precision="64-true")
    trainer.fit(module, federation(), SCAFFOLD())
    np.testing.assert_allclose(control(trainer).numpy(), expected.pop(-1), rtol=0, atol=1e-10)
    assert trainer.run.clients.keys() == expected.keys()
    for client, variate in expected.items():
        np.testing.assert_allclose(trainer.run.clients[client]["control"].numpy(), variate, rtol=0, atol=1e-10)


class Poisoned(Perceptron):
    """Perceptron whose loss is NaN on samples with a first feature beyond 100, once `poisonous`."""

    poisonous = False

    def loss(self, batch: Any) -> Tensor:
        poison = torch.where((batch[0][:, 0].max() > 100) & self.poisonous, torch.nan, 1.0)
        return super().loss((batch[0].clamp(max=100), batch[1])) * poison


def test_a_rejected_client_keeps_its_variate_and_does_not_count(make_trainer: MakeTrainer) -> None:
    x, y = samples(sum(SIZES))
    data = federation()
    data.setup("fit")
    x[data.client_indices[3][0]] = 1000.0
    kept = []

    class Watch(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            kept.append({client: state["control"].clone() for client, state in trainer.run.clients.items()})
            pl_module.poisonous = True

    trainer = make_trainer(max_rounds=3, clients_per_round=N, callbacks=Watch())
    trainer.fit(Poisoned(), federation(train=(x, y)), SCAFFOLD())
    assert [k for k in kept[0] if torch.equal(kept[0][k], kept[2][k])] == [3]
    # c is the mean of all N, including the rejected client with its old c_k.
    torch.testing.assert_close(control(trainer), torch.stack(list(kept[2].values())).mean(0), rtol=0, atol=1e-6)


def shrinking(module: Any) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8), "interval": "step"}]


@pytest.mark.parametrize("runner", ["serial", "stacked"])
def test_schedules_inside_a_round_divide_by_the_sum_of_the_rates(runner: str, make_trainer: MakeTrainer) -> None:
    module, expected = Perceptron(configure=shrinking), {}
    w = oracle.scaffold(
        problem(rounds=4, epochs=2), vector(module), controls=expected, eta=lambda step: 0.1 * 0.8**step
    )
    trainer = make_trainer(max_rounds=4, local_epochs=2, precision="64-true", runner=runner)
    trainer.fit(module, federation(), SCAFFOLD())
    np.testing.assert_allclose(vector(module), w, rtol=0, atol=1e-10)
    np.testing.assert_allclose(control(trainer).numpy(), expected[-1], rtol=0, atol=1e-10)


class Groups(Perceptron):
    """Perceptron with two learning rates, an unused layer, and weight decay on one group."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 3)

    def configure_optimizers(self) -> Any:
        hidden = {"params": self.hidden.parameters(), "lr": 0.05, "weight_decay": 0.3}
        return torch.optim.SGD([hidden, {"params": [*self.output.parameters(), *self.unused.parameters()]}], lr=0.2)


@pytest.mark.parametrize("runner", ["serial", "stacked"])
def test_each_coordinate_divides_by_its_own_rates(runner: str, make_trainer: MakeTrainer) -> None:
    """Check after one step that c_k⁺ is the mean gradient with weight decay; parameters without a gradient keep c_k = 0."""
    module = Groups()
    start, twin = vector(module), copy.deepcopy(module)
    x, y = samples(4)
    twin.loss((x, y)).backward()
    gradient = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in twin.parameters()])
    gradient[:16] += 0.3 * torch.tensor(start[:16])
    trainer = make_trainer(max_rounds=1, clients_per_round=1, precision="64-true", runner=runner)
    trainer.fit(module, federation(sizes=(4,)), SCAFFOLD())
    np.testing.assert_allclose(trainer.run.clients[0]["control"].numpy(), gradient.numpy(), rtol=0, atol=1e-6)
    assert trainer.run.clients[0]["control"][26:].abs().max() == 0
    np.testing.assert_array_equal(vector(module)[26:], start[26:])


def test_momentum_is_refused_with_the_reason(make_trainer: MakeTrainer) -> None:
    module = Perceptron(configure=lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9))
    with pytest.raises(UserError, match=r"SCAFFOLD makes the clients' steps itself.*SGD with momentum 0.9.*momentum 0"):
        make_trainer().fit(module, federation(), SCAFFOLD())


def test_an_exchange_of_parts_is_refused() -> None:
    with pytest.raises(UserError, match=r"ControlVariates keep .* DrawnLayers sends parts, use OneShot"):
        Algorithm(rule=ControlVariates(), exchange=DrawnLayers(n=1), steps=(Apply(), ControlUpdate()))


def test_the_parts_put_together_by_hand_are_scaffold(make_trainer: MakeTrainer) -> None:
    parts = Algorithm(rule=ControlVariates(), steps=(Apply(), ControlUpdate()))
    np.testing.assert_array_equal(
        after(make_trainer, parts, max_rounds=4), after(make_trainer, SCAFFOLD(), max_rounds=4)
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SCAFFOLD(weighting="sample"), ["'sample'", "did you mean 'samples'"]),  # type: ignore[arg-type]
        (lambda: SCAFFOLD(server_learning_rate=0), ["server learning rate", "positive", "got 0"]),
        (lambda: SCAFFOLD(server_learning_rate=float("nan")), ["server learning rate", "nan"]),
        (lambda: Algorithm(rule=ControlVariates()), ["ControlVariates needs 'moments/control'", "no step shares"]),
        (lambda: Algorithm(steps=(Apply(), ControlUpdate())), ["'moments/control'", "LocalOptimizer does not send"]),
    ],
)
def test_bad_input_is_refused_in_a_sentence(make: Callable[[], Algorithm], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        make()
    assert [word for word in words if word not in str(error.value)] == []

"""Test unstructured pruning in a federation: masked numbers are 0 everywhere and never sent, with any method."""

from collections.abc import Callable
from typing import Any

import numpy as np
import oracle
import pytest
import torch
import toys
from compared_runs import MakeTrainer
from lightning.pytorch import Callback
from roster import ROSTER, WHOLE, problem
from toys import Normalised, Perceptron, federation, vector

from lightning_fl import UserError
from lightning_fl.algorithms import IMC, FedAvg, FedBuff, FedDUM, FedLDF
from lightning_fl.callbacks import MagnitudePruning
from lightning_fl.callbacks.pruning.adaptive_rate import AdaptiveRate
from lightning_fl.codecs import Changes
from lightning_fl.features.clock import ClientClock

each_dense_algorithm = pytest.mark.parametrize(
    "name", [name for name in WHOLE if not name.startswith(("IMC", "PruneFL"))]
)


class Watch(Callback):
    """Callback that records the bits of each round, and all numbers of the run that are not 0 outside the mask."""

    def __init__(self) -> None:
        self.bits: list[dict[str, dict[str, int]]] = []
        self.outside: list[str] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        run = trainer.run
        self.bits.append(run.ledger.round_bits)
        if run.mask is None:
            return
        clients = {f"client {client}": state for client, state in run.clients.items()}
        memory = {f"codec of {client}": state for client, state in run.client_memory.items()}
        states = {"server": {"params": run.params}, **run.server, **clients, **memory, "downlink": run.server_memory}
        for place, state in states.items():
            for name, x in state.items():
                if x.shape[-1:] == run.mask.shape and name not in trainer.algorithm.rule.unmasked_state:
                    assert (x[..., run.mask] != 0).any() or not x.any()
                    if (x[..., ~run.mask] != 0).any():
                        self.outside.append(f"{place}: {name}")


@each_dense_algorithm
def test_any_method_keeps_to_the_mask(name: str, make_trainer: MakeTrainer) -> None:
    entry, start = ROSTER[name], Perceptron()
    ends = []
    for runner in entry.runners:
        module = Perceptron()
        module.load_state_dict(start.state_dict())
        watch = Watch()
        pruning = MagnitudePruning(rate=0.4, prune_epoch=2)
        trainer = make_trainer(max_rounds=5, precision="64-true", runner=runner, callbacks=[pruning, watch])
        trainer.fit(module, entry.federation(), entry.algorithm())
        assert trainer.run.mask is not None
        assert watch.outside == []
        before, after = watch.bits[1], watch.bits[3]
        for direction in ("up", "down"):
            assert after[direction]["model"] < before[direction]["model"] or not before[direction]["model"]
        assert len(trainer.run.clients_with_mask) >= 3 or not trainer.algorithm.exchange.uses_link
        ends.append(vector(module))
    np.testing.assert_allclose(ends[0], ends[-1], rtol=0, atol=1e-8)


def test_a_client_is_sent_the_mask_once(make_trainer: MakeTrainer) -> None:
    """Count bits: ⌈0.4 · 26⌉ + 1 = 12 of 26 parameters are pruned; a client's first round under the mask costs 26 bits."""
    watch, cohorts = Watch(), []

    class Cohorts(Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            cohorts.append(set(trainer.fit_loop.engine.population.select(trainer.run)))

    make_trainer(max_rounds=6, callbacks=[watch, Cohorts()]).fit(
        Perceptron(), federation(), IMC(rate=0.4, prune_round=2)
    )
    clients_with_mask: set[int] = set()
    for round, (bits, cohort) in enumerate(zip(watch.bits, cohorts, strict=True)):
        numbers = 26 if round < 2 else 14
        newcomers = cohort - clients_with_mask if round >= 2 else set()
        clients_with_mask |= newcomers
        assert bits["up"] == dict.fromkeys(bits["up"], 0) | {"model": 3 * 32 * numbers}
        assert bits["down"] == dict.fromkeys(bits["up"], 0) | {"model": 3 * 32 * numbers, "mask": 26 * len(newcomers)}
    assert any(cohort & clients_with_mask for cohort in cohorts[3:]), "some client must return"


def test_pruning_nothing_is_fedavg(make_trainer: MakeTrainer) -> None:
    modules = [Perceptron(), Perceptron()]
    modules[1].load_state_dict(modules[0].state_dict())
    for module, algorithm in zip(modules, (FedAvg(), IMC(rate=0.0, prune_round=1)), strict=True):
        trainer = make_trainer(max_rounds=3)
        trainer.fit(module, federation(), algorithm)
        assert trainer.run.mask is None
    assert np.array_equal(vector(modules[0]), vector(modules[1]))


def test_two_prunings_add_up(make_trainer: MakeTrainer) -> None:
    module = Perceptron()
    prunings = [MagnitudePruning(rate=0.7, prune_epoch=0), MagnitudePruning(rate=0.4, prune_epoch=1)]
    trainer = make_trainer(max_rounds=3, callbacks=prunings)
    trainer.fit(module, federation())
    assert int(trainer.run.mask.sum()) == np.count_nonzero(vector(module)) == 6
    assert trainer.callback_metrics["prune/kept"] == trainer.callback_metrics["prune/kept_2"] == 6


@pytest.mark.parametrize("algorithm", [FedAvg, toys.Remembering, FedDUM])
def test_a_mask_follows_a_structured_pruning(algorithm: Any, make_trainer: MakeTrainer) -> None:
    """Mask before round 1, prune one hidden unit of four before round 2, and mask the rest again before round 3."""
    watch, masks = Watch(), []

    class Masks(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            masks.append(trainer.run.mask)

    module = Perceptron()
    prunings = [MagnitudePruning(rate=0.4, prune_epoch=1, every_n_epochs=2), toys.Pruning(when=2, drop=(1,))]
    trainer = make_trainer(max_rounds=5, callbacks=[*prunings, watch, Masks()])
    trainer.fit(module, toys.Served(9), algorithm())
    assert watch.outside == []
    whole, cut, again = masks[1], masks[2], masks[3]
    kept = [place for place in range(26) if place not in (3, 4, 5, 13, 17, 21)]
    assert torch.equal(cut, whole[kept])
    left = int(cut.sum())
    assert int(again.sum()) == left - int(np.ceil(0.4 * left)) - 1
    assert np.count_nonzero(vector(module)) == int(again.sum())


def with_momentum(module: Any) -> Any:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def with_adam(module: Any) -> Any:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def with_mixing(module: Any) -> Any:
    """Return an optimiser whose step of a coordinate depends on other coordinates too."""
    return Mixing(module.parameters())


class Mixing(torch.optim.Optimizer):
    """Optimiser with the step w ← w − 0.1 (g + its mean over the tensor)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(0.1 * (p.grad + p.grad.mean()))


@pytest.mark.parametrize("configure", [with_momentum, with_adam, with_mixing])
def test_masked_weights_stay_at_zero_in_every_step(configure: Any, make_trainer: MakeTrainer) -> None:
    seen = []

    class Looks(Perceptron):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            seen.append(int((torch.nn.utils.parameters_to_vector(self.parameters()) != 0).sum()))
            return super().training_step(batch, batch_idx)

    make_trainer(local_epochs=3, gradient_clip_val=0.5).fit(
        Looks(configure=configure), federation(), IMC(rate=0.4, prune_round=0)
    )
    assert set(seen) == {14}


def test_what_is_masked_does_not_count_in_the_norm_that_is_clipped(make_trainer: MakeTrainer) -> None:
    """Compare with a mask in the forward pass, which alone determines the gradient."""
    module = Perceptron()
    start = vector(module)
    mask = np.abs(start) > sorted(np.abs(start))[11]

    class InForward(Perceptron):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            views = dict(zip(("w1", "b1", "w2", "b2"), torch.tensor(mask).split([12, 4, 8, 2]), strict=True))
            hidden = torch.tanh(
                torch.nn.functional.linear(
                    x, self.hidden.weight * views["w1"].view(4, 3), self.hidden.bias * views["b1"]
                )
            )
            return torch.nn.functional.linear(
                hidden, self.output.weight * views["w2"].view(2, 4), self.output.bias * views["b2"]
            )

    other = InForward()
    other.load_state_dict(module.state_dict())
    flags = {"local_epochs": 2, "gradient_clip_val": 0.1, "precision": "64-true"}
    make_trainer(**flags).fit(module, federation(), IMC(rate=0.4, prune_round=0))
    make_trainer(**flags).fit(other, federation())
    np.testing.assert_allclose(vector(module), vector(other) * mask, rtol=0, atol=1e-12)
    assert np.count_nonzero(vector(module)) == 14


class Asks(Callback):
    """Callback that records the pruning rate of the server's samples before round 2."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 2:
            self.rates.append(AdaptiveRate(server_only=True)(trainer, pl_module))


def test_imc_asks_the_server_alone_how_much_to_leave_out(make_trainer: MakeTrainer) -> None:
    """Check that the query costs no bits, and that the mask equals that of the same rate given by hand."""
    first, second, asks = Perceptron(), Perceptron(), Asks()
    second.load_state_dict(first.state_dict())
    data = ROSTER["FedDU"].federation
    adaptive = make_trainer(max_rounds=4, callbacks=asks)
    adaptive.fit(first, data(), IMC(prune_round=2))
    [rate] = asks.rates
    assert 0 < rate < 1
    given = make_trainer(max_rounds=4)
    given.fit(second, data(), IMC(rate=rate, prune_round=2))
    assert (vector(first) == vector(second)).all()
    assert adaptive.run.ledger.state_dict() == given.run.ledger.state_dict()
    assert int(given.run.mask.sum()) < 26
    with pytest.raises(UserError, match="found from the server's samples, but there are none"):
        make_trainer(max_rounds=4).fit(Perceptron(), federation(), IMC(prune_round=2))


@pytest.mark.parametrize("num_server", [0, 9])
@pytest.mark.parametrize("runner", ["serial", "stacked"])
@pytest.mark.parametrize("rate_mode", ["slq_plateau", "gap"])
def test_imc_asks_all_as_fedap_does(rate_mode: Any, runner: Any, num_server: int, make_trainer: MakeTrainer) -> None:
    gap = rate_mode == "gap"
    given = problem(rounds=4, num_server=num_server)
    given.learning_rate = 0.02 if gap else 0.1  # the paper's rule prunes only near the initial model
    module = Perceptron(lr=given.learning_rate)
    expected = oracle.imc(given, vector(module), round=2, gap=gap)
    trainer = make_trainer(max_rounds=4, precision="64-true", runner=runner)
    data = toys.Served(num_server) if num_server else federation()
    trainer.fit(module, data, IMC(prune_round=2, rate_mode=rate_mode, rate_source="all"))
    assert np.count_nonzero(expected) < 26
    np.testing.assert_allclose(vector(module), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("max_sources", [None, 3])
def test_bits_of_asking_all(max_sources: int | None, make_trainer: MakeTrainer) -> None:
    """Count bits: queried clients receive the dense model; the others of the round's three receive the masked one."""
    watch, algorithm = Watch(), IMC(prune_round=1, rate_source="all", max_sources=max_sources)
    trainer = make_trainer(max_rounds=3, callbacks=watch)
    trainer.fit(Perceptron(), toys.Served(9), algorithm)
    q, left, asked = 32, int(trainer.run.mask.sum()), set(algorithm.pruning.rate.asked)  # type: ignore[union-attr]
    assert left < 26
    assert asked <= set(range(6))
    assert len(asked) == 6 if max_sources is None else 2 <= len(asked) <= 3
    first, second = (set(problem(rounds=3, num_server=9).cohort(t)) for t in (1, 2))
    model = q * (26 * len(asked) + left * len(first - asked))
    found = [
        {direction: {kind: n for kind, n in bits[direction].items() if n} for direction in ("up", "down")}
        for bits in watch.bits
    ]
    assert found == [
        {"up": {"model": 3 * q * 26}, "down": {"model": 3 * q * 26}},
        {
            "up": {"model": 3 * q * left, "scalars": q * len(asked)},
            "down": {"model": model, "mask": 3 * 26},
        },
        {
            "up": {"model": 3 * q * left},
            "down": {"model": 3 * q * left} | ({"mask": 26 * len(second - first)} if second - first else {}),
        },
    ]


def test_asking_all_costs_also_where_nothing_is_left_out(make_trainer: MakeTrainer) -> None:
    one, watch = Perceptron(lr=0.3), Watch()  # far from the initial model
    other = Perceptron(lr=0.3)
    other.load_state_dict(one.state_dict())
    make_trainer(max_rounds=3).fit(one, toys.Served(9), FedAvg())
    algorithm = IMC(prune_round=2, rate_mode="gap", rate_source="all")
    trainer = make_trainer(max_rounds=3, callbacks=watch)
    trainer.fit(other, toys.Served(9), algorithm)
    assert trainer.run.mask is None
    assert np.array_equal(vector(one), vector(other))
    assert [watch.bits[2]["up"][kind] for kind in ("model", "scalars")] == [3 * 32 * 26, 6 * 32]
    assert [watch.bits[2]["down"][kind] for kind in ("model", "mask")] == [6 * 32 * 26, 0]


@pytest.mark.parametrize("asks_at", ["on_train_epoch_start", "on_train_epoch_end"])
def test_what_any_callback_asks_of_clients_is_booked_in_the_round_that_comes(
    asks_at: str, make_trainer: MakeTrainer
) -> None:
    """Count model and running statistics to the queried clients; those who train in the round receive them anyway."""
    watch, asked = Watch(), [0, 1, 2, 4]

    def ask(self: Any, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == (1 if asks_at == "on_train_epoch_start" else 0):
            for source in trainer.sources():
                if source.client is None or source.client in asked:
                    source.answer(5)

    curious = type("Curious", (Callback,), {asks_at: ask})()
    make_trainer(max_rounds=3, callbacks=[watch, curious]).fit(Normalised(), toys.Served(9))
    plain = Watch()
    make_trainer(max_rounds=3, callbacks=plain).fit(Normalised(), toys.Served(9))
    others = len(set(asked) - set(problem(rounds=3, num_server=9).cohort(1)))
    assert 0 < others < len(asked)
    expected = plain.bits
    parameters, buffers = expected[0]["up"]["model"] // 3, expected[0]["up"]["buffers"] // 3
    expected[1]["up"]["scalars"] += 32 * 5 * len(asked)
    expected[1]["down"]["model"] += parameters * others
    expected[1]["down"]["buffers"] += buffers * others
    assert watch.bits == expected


@pytest.mark.parametrize(
    ("algorithm", "flags"),
    [
        (lambda: FedLDF(n=2, broadcast="all"), {}),
        (lambda: FedAvg(downlink=Changes()), {}),
        (lambda: FedBuff(1), {"clients_per_round": 2, "clock": ClientClock(devices="phones")}),
    ],
    ids=["FedLDF", "Changes", "FedBuff"],
)
def test_who_is_asked_receives_the_model_once(
    algorithm: Callable[[], Any], flags: dict[str, Any], make_trainer: MakeTrainer
) -> None:
    """Ask all clients after each round: with the broadcast of the next, each of them receives the model once."""

    class Curious(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            for source in trainer.sources():
                source.answer(1)

    watch = Watch()
    make_trainer(max_rounds=4, callbacks=[watch, Curious()], **flags).fit(Perceptron(), federation(), algorithm())
    assert [bits["down"]["model"] for bits in watch.bits[1:]] == [6 * 32 * 26] * 3


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"rate_source": "al"}, "rate_source 'al' is unknown; did you mean 'all'"),
        ({"rate_source": "all", "rate": 0.4}, "rate_source='all' finds the rate itself: leave rate=0.4 out"),
        ({"max_sources": 3}, "max_sources=3 is for rate_source='all', got rate_source='server'"),
        ({"rate_source": "all", "max_sources": 0}, "max_sources must be a whole number of at least 1, got 0"),
    ],
)
def test_who_is_asked_must_be_said_in_one_way(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        IMC(**given)

"""Test that a user's aggregator, exchange and codec fit whatever they are declared for, and are refused otherwise."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from compared_runs import MakeTrainer, equal_states
from torch import Tensor
from toys import Normalised, Perceptron, federation, vector

from lightning_fl import UserError
from lightning_fl.aggregators import WeightedMean
from lightning_fl.algorithms import Algorithm
from lightning_fl.codecs import Dense
from lightning_fl.exchanges import OneShot
from lightning_fl.features import SecureAggregation
from lightning_fl.features.privacy import ClientPrivacy, LocalPrivacy
from lightning_fl.slots import (
    Aggregator,
    Channel,
    Codec,
    Exchange,
    LocalTraining,
    Message,
    Pace,
    Packed,
    Payload,
    Result,
    RoundContext,
    Rule,
    ServerTurn,
    SetupTurn,
    State,
    Step,
    Traits,
    Upload,
)
from lightning_fl.steps import Apply


@dataclass(frozen=True)
class SilentMean(Aggregator):
    """Mean by samples that declares nothing about itself but that it divides by all weights."""

    uses = frozenset[str]()

    def weighs_equally(self, name: str) -> bool:
        return False

    def add(self, accumulator: dict[str, Any], upload: Upload) -> None:
        accumulator.setdefault("uploads", []).append(upload)

    def finish(self, accumulator: dict[str, Any]) -> Message:
        uploads = accumulator["uploads"]
        total = sum(upload.result.weight for upload in uploads)
        return {
            name: sum(upload.result.weight * upload.message[name].double() for upload in uploads) / total
            for name in uploads[0].message
        }


@dataclass(frozen=True)
class Mean(SilentMean):
    """The same, which declares what it is."""

    is_mean = sums_suffice = True


@dataclass(frozen=True)
class SilentTurn(Exchange):
    """Exchange of whole uploads that declares nothing about itself."""

    def collect(self, results: Iterable[Result], channel: Channel) -> Iterator[Upload]:
        for result in results:
            yield Upload(result, channel.send_up(result.client, result.message))


@dataclass(frozen=True)
class OneTurn(SilentTurn):
    """The same, which declares what it is."""

    sums_suffice = one_message = sends_whole = True


@dataclass(frozen=True)
class SilentCodec(Codec):
    """Codec that sends all numbers as they are, and declares nothing about itself."""

    def encode(self, message: Message, memory: State, context: RoundContext) -> tuple[Payload, State]:
        return {name: Packed.whole(vector) for name, vector in message.items()}, {}

    def decode(self, payload: Payload, context: RoundContext) -> Message:
        return {name: packed.content for name, packed in payload.items()}


@dataclass(frozen=True)
class Plain(SilentCodec):
    """The same, which declares what it is."""

    traits = Traits.EXACT | Traits.SUMS_SUFFICE


class Buffered(Algorithm):
    """FedAvg that waits for two uploads."""

    pace = Pace(2)


PRIVATE = {"privacy": ClientPrivacy(noise_multiplier=1.0, clip=0.5, side_channels="keep")}
BY_SAMPLES = {"privacy": ClientPrivacy(noise_multiplier=1.0, clip=0.5, weights="samples", cap=20)}
SECURE = {"secure_aggregation": SecureAggregation()}
RUNS = {
    "private": (Algorithm, PRIVATE),
    "by samples": (Algorithm, BY_SAMPLES),
    "secure": (Algorithm, SECURE),
    "asynchronous": (Buffered, {}),
}
"""Methods and flags of the runs."""
PARTS = {
    "aggregator": (SilentMean(), Mean()),
    "exchange": (SilentTurn(), OneTurn()),
    "uplink": (SilentCodec(), Plain()),
    "downlink": (SilentCodec(), Plain()),
}
"""Parts by the slot: without a declaration, and with it."""
REFUSED = {
    (
        "private",
        "aggregator",
    ): "needs more than a sum of uploads.*or declare is_mean = True in SilentMean, if that is true",
    (
        "private",
        "exchange",
    ): "chooses what single clients send.*or declare one_message = sends_whole = True in SilentTurn",
    (
        "secure",
        "aggregator",
    ): r"aggregator \(SilentMean\).*or declare sums_suffice = True in SilentMean, if that is true",
    ("secure", "exchange"): r"exchange \(SilentTurn\).*or declare sums_suffice = True in SilentTurn, if that is true",
    ("secure", "uplink"): r"uplink \(SilentCodec\).*or declare Traits.SUMS_SUFFICE in SilentCodec, if that is true",
    (
        "asynchronous",
        "exchange",
    ): "takes turns with the clients.*or declare one_message = sends_whole = True in SilentTurn",
}
"""Reasons by the run and the slot of the part that declares nothing."""


@pytest.fixture(autouse=True)
def noise_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs of different settings have the same noise."""
    monkeypatch.setattr("lightning_fl.trainer.fit_loop.noise_key", lambda settings: 1)


def fitted(make_trainer: MakeTrainer, run: str, **slots: Any) -> Any:
    kind, flags = RUNS[run]
    trainer = make_trainer(**{"max_rounds": 2, "clients_per_round": 4, **flags})
    torch.manual_seed(0)
    trainer.fit(Perceptron(), federation(), kind(**slots))
    return trainer.run


@pytest.mark.parametrize("slot", PARTS)
@pytest.mark.parametrize("run", RUNS)
def test_a_declared_part_runs_as_the_equal_part_of_the_package(run: str, slot: str, make_trainer: MakeTrainer) -> None:
    own, shipped = fitted(make_trainer, run, **{slot: PARTS[slot][1]}), fitted(make_trainer, run)
    torch.testing.assert_close(own.params, shipped.params, rtol=1e-6, atol=1e-7)
    assert equal_states(own.ledger.state_dict(), shipped.ledger.state_dict())


@pytest.mark.parametrize(("run", "slot"), REFUSED)
def test_a_part_without_a_declaration_is_refused_in_a_sentence_that_names_it(
    run: str, slot: str, make_trainer: MakeTrainer
) -> None:
    with pytest.raises(UserError, match=REFUSED[run, slot]):
        fitted(make_trainer, run, **{slot: PARTS[slot][0]})


def test_what_needs_no_declaration_is_not_refused(make_trainer: MakeTrainer) -> None:
    for run, slots in {
        "private": {"uplink": SilentCodec()},
        "asynchronous": {"uplink": SilentCodec(), "aggregator": SilentMean()},
    }.items():
        own, shipped = fitted(make_trainer, run, **slots), fitted(make_trainer, run)
        torch.testing.assert_close(own.params, shipped.params, rtol=1e-6, atol=1e-7)


@dataclass(frozen=True)
class Heavier(WeightedMean):
    """Mean of the package with other weights, which promises nothing anew."""

    def add(self, accumulator: dict[str, Any], upload: Upload) -> None:
        super().add(accumulator, upload)
        super().add(accumulator, upload)


@dataclass(frozen=True)
class Turned(OneShot):
    """Exchange of the package that lets clients upload in another order."""

    def collect(self, results: Iterable[Result], channel: Channel) -> Iterator[Upload]:
        yield from reversed([*super().collect(results, channel)])


@dataclass(frozen=True)
class Twice(OneShot):
    """Exchange of the package around whose training something else happens."""

    def around_training(self, train: Any, module: Any, data: Any) -> Any:
        return lambda job, clients: (list(train(job, clients)), train(job, clients))[1]


@dataclass(frozen=True)
class Shifted(Dense):
    """Codec of the package that sends other numbers."""

    def encode(self, message: Message, memory: State, context: RoundContext) -> tuple[Payload, State]:
        return super().encode({name: vector + 1 for name, vector in message.items()}, memory, context)


@pytest.mark.parametrize(
    ("run", "slot", "part"),
    [
        ("private", "aggregator", Heavier()),
        ("secure", "aggregator", Heavier()),
        ("private", "exchange", Turned()),
        ("secure", "exchange", Turned()),
        ("asynchronous", "exchange", Turned()),
        ("private", "exchange", Twice()),
        ("secure", "uplink", Shifted()),
    ],
)
def test_promises_are_not_inherited_by_other_methods(run: str, slot: str, part: Any, make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match=REFUSED[run, slot].replace(type(PARTS[slot][0]).__name__, type(part).__name__)):
        fitted(make_trainer, run, **{slot: part})


def test_promises_are_inherited_with_the_methods(make_trainer: MakeTrainer) -> None:
    class Named(WeightedMean):
        """Mean of the package by another name."""

    fitted(make_trainer, "private", aggregator=Named())


@dataclass(frozen=True)
class Asking(Step):
    """Step that does something before the first round."""

    def prepare(self, turn: SetupTurn) -> None:
        """Do nothing."""

    def __call__(self, turn: ServerTurn, state: State) -> State:
        return state


@dataclass(frozen=True)
class Alone(Asking):
    """The same, which declares that no client has a part in it."""

    asks_clients = False
    sums_suffice = True


@dataclass(frozen=True)
class Early(OneTurn):
    """Exchange that may let clients answer before the training."""

    one_message = False

    def before_training(self, job: Any, clients: Any, train: Any, channel: Channel) -> Any:
        return job, clients


def test_what_clients_may_send_besides_their_upload_is_refused_with_local_privacy(make_trainer: MakeTrainer) -> None:
    def fit(**slots: Any) -> None:
        trainer = make_trainer(max_rounds=1, clients_per_round=4, privacy=LocalPrivacy(noise_multiplier=0.1))
        trainer.fit(Perceptron(), federation(), Algorithm(**slots))

    with pytest.raises(
        UserError, match=r"Asking asks clients .*or declare asks_clients = False in Asking, if that is true"
    ):
        fit(steps=[Apply(), Asking()])
    with pytest.raises(UserError, match=r"clients of Early may answer before .*or declare one_message = True in Early"):
        fit(exchange=Early())
    fit(steps=[Apply(), Alone()], exchange=SilentTurn())


@dataclass(frozen=True)
class Sends(Rule):
    """Rule that sends what a function makes of its delta."""

    make: Callable[[Tensor], Any]

    def finish(self, local: LocalTraining) -> Message:
        return self.make(local.params - local.received["model"])


@dataclass(frozen=True)
class Merges(SilentMean):
    """Aggregator that returns what a function makes of the mean."""

    make: Callable[[Message], Any] = dict

    def finish(self, accumulator: dict[str, Any]) -> Message:
        return self.make(super().finish(accumulator))


@dataclass(frozen=True)
class Takes(Step):
    """Step that calls a function of its turn and returns what that returns."""

    make: Callable[[ServerTurn], Any]

    def __call__(self, turn: ServerTurn, state: State) -> State:
        return self.make(turn)


RETURNED = {
    "a vector of a rule": (
        {"rule": Sends(lambda delta: delta)},
        r"What Sends.finish returns must be a dictionary of vectors by name, got Tensor\.",
    ),
    "a list of a rule": (
        {"rule": Sends(lambda delta: {"model": [delta]})},
        "What Sends.finish returns must be .*, got 'model' of type list",
    ),
    "a sum of a rule": (
        {"rule": Sends(lambda delta: {"model": delta, "scalars/sum": delta.sum(-1)})},
        r"What Sends.finish returns .*, got 'scalars/sum' of shape \(.*\): keep one axis, as in sum\(-1, keepdim",
    ),
    "a vector of an aggregator": (
        {"aggregator": Merges(lambda mean: mean["model"])},
        "What Merges returns must be a dictionary of tensors by name, got Tensor",
    ),
    "another name": (
        {"aggregator": Merges(lambda mean: {"modle": mean["model"]})},
        "Merges must return 'model', which Apply uses, got 'modle'",
    ),
    "a short vector": (
        {"aggregator": Merges(lambda mean: {"model": mean["model"][:5]})},
        r"Merges must return 'model' of shape \(26,\), got \(5,\)",
    ),
    "no state": ({"steps": [Takes(lambda turn: None)]}, "The state that Takes returns must be .*, got None"),
    "a number as state": (
        {"steps": [Takes(lambda turn: {"n": 1})]},
        "The state that Takes returns .*, got 'n' of type int",
    ),
    "a short proposal": (
        {"steps": [Takes(lambda turn: setattr(turn, "proposal", turn.params[:3]) or {})]},
        r"Takes must set turn.proposal to a tensor of shape \(26,\), got one of shape \(3,\)",
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("runner", ["serial", "stacked"])
@pytest.mark.parametrize("name", RETURNED)
def test_what_a_part_returns_is_refused_in_a_sentence(name: str, runner: str, make_trainer: MakeTrainer) -> None:
    slots, said = RETURNED[name]
    with pytest.raises(UserError, match=said):
        make_trainer(max_rounds=1, runner=runner).fit(Perceptron(), federation(), Algorithm(**slots))


def test_what_no_message_has_may_be_of_any_shape(make_trainer: MakeTrainer) -> None:
    """Check an aggregator that returns a read-only mapping with a number instead of the model, and its step."""
    aggregator = Merges(lambda mean: MappingProxyType({"scalars/norm": mean["model"].norm()}))
    steps = [Takes(lambda turn: setattr(turn, "proposal", turn.params + turn.merged["scalars/norm"]) or {})]
    before, module = Perceptron(), Perceptron()
    before.load_state_dict(module.state_dict())
    make_trainer(max_rounds=1).fit(module, federation(), Algorithm(aggregator=aggregator, steps=steps))
    assert len({round(change, 6) for change in (vector(module) - vector(before)).tolist()} - {0}) == 1


def test_a_step_that_proposes_nothing_is_named(make_trainer: MakeTrainer) -> None:
    with pytest.warns(
        UserWarning, match=r"Round 1: .* the server's steps \(Takes\) propose no model: set turn\.proposal"
    ):
        make_trainer(max_rounds=1).fit(Perceptron(), federation(), Algorithm(steps=[Takes(lambda turn: {})]))


def propose(turn: ServerTurn) -> State:
    turn.proposal = turn.params + turn.merged["model"]
    return {}


@pytest.mark.parametrize(
    ("slots", "parts"),
    [
        (
            {"aggregator": Merges(lambda mean: {"model": mean["model"]})},
            r"Merges must return 'buffers', and a step \(Apply",
        ),
        ({"steps": [Takes(propose)]}, r"WeightedMean must return 'buffers', and a step \(Takes"),
    ],
    ids=["aggregator", "step"],
)
def test_buffers_that_nobody_merges_are_said_once(slots: Any, parts: str, make_trainer: MakeTrainer) -> None:
    with pytest.warns(
        UserWarning, match=f"Round 1: clients send float buffers, .* stay as they are: {parts}"
    ) as warned:
        make_trainer().fit(Normalised(), federation(), Algorithm(**slots))
    assert sum("clients send float buffers" in str(warning.message) for warning in warned) == 1


def test_buffers_that_clients_keep_are_no_mistake(make_trainer: MakeTrainer) -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        make_trainer(max_rounds=1, privacy=LocalPrivacy(buffers="keep")).fit(Normalised(), federation())
    assert not any("clients send float buffers" in str(warning.message) for warning in warned)


def test_names_of_entries_are_a_set() -> None:
    with pytest.raises(UserError, match=r"^Text.provides must be a set of names: write \{'scalars/x'\}\.$"):
        type("Text", (Rule,), {"provides": "scalars/x"})

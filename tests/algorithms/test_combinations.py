"""Test combinations of parts: each is refused in a sentence when the algorithm is made, or keeps three invariants.

All clients hold the same samples and take the same number of steps, so that all upload the same delta Δ, unless they keep states
that an exchange of parts does not always accept. The steps have hyper-parameters that leave a proposal as it is, and the codecs
lose nothing. Then, in every round of an accepted combination,

- the model moves by Δ in each coordinate that some client sent, and stays in the others: by no less than the least Δ of these
  clients, and by no more than the most;
- every entry that crossed the link was read by a part on the other side;
- all numbers stay finite, and no upload is rejected.

The server as a client and adaptive steps always change a proposal: for them the move must only point in Δ's direction. The second
and the third must also hold with lossy codecs and the steps' own hyper-parameters.
"""

import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from compared_runs import MakeTrainer
from torch import Tensor
from toys import SIZES, Convolved, Served

from lightning_fl import FederatedTrainer, UserError, algorithms
from lightning_fl.aggregators import KeepUploads, MaskedMean, NormalisedMean, WeightedMean
from lightning_fl.algorithms import Algorithm, FedKT, FedProx
from lightning_fl.checks import parameters_of
from lightning_fl.codecs import (
    Changes,
    Dense,
    ErrorFeedback,
    FairTopK,
    Followed,
    OneBit,
    Quantiser,
    SharedTopK,
    TopK,
)
from lightning_fl.engine import round as rounds
from lightning_fl.engine.upload_collector import UploadCollector
from lightning_fl.exchanges import (
    DrawnClients,
    DrawnLayers,
    GradientTurn,
    LayerDivergence,
    OneShot,
    PrunedUnits,
    WithSampleCount,
)
from lightning_fl.link.link import Link
from lightning_fl.rules import (
    ControlVariates,
    CorrectedMomentum,
    DecoupledMomentum,
    FrozenMomentum,
    LocalAdam,
    LocalOptimizer,
    Normalised,
    Proximal,
    RestartedMomentum,
    SharedAdam,
    SquaredGradients,
    Thresholded,
    WarmedUpAdam,
)
from lightning_fl.slots import (
    UPLOADS,
    Aggregator,
    Channel,
    Codec,
    Exchange,
    Message,
    Result,
    Rule,
    ServerTurn,
    State,
    Step,
    Upload,
)
from lightning_fl.steps import (
    Adagrad,
    Adam,
    Apply,
    Compress,
    ControlUpdate,
    Distillation,
    DynamicServerUpdate,
    GradientMomentum,
    Moments,
    Momentum,
    MomentumInStages,
    Reconfiguration,
    ServerAsClient,
    ServerOptimizer,
    SharedMomentum,
    StaticServerUpdate,
    WarmedUpMoments,
    Yogi,
)

NUM_SERVER = 9
RULES = [
    ControlVariates(),
    CorrectedMomentum(),
    DecoupledMomentum(),
    FrozenMomentum(),
    LocalAdam(),
    LocalOptimizer(),
    Normalised(),
    Proximal(),
    RestartedMomentum(),
    SharedAdam(),
    SquaredGradients(interval=1),
    Thresholded(LocalOptimizer()),
    WarmedUpAdam(warmup=1.0),
    WarmedUpAdam(warmup=1),
]
EXCHANGES = [
    DrawnClients(n=2),
    DrawnLayers(n=2),
    GradientTurn(OneShot()),
    LayerDivergence(n=2),
    OneShot(),
    PrunedUnits(),
    WithSampleCount(),
]
AGGREGATORS = [
    MaskedMean(),
    KeepUploads(WeightedMean()),
    NormalisedMean(),
    WeightedMean(),
    WeightedMean(uniform=("scalars/importance",)),
]
QUANTISER = Quantiser()
LOSSLESS = [
    (Dense(), Dense()),
    (TopK(1.0), Changes()),
    (ErrorFeedback(Dense()), Followed(Dense())),
    (Dense(), Followed(Dense(), "moments/momentum")),
]
LOSSY = [
    *((codec, Dense()) for codec in (TopK(0.3), FairTopK(0.3), SharedTopK(0.3), OneBit(), QUANTISER)),
    *((ErrorFeedback(codec), QUANTISER) for codec in (TopK(0.3), FairTopK(0.3), SharedTopK(0.3), OneBit(), QUANTISER)),
    (TopK(0.3), Changes()),
    (Dense(), Followed(QUANTISER)),
    (Dense(), Followed(OneBit(), "moments/momentum")),
]


@cache
def chains(codec: Codec, exact: bool) -> list[tuple[Step, ...]]:
    """Return chains of steps, which leave a proposal as it is if `exact`; `codec` compresses the server's change."""
    none = {"C": 0} if exact else {}
    momentum = Momentum(beta=0) if exact else Momentum()
    update = DynamicServerUpdate(**none)
    with_momentum = DynamicServerUpdate(**none, rule=DecoupledMomentum())
    squares = SquaredGradients(interval=1, each_step=True)
    steps: list[Step] = [
        Compress(codec),
        ControlUpdate(),
        Distillation(max_steps=0 if exact else 3),
        update,
        with_momentum,
        GradientMomentum(),
        momentum,
        Moments(),
        MomentumInStages((Apply(), update), momentum),
        Reconfiguration(squares, shrink=0.0 if exact else 0.3, initial_passes=0),
        ServerAsClient(),
        SharedMomentum(),
        StaticServerUpdate(tau_eff=0 if exact else 1),
        WarmedUpMoments(codec, warmup=1.0),
        WarmedUpMoments(codec, warmup=1),
        Adagrad(learning_rate=0.01),
        Adam(learning_rate=0.01),
        Yogi(learning_rate=0.01),
        ServerOptimizer(partial(torch.optim.SGD, lr=1.0) if exact else partial(torch.optim.Adam, lr=0.01)),
    ]
    return [
        (Apply(),),
        (Apply(), Apply()),
        *((step,) for step in steps),
        *((Apply(), step) for step in steps),
        *((step, Apply()) for step in steps),
        (Apply(), with_momentum, SharedMomentum()),
        (Apply(), SharedMomentum(), with_momentum),
        (Apply(), GradientMomentum(), GradientMomentum()),
        (Apply(), momentum, Apply()),
        (Apply(), Compress(codec), momentum),
    ]


class Recording(dict[str, Tensor]):
    """Message that records the names that are read."""

    def __init__(self, message: Message, read: set[str]) -> None:
        super().__init__(message)
        self.read = read

    def __getitem__(self, name: str) -> Tensor:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)

    def __or__(self, other: Any) -> Any:
        return Recording(dict(self) | dict(other), self.read)

    def __ror__(self, other: Any) -> Any:
        return Recording(dict(other) | dict(self), self.read)


@dataclass
class Watch:
    """Records the uploads of each round, the model after it, and the names that crossed the link and that were read."""

    models: list[Tensor]
    uploads: list[list[Upload]]
    sent: set[str]
    read: set[str]

    @classmethod
    def of(cls, monkeypatch: pytest.MonkeyPatch) -> "Watch":
        watch = cls([], [], set(), set())
        take, take_steps, broadcast = UploadCollector.take, rounds.take_steps, Link.broadcast

        def watched_take(collector: UploadCollector, upload: Upload, link: Link) -> None:
            watch.uploads[-1].append(upload)
            watch.sent |= upload.message.keys()
            upload.message = Recording(upload.message, watch.read)
            take(collector, upload, link)

        def watched_steps(algorithm: Any, roles: Any, turn: Any, *others: Any) -> Any:
            turn.merged = Recording(turn.merged, watch.read)
            return take_steps(algorithm, roles, turn, *others)

        def watched_broadcast(link: Link, recipients: Any, message: Message) -> Message:
            watch.models.append(message["model"].clone())
            watch.uploads.append([])
            received = broadcast(link, recipients, message)
            watch.sent |= message.keys() - {"model/change"}  # the downlink reads it
            return Recording(received, watch.read)

        monkeypatch.setattr(UploadCollector, "take", watched_take)
        monkeypatch.setattr(rounds, "take_steps", watched_steps)
        monkeypatch.setattr(Link, "broadcast", watched_broadcast)
        return watch

    def clear(self) -> None:
        for values in vars(self).values():
            values.clear()

    def check(self, names: str) -> None:
        """Check that all was finite, accepted and read, and that the model moved."""
        for (before, after), uploads in zip(pairwise(self.models), self.uploads, strict=True):
            assert len(uploads) == 6, names
            assert all(x.isfinite().all() for upload in uploads for x in upload.message.values()), names
            assert after.isfinite().all(), names
            assert (after - before).any(), names
        # The aggregator knows n_k, and a count of samples crosses for the ledger alone.
        unread = self.sent - self.read - {"model", "buffers", "scalars/samples"}
        assert not unread, (names, unread)
        assert {"model", UPLOADS} & self.read, names

    def check_moves(self, steps: tuple[Step, ...], names: str) -> None:
        """Check that each coordinate moved by the delta of the clients that sent it."""
        for (before, after), uploads in zip(pairwise(self.models), self.uploads, strict=True):
            if not all("model" in upload.message for upload in uploads):
                continue  # 1-bit Adam after its warm-up
            everywhere = torch.ones_like(before, dtype=torch.bool)
            sent = torch.stack([upload.sent.get("model", everywhere) for upload in uploads])
            deltas = torch.stack([dict.__getitem__(upload.message, "model") for upload in uploads])
            least = deltas.masked_fill(~sent, torch.inf).amin(0).masked_fill(~sent.any(0), 0)
            most = deltas.masked_fill(~sent, -torch.inf).amax(0).masked_fill(~sent.any(0), 0)
            moved, middle = after - before, (least + most) / 2
            if any(isinstance(step, ServerAsClient | Adagrad | Adam | Yogi) for step in steps):
                assert torch.dot(moved, middle) > 0.5 * moved.norm() * middle.norm(), names
            else:
                assert ((moved - middle).abs() <= (most - least) / 2 + 1e-6 + 1e-4 * middle.abs()).all(), names


def combinations(rule: Rule, exact: bool) -> Iterator[tuple[Any, ...]]:
    """Yield the slots of the combinations with a rule: each exchange with all chains, and OneShot with all codecs too."""
    codecs = LOSSLESS if exact else LOSSY
    for exchange, aggregator, (up, down) in product(EXCHANGES, AGGREGATORS, codecs):
        if isinstance(exchange, OneShot) or not exact or (up, down) == codecs[0]:
            inner = down.codec if isinstance(down, Followed) else Dense()
            for steps in chains(inner, exact):
                yield rule, up, down, exchange, aggregator, steps


def accepted(slots: tuple[Any, ...]) -> Algorithm | None:
    """Return the algorithm; None if it is refused, after a check of the sentence."""
    try:
        return Algorithm(*slots)
    except UserError as error:
        begin = "the slots of Algorithm do not fit: "
        sentence = str(error)
        assert re.fullmatch(re.escape(begin) + r".*\.", sentence), "one line"
        named = re.findall(r"\w+(?=\()", repr(slots))
        for problem in sentence.removeprefix(begin).split("; "):
            assert any(name in problem for name in named), problem
        return None


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "lossy"])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: repr(rule).partition("(b")[0])
@pytest.mark.parametrize("most", [2, pytest.param(10_000, marks=pytest.mark.slow)], ids=["some", "all"])
def test_a_combination_is_refused_or_keeps_the_invariants(
    rule: Rule, exact: bool, most: int, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, count, every = Watch.of(monkeypatch), 0, list(combinations(rule, exact))
    random.Random(0).shuffle(every)
    for slots in every:
        if count < most and (algorithm := accepted(slots)):
            watch.clear()
            watch.models.append(trained(algorithm, make_trainer).run.params)
            watch.check(repr(slots))
            if exact:
                watch.check_moves(algorithm.steps, repr(slots))
            count += 1
    assert count


def trained(algorithm: Algorithm, make_trainer: MakeTrainer) -> FederatedTrainer:
    """Train two rounds of all clients, which hold copies of one sample, as the server does."""
    count = sum(SIZES) + NUM_SERVER
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(1, 3, generator=generator), torch.randn(1, 2, generator=generator)
    module, data = Convolved(), Served(NUM_SERVER, (x.repeat(count, 1), y.repeat(count, 1)))
    trainer = make_trainer(max_rounds=2, local_steps=2, clients_per_round=6, client_optimizer="sgd", runner="serial")
    trainer.fit(module, data, algorithm)
    return trainer


UNREAD = DynamicServerUpdate(rule=SquaredGradients())
SENSELESS = [
    *(
        (
            {"exchange": exchange},
            [type(exchange).__name__, "WeightedMean would count what was not sent as zero: use MaskedMean"],
        )
        for exchange in (LayerDivergence(n=2), DrawnLayers(n=2), DrawnClients(n=2), PrunedUnits())
    ),
    ({"steps": (DynamicServerUpdate(),)}, ["DynamicServerUpdate", "LocalOptimizer", "begin with Apply()"]),
    (
        {"steps": (Momentum(), Apply())},
        ["Momentum changes the model that an earlier step proposes", "begin with Apply()"],
    ),
    (
        {"steps": (Apply(), Momentum(), Apply())},
        ["Apply starts anew", "the work of Momentum", "put it first, and once"],
    ),
    ({"rule": Normalised()}, ["Normalised sends 'scalars/normaliser'", "WeightedMean", "use NormalisedMean"]),
    ({"rule": SquaredGradients()}, ["SquaredGradients sends 'scalars/importance'", "use Reconfiguration"]),
    ({"steps": (Apply(), UNREAD)}, ["DynamicServerUpdate needs 'scalars/importance'", "LocalOptimizer does not send"]),
    (
        {"aggregator": KeepUploads(WeightedMean())},
        [
            "KeepUploads keeps 'uploads/model'",
            "use CentredClipping or Distillation or ProductMean or TrustScores, or leave",
        ],
    ),
    ({"exchange": GradientTurn(OneShot())}, ["'moments/gradient' in GradientTurn", "LocalOptimizer", "leave it out"]),
    (
        {"steps": (Apply(), Compress(QUANTISER))},
        ["Compress sends 'model/change' down", "Dense", "Followed(Quantiser(…))"],
    ),
    (
        {"rule": ControlVariates(), "steps": (Apply(), ControlUpdate()), "uplink": TopK(0.3)},
        ["ControlVariates keep a copy of 'moments/control'", "use ErrorFeedback(TopK(…))"],
    ),
    (
        {"rule": ControlVariates(), "steps": (Apply(), ControlUpdate()), "aggregator": MaskedMean()},
        [
            "ControlUpdate",
            "'moments/control' with equal weights",
            "MaskedMean weighs by samples: use WeightedMean(uniform=",
        ],
    ),
    (
        {"rule": FrozenMomentum(), "steps": (Apply(), GradientMomentum(), GradientMomentum())},
        ["GradientMomentum and GradientMomentum send down the same 'moments/momentum'"],
    ),
    (
        {
            "rule": DecoupledMomentum(),
            "steps": (Apply(), SharedMomentum(), DynamicServerUpdate(rule=DecoupledMomentum())),
        },
        ["DynamicServerUpdate changes 'moments/momentum', which no later step uses"],
    ),
    (
        {"rule": WarmedUpAdam(), "steps": (WarmedUpMoments(OneBit()),), "uplink": SharedTopK(0.3)},
        ["SharedTopK needs 'model', which WarmedUpAdam does not send in every round"],
    ),
    (
        {"rule": WarmedUpAdam(warmup=3), "steps": (WarmedUpMoments(OneBit(), warmup=4),)},
        ["WarmedUpAdam has warmup=3, but WarmedUpMoments has 4"],
    ),
]


@pytest.mark.parametrize(
    ("slots", "words"), SENSELESS, ids=lambda case: " ".join(case) if isinstance(case, dict) else ""
)
def test_senseless_parts_are_refused_with_a_remedy(slots: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        Algorithm(**slots)
    assert [word for word in words if word not in str(caught.value)] == [], caught.value


@pytest.mark.parametrize("make", [ErrorFeedback, Compress], ids=lambda make: make.__name__)
def test_error_feedback_is_not_given_twice(make: Callable[[Codec], Any]) -> None:
    with pytest.raises(UserError, match=f"{make.__name__}.*ErrorFeedback"):
        make(ErrorFeedback(TopK(0.3)))


@pytest.mark.parametrize("rule", [LocalOptimizer(), SquaredGradients(interval=2), SquaredGradients(interval=None)])
def test_pruning_before_the_first_round_needs_a_rule_that_sends_the_squares(rule: Rule) -> None:
    with pytest.raises(
        UserError, match=rf"{type(rule).__name__} does not always send 'scalars/importance': use Squared"
    ):
        Reconfiguration(rule)
    Reconfiguration(rule, initial_passes=0)


def test_an_exchange_within_the_turn_for_the_mean_gradient_is_named() -> None:
    with pytest.raises(UserError, match="LayerDivergence sends parts of the model, and WeightedMean would"):
        Algorithm(rule=CorrectedMomentum(), steps=(Apply(), GradientMomentum()), exchange=LayerDivergence(n=2))


@dataclass(frozen=True)
class OwnRule(Rule):
    """Rule that declares nothing."""


@dataclass(frozen=True)
class OwnExchange(Exchange):
    """Exchange that declares nothing; the first half of each message crosses."""

    def collect(self, results: Iterable[Result], channel: Channel) -> Iterator[Upload]:
        for result in results:
            seen = channel.send_up(result.client, result.message)
            sent = torch.arange(len(seen["model"])) < len(seen["model"]) // 2
            yield Upload(result, seen | {"model": seen["model"] * sent}, {"model": sent})


@dataclass(frozen=True)
class OwnMean(Aggregator):
    """Aggregator that declares nothing; the sum of the uploads over the number of clients that sent."""

    keeps_uploads = False

    def add(self, accumulator: dict[str, Any], upload: Upload) -> None:
        sent = upload.sent.get("model", torch.ones_like(upload.message["model"], dtype=torch.bool))
        accumulator["sum"] = accumulator.get("sum", 0) + upload.message["model"].double()
        accumulator["count"] = accumulator.get("count", 0) + sent.double()

    def finish(self, accumulator: dict[str, Any]) -> Message:
        return {"model": accumulator["sum"] / accumulator["count"].clamp(min=1)}


@dataclass(frozen=True)
class OwnStep(Step):
    """Step that declares nothing; adds half of the mean to the proposal."""

    def __call__(self, turn: ServerTurn, state: State) -> State:
        turn.proposal = turn.proposal + turn.merged["model"] / 2
        return state


@pytest.mark.parametrize(
    "slots",
    [
        {"rule": OwnRule()},
        {"exchange": OwnExchange()},
        {"exchange": OwnExchange(), "aggregator": MaskedMean()},
        {"aggregator": OwnMean()},
        {"exchange": DrawnLayers(n=2), "aggregator": OwnMean()},
        {"steps": (OwnStep(),)},
        {"steps": (Apply(), OwnStep(), Momentum())},
        {"rule": OwnRule(), "exchange": OwnExchange(), "aggregator": OwnMean(), "steps": (OwnStep(), OwnStep())},
    ],
    ids=lambda slots: " ".join(slots),
)
def test_parts_that_declare_nothing_are_taken(slots: dict[str, Any], make_trainer: MakeTrainer) -> None:
    trained(Algorithm(**slots), make_trainer)


WRAPPERS = [found for found in map(partial(getattr, algorithms), algorithms.__all__) if "base" in parameters_of(found)]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_takes_a_method_with_rounds_that_has_no_such_wrapper_yet(wrapper: type[Algorithm]) -> None:
    with pytest.raises(UserError, match=r"base must be a method that trains .* in rounds, .* got FedKT"):
        wrapper(FedKT(mode="one_shot"))
    assert wrapper(FedKT(mode="init_fedavg")).base.name == "FedKT"
    assert wrapper(FedProx(0.1)).given_arguments["base"].rule.mu == 0.1
    for between in WRAPPERS:
        with pytest.raises(UserError, match="base must be a method that trains"):
            wrapper(between(wrapper()))


def test_there_are_wrappers() -> None:
    assert {"APFL", "Ditto", "FedBN", "FedDP"} <= {wrapper.__name__ for wrapper in WRAPPERS}

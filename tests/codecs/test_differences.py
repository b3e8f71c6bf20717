"""Test the bounds on the variance of unbiased codecs, and compressed differences of messages."""

import pytest
import torch
from torch import Tensor

from lightning_fl.algorithms import Algorithm
from lightning_fl.codecs import (
    EDEN,
    QSGD,
    Cast,
    Dense,
    Differences,
    EntropyCoded,
    ErrorFeedback,
    RandomK,
    TernGrad,
    TopK,
)
from lightning_fl.errors import UserError
from lightning_fl.exchanges import GradientTurn, OneShot
from lightning_fl.rules import CorrectedMomentum
from lightning_fl.slots import Codec, Draw, Message, Packed, Payload, RoundContext, State, Traits
from lightning_fl.steps import Accumulate, Apply, GradientMomentum
from lightning_fl.vectors.layout import NO_LAYOUT, Layout

D = 40
LAYOUT = Layout(("a", "b"), ((5, 6), (10,)))
VECTORS = {
    "normal": torch.randn(D, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
    "constant": torch.full((D,), -0.3, dtype=torch.float64),
    "spike": 0.01 + torch.eye(D, dtype=torch.float64)[7],
}


def context_of(seed: int = 0) -> RoundContext:
    return RoundContext(LAYOUT, NO_LAYOUT, num_clients=3, dtype=torch.float64, draw=Draw((seed, 0, 11), 0, "up"))


def sent(codec: Codec, x: Tensor, seed: int) -> Tensor:
    payload, _ = codec.encode({"model": x}, {}, context_of(seed))
    return codec.decode(payload, context_of(seed))["model"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("codec", "bound", "is_exact"),
    [
        (Dense(), 0.0, True),
        (RandomK(0.25), 3.0, True),
        (RandomK(1.0), 0.0, True),
        (RandomK(0.5, values=Dense()), 1.0, True),
        (RandomK(0.5, values=QSGD(2, bucket=8)), 2 * (1 + 2**0.5) - 1, False),
        (QSGD(1), D**0.5, False),
        (QSGD(8), D / 64, False),
        (QSGD(2, bucket=4), 1.0, False),
        (QSGD(2, norm="max"), D**0.5 / 2, False),
        (TernGrad(), D**0.5 - 1, False),
        (EntropyCoded(QSGD(1)), D**0.5, False),
    ],
    ids=str,
)
@pytest.mark.sampled(1)
def test_variance_is_within_its_bound(codec: Codec, bound: float, is_exact: bool) -> None:
    """Compare the mean of ‖C(x) − x‖²/‖x‖² over 400 draws with the bound; four standard errors are allowed."""
    assert codec.relative_variance(D) == pytest.approx(bound)
    for name, x in VECTORS.items():
        errors = torch.stack([(sent(codec, x, seed) - x).square().sum() / x.square().sum() for seed in range(400)])
        allowed = 4 * float(errors.std()) / 20 + 1e-9
        assert float(errors.mean()) <= bound + allowed, name
        assert not is_exact or float(errors.mean()) >= bound - allowed, name


class Own(Codec):
    """Codec of the user's that says nothing."""

    def encode(self, message: Message, memory: State, context: RoundContext) -> tuple[Payload, State]:
        return {name: Packed.whole(x) for name, x in message.items()}, {}

    def decode(self, payload: Payload, context: RoundContext) -> Message:
        return {name: packed.content for name, packed in payload.items()}


class Declared(Own):
    """The same, which declares what holds."""

    traits = Traits.UNBIASED | Traits.DELTAS_ONLY

    def relative_variance(self, numel: int) -> float:
        return 0.0


@pytest.mark.parametrize(
    "codec",
    [
        *(TopK(0.3), RandomK(0.3, "none"), RandomK(0.5, values=EDEN(1)), TernGrad(clip=2.5), Cast(stochastic=True)),
        *(ErrorFeedback(TopK(0.3)), Differences(Dense()), Own()),
    ],
    ids=lambda codec: type(codec).__name__,
)
def test_codecs_without_a_known_variance_are_refused_with_the_allowed_ones(codec: Codec) -> None:
    assert codec.relative_variance(D) is None
    with pytest.raises(UserError, match=r"known bound .* has none: give RandomK\(\), QSGD\(\), TernGrad") as error:
        Differences(codec)
    assert ("declare the traits that hold in its class" in str(error.value)) == isinstance(codec, Own)


def test_what_the_sender_keeps_is_what_has_arrived() -> None:
    """Check four messages of a sender: their sum is the estimate, and without loss it is the last vector, whatever a."""
    for codec, is_lossless in ((Differences(RandomK(0.3)), False), (Differences(Declared(), momentum=0.3), True)):
        memory: State = {}
        total = torch.zeros(D, dtype=torch.float64)
        for turn, x in enumerate([*VECTORS.values(), VECTORS["normal"]]):
            payload, memory = codec.encode({"model": x}, memory, context_of(turn))
            total = total + codec.decode(payload, context_of(turn))["model"]
            torch.testing.assert_close(memory["estimate/model"], total, rtol=0, atol=1e-12)
            assert torch.equal(memory["last/model"], x)
            assert (float((total - x).abs().max()) < 1e-12) == is_lossless


@pytest.mark.parametrize(
    ("slots", "words"),
    [
        ({"uplink": Differences(Dense())}, ["Differences sends differences", "no step adds up", "Accumulate()"]),
        ({"steps": [Accumulate()]}, ["Accumulate adds up differences", "Dense sends none", "Differences(Dense(…))"]),
        ({"uplink": Differences(Dense()), "steps": [Apply(), Accumulate()]}, ["the work of Apply is thrown away"]),
        (
            {"uplink": Differences(Dense()), "steps": [Accumulate()]},
            ["Accumulate needs the mean of 'model' with equal weights"],
        ),
        (
            {
                "rule": CorrectedMomentum(),
                "exchange": GradientTurn(OneShot()),
                "uplink": Differences(Dense()),
                "steps": [Apply(), GradientMomentum()],
            },
            ["Differences needs 'model'", "before the training"],
        ),
    ],
)
def test_neighbours_that_do_not_fit_are_refused(slots: dict[str, object], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        Algorithm(**slots)  # type: ignore[arg-type]
    assert [word for word in words if word not in str(error.value)] == []

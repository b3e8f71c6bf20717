"""Test how often verdicts are wrong on methods that do not differ: exchanging the two runs of a seed changes only their names."""

from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from lightning_fl.report.comparison import Curve, Metric
from lightning_fl.report.records import Record
from lightning_fl.study.claims import Claim, corrected
from lightning_fl.study.pairs import Pair

ROUNDS, SEEDS, TRIALS = 40, 3, 300
METRIC = Metric("val/accuracy", target=0.5, window=9)
MOST_FALSE = 0.06


def runs() -> Iterator[tuple[Curve, Curve]]:
    """Generate pairs of runs of a method: they share what their seed decides, and the noise of their rounds is their own."""
    random = np.random.default_rng(0)
    rounds = np.arange(ROUNDS, dtype=float)
    shape = 0.8 * (1 - np.exp(-(rounds + 1) / 12))
    while True:
        of_seed = random.normal(0, 0.02)
        pair = []
        for _ in range(2):
            noise = np.convolve(random.normal(0, 0.02, ROUNDS + 4), np.ones(5) / 2, "valid") * np.exp(-rounds / 40)
            columns = {
                "round": rounds,
                "val/accuracy": np.clip(shape + of_seed + noise, 0.01, 0.99),
                "test/accuracy": np.clip(shape + of_seed + noise + random.normal(0, 0.01, ROUNDS), 0.01, 0.99),
                **{f"comm/total_{way}_bytes": 10 * (rounds + 1) for way in ("uplink", "downlink")},
                "time/simulated_seconds": np.cumsum(random.uniform(1, 2, ROUNDS)),
            }
            pair.append(Curve(Record(Path("run"), columns, {}, "FedAvg", None, ()), METRIC))
        yield pair[0], pair[1]


@pytest.fixture(scope="module")
def samples() -> list[tuple[tuple[Curve, Curve], ...]]:
    """Return many studies of three seeds."""
    pairs = runs()
    return [tuple(next(pairs) for _ in range(SEEDS)) for _ in range(TRIALS)]


def exchanged(pairs: list[Pair]) -> Iterator[list[Pair]]:
    """Generate the pairs with all exchanges of the two runs of a seed."""
    for flips in product([False, True], repeat=len(pairs)):
        yield [Pair(pair.than, pair.better) if flip else pair for pair, flip in zip(pairs, flips, strict=True)]


@pytest.mark.parametrize(
    "number", ["final", "last", "best", "at_best_validation", "mean", "target_rounds", "at_uplink", "simulated_seconds"]
)
@pytest.mark.matrix
def test_methods_that_do_not_differ_are_rarely_told_apart(
    number: str, samples: list[tuple[tuple[Curve, Curve], ...]]
) -> None:
    is_ratio = number in ("target_rounds", "simulated_seconds")
    between = (21, 40) if number == "mean" else None
    claim = Claim("a is better", "a", "b", number, 0.8 if is_ratio else 0.02, between=between)
    outcomes = Counter[str]()
    for sample in samples:
        curves = {name: {seed: pair[at] for seed, pair in enumerate(sample)} for at, name in enumerate("ab")}
        pairs = claim.pairs(curves)
        outcomes.update(claim.judge(each, METRIC).outcome.partition(", as")[0] for each in exchanged(pairs))
    undecided = outcomes["not reproduced: undecided"]
    assert outcomes.total() == TRIALS * 2**SEEDS
    assert 0 < outcomes.total() - undecided <= MOST_FALSE * outcomes.total(), outcomes


@pytest.mark.parametrize("margin", [0.0, 0.02])
def test_a_loss_of_the_margin_is_rarely_called_smaller_or_larger(margin: float) -> None:
    """Test losses that are as large as the margin, so that every verdict but undecided is wrong, after the correction too."""
    random = np.random.default_rng(1)
    claim = Claim("a loses little", "a", "b", "final", 0.01, margin=margin)
    decided = after = 0
    for _ in range(TRIALS):
        than = random.normal(0.5, 0.01, (10, 5))
        better = than + random.normal(-margin, 0.01, (10, 5))
        verdicts = [
            claim.judge(list(map(Pair, a.tolist(), b.tolist())), METRIC) for a, b in zip(better, than, strict=True)
        ]
        decided += sum("undecided" not in verdict.outcome for verdict in verdicts)
        after += any(said.startswith("stands") for said in corrected(verdicts))
    assert decided <= MOST_FALSE * 10 * TRIALS
    assert after <= MOST_FALSE * TRIALS, "at least one false verdict among ten claims of which all are false"


@pytest.mark.parametrize("what", ["right answers", "rounds", "ceiling"])
def test_no_more_verdicts_on_equal_methods_stand_than_the_correction_allows(what: str) -> None:
    """Test the share of studies in which a verdict on one of twelve claims stands although no methods differ.

    Accuracies are shares of 360 test samples in single precision and costs whole rounds, so that differences are often the same;
    with a ceiling only the other sign can be seen.
    """
    random = np.random.default_rng(2)
    claim = {
        "right answers": Claim("a is better", "a", "b", "final"),
        "rounds": Claim("a is faster", "a", "b", "target_rounds"),
        "ceiling": Claim("a is better", "a", "b", "final", 0.1),
    }[what]
    centre, of_seed, of_run = {"right answers": (324, 5, 0.7), "rounds": (50, 1, 0.7), "ceiling": (342, 2, 1)}[what]
    stands = 0
    for _ in range(TRIALS):
        runs = random.normal(centre, of_run, (12, 2, SEEDS)) + random.normal(0, of_seed, (12, 1, SEEDS))
        values = np.round(runs) if what == "rounds" else (np.round(runs) / 360).astype(np.float32).astype(float)
        verdicts = [claim.judge(list(map(Pair, better, than)), METRIC) for better, than in values.tolist()]
        stands += any(said.startswith("stands") for said in corrected(verdicts))
    assert stands <= MOST_FALSE * TRIALS

"""Claims of a paper or of your own, and whether the runs of a study bear them out.

    text: the claim in words
    better, than: two cells of the study
    in: what is compared
        final (the default), last, best (of the smoothed curve, for papers that print it), at_best_validation:
            as in the report's table
        target_rounds, target_uplink, target_downlink, target_simulated_seconds, target_joules: the cost of reaching the target
        at_uplink: each one's best value (not smoothed) within the uplink bytes that `better` has spent after its last round
        largest_gap: both smoothed curves in the round in which they differ most
    rounds: of at_uplink, the round of `better` whose bytes count instead; to be chosen before anything is run
    paper: what the paper has: the difference better − than of two values, the ratio better / than of two costs;
        without it the claim only says that one is better
    source: where the paper has it, and what statistic it is
    margin: how much worse `better` may be than `than` in a claim that little is lost (0 if not given; not for a cost)

Runs are paired by seed. A claim is reproduced in sign if the mean difference (of logarithms, for a ratio) is on the paper's
side of −margin and its 95 % interval by Student's t does not contain −margin; it is reproduced in size if the interval also
contains the paper's value. For a metric that falls, +margin takes the place of −margin. A claim without a paper's value
holds if the interval lies on the better side: above 0, for a cost below 1, and for a metric that falls below 0.

A gain of a paper cannot be seen where `than` leaves less room than the gain, as an accuracy cannot exceed 1 nor a loss fall
below 0. One seed has no interval, so it reproduces nothing: it is ahead or behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf, isinf, log
from statistics import fmean, stdev
from typing import Any

import numpy as np

from lightning_fl.checks import as_number, check_choice, check_whole, is_real
from lightning_fl.errors import nearest, require
from lightning_fl.outputs.metric import FINAL, is_accuracy, spend
from lightning_fl.report.comparison import ENDS, VALUES, Curve, Metric
from lightning_fl.report.document import Table

LEGEND = (
    f"`final` is {FINAL}; `{VALUES['best']}` is chosen on the values that it reports. "
    "Runs are paired by seed. In sign: the 95 % interval of the mean (Student's t) lies on the paper's side of 0, for a ratio "
    "of 1, with a margin of −margin; in size: it also contains the paper's value. A claim without a paper's value holds if the "
    "interval lies on the better side. A gain cannot be seen if the other one leaves less room up to 1 than the paper's gain. "
    "One seed has no interval and reproduces nothing."
)
WITHIN = (
    "Within the same bytes: the best value of each, not smoothed, that the uplink bytes of the first one's last round have paid "
    "for. `over log bytes` is the mean difference of these best values on a logarithmic scale, from the bytes for which both "
    "have been evaluated."
)
COSTS = ("target_rounds", "target_uplink", "target_downlink", "target_simulated_seconds", "target_joules")
AT_UPLINK, LARGEST_GAP = "at_uplink", "largest_gap"
NUMBERS = (*VALUES, *COSTS, AT_UPLINK, LARGEST_GAP)
KEYS = ("text", "better", "than", "in", "rounds", "paper", "source", "margin")
NEEDED = ("text", "better", "than")
NOT_RUN = "not run yet"


@dataclass(frozen=True)
class Pair:
    """Values of two runs of the same seed that a claim compares.

    Attributes:
        better, than: numbers of both; None are costs of a target that was not reached, or that the run does not count, the value
            at the best validation of a run that tested nothing, the best within bytes that pay for no evaluation, the end of
            a run that has diverged, and all numbers of a run without a finite value.
        area: difference of the means over the logarithm of the bytes; None for other numbers than `at_uplink`.
        lacks: why a number is None if this is not the usual reason; ends in a preposition.
    """

    better: float | None
    than: float | None
    area: float | None = None
    lacks: str = ""


@dataclass(frozen=True)
class Claim:
    """Claim that one cell is better than another.

    Attributes:
        text: the claim in words.
        better: name of a cell.
        than: name of another cell.
        number: what is compared, of `NUMBERS`.
        paper: the paper's difference or, for a cost, ratio; None for a claim that only says which is better.
        margin: how much worse `better` may be than `than`.
        rounds: round of `better` whose bytes count for `at_uplink`; None for its last one.
        source: where the paper has its figure, and what statistic it is.
    """

    text: str
    better: str
    than: str
    number: str
    paper: float | None = None
    margin: float = 0.0
    rounds: int | None = None
    source: str = ""

    @property
    def is_ratio(self) -> bool:
        """True if a cost is compared."""
        return self.number in COSTS

    @property
    def compared(self) -> str:
        """Describe in words the values that are compared."""
        if self.number == AT_UPLINK:
            after = "" if self.rounds is None else f" after {self.rounds} rounds"
            what = f"best within the bytes of {self.better}{after}"
        else:
            what = VALUES.get(self.number, self.number.replace("_", " "))
        return f"{what}: {self.better}{' / ' if self.is_ratio else ' − '}{self.than}"

    def pairs(self, curves: Mapping[str, Mapping[int, Curve | None]]) -> list[Pair]:
        """Return what is compared for each seed of which both cells have a run; the curve of one that is never finite is None."""
        ours, theirs = curves.get(self.better, {}), curves.get(self.than, {})
        return [self._pair(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]

    def _pair(self, ours: Curve | None, theirs: Curve | None) -> Pair:
        if ours is None or theirs is None:
            better, than = (None if curve is None else float(curve.raw[-1]) for curve in (ours, theirs))
            return Pair(better, than, lacks="there is no finite value of")
        if self.number == AT_UPLINK:
            return _within(ours, theirs, self.rounds)
        if self.number == LARGEST_GAP:
            return _most_different(ours, theirs)
        better, than = ours.numbers.get(self.number), theirs.numbers.get(self.number)
        uncounted = self.is_ratio and any(
            curve.numbers.get(self.number) is None and curve.numbers.get("target_rounds") is not None
            for curve in (ours, theirs)
        )
        cost = self.number.removeprefix("target_").replace("_", " ")
        return Pair(better, than, lacks=f"no {cost} are counted by" * uncounted)

    def judge(self, pairs: Sequence[Pair], metric: Metric) -> Verdict:
        """Return the verdict on what is compared for each seed."""
        if not pairs:
            return Verdict(NOT_RUN, 0)
        yes, no = ("holds", "does not hold") if self.paper is None else ("reproduced in sign", "not reproduced")
        is_one = len(pairs) == 1
        compared = [(pair.better, pair.than) for pair in pairs if pair.better is not None and pair.than is not None]
        if len(compared) < len(pairs):
            missing = {
                self.better: sum(pair.better is None for pair in pairs),
                self.than: sum(pair.than is None for pair in pairs),
            }
            said = ", ".join(f"{name} in {n} of {len(pairs)}" for name, n in missing.items() if n)
            lacks = next((pair.lacks for pair in pairs if pair.lacks), self._lacks())
            return Verdict(f"{'one seed' if is_one else no}: {lacks} {said}", len(pairs))
        if self.is_ratio and not all(a > 0 and b > 0 for a, b in compared):
            free = self.better if any(a <= 0 for a, _ in compared) else self.than
            return Verdict(f"{'one seed' if is_one else no}: there is no ratio, as {free} costs nothing", len(pairs))
        effects = [log(a / b) if self.is_ratio else a - b for a, b in compared]
        mean, (low, high) = fmean(effects), student_interval(effects)
        falls = metric.falls
        border = self.margin if falls else 0 - self.margin  # not -0
        if self.paper is None:
            paper = -inf if self.is_ratio or falls else inf
        else:
            paper = log(self.paper) if self.is_ratio else self.paper
        lowest, highest = (mean, mean) if is_one else (low, high)
        is_behind = highest < border if paper > border else lowest > border
        room = inf if self.is_ratio else room_left(fmean(b for _, b in compared), metric)
        if self.paper is not None and (-paper if falls else paper) > room and not is_behind:
            outcome = f"cannot be seen here: {self.than} leaves {shown(room)}"
        elif is_one:
            outcome = f"one seed: {self._side(mean, border, falls)}"
        elif (lowest > border) if paper > border else (highest < border):
            outcome = "reproduced in size" if low <= paper <= high else yes
        elif is_behind:
            outcome = f"{no}: the other sign"
        else:
            without = "" if isinf(paper) or low <= paper <= high else ", and not the paper's value"
            outcome = f"{no}: undecided, as the interval contains {exp(border) if self.is_ratio else border:g}{without}"
        # The noise of single precision in equal values reads as 0.
        noise = 0 if self.is_ratio else 1e-6 * max(abs(a) for a, _ in compared)
        mean, low, high = (exp(x) if self.is_ratio else x for x in (mean if abs(mean) > noise else 0.0, low, high))
        areas = [pair.area for pair in pairs if pair.area is not None]
        area = fmean(areas) if len(areas) == len(pairs) else None
        return Verdict(outcome, len(effects), mean, low, high, area)

    def _lacks(self) -> str:
        """Return what a run lacks that has no number."""
        if self.is_ratio:
            return "the target was not reached by"
        if self.number == AT_UPLINK:
            return "the bytes pay for no evaluation of"
        if self.number in ENDS:
            return "there is no finite value at the end of"
        return "there is no test value at the best validation of"

    def _side(self, effect: float, border: float, falls: bool) -> str:
        """Return on which side of the border the only seed is."""
        if self.margin:
            return f"{'within' if (effect < border if falls else effect > border) else 'beyond'} the margin"
        if effect == 0:
            return "level"
        return "ahead" if (effect < 0) == (self.is_ratio or falls) else "behind"


@dataclass(frozen=True)
class Verdict:
    """Outcome of a claim.

    Attributes:
        outcome: in words.
        num_seeds: pairs of runs.
        mean: mean difference or ratio; None if it cannot be computed.
        low, high: its 95 % interval; infinite for one seed.
        area: mean difference over the logarithm of the bytes; None for other numbers than `at_uplink`.
    """

    outcome: str
    num_seeds: int
    mean: float | None = None
    low: float = -inf
    high: float = inf
    area: float | None = None

    def interval(self, is_ratio: bool) -> str:
        """Return the 95 % interval as text; empty if there is none."""
        if self.mean is None or self.num_seeds < 2:
            return ""
        return f"{shown(self.low, is_ratio)} to {shown(self.high, is_ratio)}"


def room_left(value: float, metric: Metric) -> float:
    """Return how much better than a value another can be: an accuracy has 1 above it, a loss or an error 0 below it.

    A value beyond it, such as an accuracy in per cent or the negative logarithm of a density, shows that there is no bound.
    """
    room = value if metric.falls else 1 - value if is_accuracy(metric.name) else inf
    return room if room >= 0 else inf


def _within(ours: Curve, theirs: Curve, rounds: int | None) -> Pair:
    """Return the best values of two runs within the uplink bytes that the first has spent, and how they differ over log bytes."""
    record = ours.record
    if rounds is not None and record.num_rounds < rounds:
        return Pair(None, float(theirs.raw[-1]), lacks=f"there are no {rounds} rounds of")
    spent = record.spent["uplink"][record.spent["rounds"] <= (inf if rounds is None else rounds)]
    if not len(spent) or np.isnan(spent[-1]):
        return Pair(None, None)
    high = float(spent[-1])
    sign = -1 if ours.metric.falls else 1
    sent = [curve.axis("uplink") for curve in (ours, theirs)]
    values = [sign * curve.raw[of <= high] for curve, of in zip((ours, theirs), sent, strict=True)]
    best, other = (sign * float(reached.max()) if len(reached) else None for reached in values)
    area, low = None, max(float(of[0]) for of in sent)
    if all(map(len, values)) and 0 < low < high:
        first, second = (
            spend(bytes_sent[: len(reached)], reached, low, high, float(reached.min())).area
            for bytes_sent, reached in zip(sent, values, strict=True)
        )
        area = sign * (first - second)
    return Pair(best, other, area)


def _most_different(ours: Curve, theirs: Curve) -> Pair:
    """Return both smoothed values in the common round in which they differ most, whichever is ahead there."""
    _, first, second = np.intersect1d(ours.axis("rounds"), theirs.axis("rounds"), return_indices=True)
    if not len(first):
        return Pair(None, None, lacks="there is no common round of")
    a, b = ours.smoothed[first], theirs.smoothed[second]
    at = int(np.abs(a - b).argmax())
    return Pair(float(a[at]), float(b[at]))


def read_claims(content: Any, cells: Sequence[str], has_target: bool) -> tuple[Claim, ...]:
    """Return the claims of a study file.

    Raises:
        UserError: a claim has an unknown key, cell or number, or lacks one.
    """
    require(isinstance(content, list), f"claims must be a list, got {content!r}.")
    claims = []
    for entry in content:
        require(isinstance(entry, dict), f"a claim has the keys {', '.join(KEYS)}; got {entry!r}.")
        for key in entry:
            require(key in KEYS, f"a claim has the key {key!r}; {nearest(str(key), KEYS)}.")
        for key in NEEDED:
            require(key in entry, f"the claim {entry.get('text', entry)!r} needs the key {key!r}.")
        entry = {**entry, "better": str(entry["better"]), "than": str(entry["than"])}
        number = str(entry.get("in", "final"))
        check_choice(f"in of the claim {entry['text']!r}", number, NUMBERS)
        for name in (entry["better"], entry["than"]):
            require(name in cells, f"the claim {entry['text']!r} is about {name!r}; {nearest(str(name), cells)}.")
        require(has_target or number not in COSTS, f"the claim {entry['text']!r} compares {number}: give a target.")
        rounds = entry.get("rounds")
        if rounds is not None:
            require(
                number == AT_UPLINK,
                f"rounds of the claim {entry['text']!r} is for `in: {AT_UPLINK}`, got `in: {number}`.",
            )
            check_whole(f"rounds of the claim {entry['text']!r}", rounds, 1)
        paper, is_ratio = as_number(entry.get("paper")), number in COSTS
        is_allowed = paper is None or (is_real(paper) and (paper > 0 and paper != 1 if is_ratio else paper != 0))
        what = "a ratio above 0 other than 1" if is_ratio else "a difference other than 0"
        require(is_allowed, f"paper of the claim {entry['text']!r} must be {what}, got {paper!r}.")
        margin = as_number(entry.get("margin", 0))
        require(
            is_real(margin) and margin >= 0 and (paper is None or margin != abs(paper)) and not (margin and is_ratio),
            f"margin of the claim {entry['text']!r} must be a difference of 0 or more other than paper's, and a cost has none, "
            f"got {margin!r}.",
        )
        source = entry.get("source", "")
        require(isinstance(source, str), f"source of the claim {entry['text']!r} must be words, got {source!r}.")
        claims.append(
            Claim(
                str(entry["text"]),
                entry["better"],
                entry["than"],
                number,
                None if paper is None else float(paper),
                float(margin),
                rounds,
                source,
            )
        )
    return tuple(claims)


def claims_table(claims: Sequence[Claim], verdicts: Sequence[Verdict]) -> Table:
    """Return the claims and their verdicts."""
    has_area, has_source = any(claim.number == AT_UPLINK for claim in claims), any(claim.source for claim in claims)
    rows = []
    for claim, verdict in zip(claims, verdicts, strict=True):
        paper = "" if claim.paper is None else f"{claim.paper:.3g}"
        mean = "–" if verdict.mean is None else shown(verdict.mean, claim.is_ratio)
        area = "" if verdict.area is None else shown(verdict.area)
        words = [claim.text, claim.compared, *[claim.source] * has_source, verdict.outcome]
        numbers = [paper, mean, verdict.interval(claim.is_ratio) or "–", *[area] * has_area, str(verdict.num_seeds)]
        rows.append([*words, *numbers])
    header = ["claim", "compared", *["in the paper"] * has_source, "verdict"]
    numbers = ["paper", "here", "95 % interval", *["over log bytes"] * has_area, "seeds"]
    return Table([*header, *numbers], rows, num_texts=len(header))


def legend(claims: Sequence[Claim]) -> list[str]:
    """Return how to read the table of these claims."""
    return [LEGEND, *[WITHIN] * any(claim.number == AT_UPLINK for claim in claims)]


def shown(value: float, is_ratio: bool = False) -> str:
    """Return a difference with three decimals, or more where it would read as 0, and a ratio with two figures.

    >>> [shown(value) for value in (0.0327, -0.00421, 0.000333, 0, 12.5)]
    ['0.033', '-0.004', '0.0003', '0', '12.500']
    >>> [shown(value, is_ratio=True) for value in (0.117, 0.978, 1.22, 31.4)]
    ['0.12', '0.98', '1.2', '31']
    """
    if is_ratio:
        return f"{value:#.2g}" if value < 9.95 else f"{value:,.0f}"
    text = f"{value:.3f}"
    return text if float(text) else f"{value:.1g}"


def student_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean by Student's t; infinite for one value."""
    if len(values) < 2:
        return -inf, inf
    from scipy.stats import t

    half = float(t.ppf(0.975, len(values) - 1)) * stdev(values) / len(values) ** 0.5
    return fmean(values) - half, fmean(values) + half

"""Claims of a paper or of your own, and the verdict of a study's runs on them; `claims_file` reads them.

Runs are paired by seed. A claim is reproduced in sign if the mean difference (of logarithms, for a ratio) is on the paper's
side of 0 and its 95 % interval by Student's t does not contain 0; it is reproduced in size if the interval also contains the
paper's value and is no wider than this value. With a margin, −margin replaces 0, or +margin for a metric that falls; an interval
beyond the margin that does not show the paper's sign only counts as within the margin. A claim without a paper's value only says
which cell is better. A difference below the floor, which a method shows from itself (`floor` of the study), shows nothing.

A paper's gain has a ceiling effect if `than` leaves less room than the gain, because an accuracy cannot exceed 1 nor a loss fall
below 0. One seed has no interval, so it reproduces nothing: it is ahead or behind. Nor does a difference that is the same in all
seeds, as that of two numbers of rounds or of right answers may be by chance, unless it is 0 or that of a cost that need not vary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import exp, inf, isinf, log
from statistics import fmean

from lightning_fl.errors import UserError
from lightning_fl.outputs.metric import FINAL, is_accuracy
from lightning_fl.outputs.traffic import COSTS as BYTES_OF
from lightning_fl.outputs.units import in_bytes
from lightning_fl.report.comparison import ENDS, VALUES, Curve, Metric
from lightning_fl.report.document import Table
from lightning_fl.study.pairs import Pair, bests_within, means_between, rises_of
from lightning_fl.study.statistics import LEVEL, SAME, adjusted, noise_of, student_interval, student_p

LEGEND = (
    f"`final` is {FINAL}; `{VALUES['best']}` is chosen on the values that it reports. "
    "Runs are paired by seed. In sign: the 95 % interval of the mean (Student's t) lies on the paper's side of 0, or of 1 for a "
    "ratio; in size: it also contains the paper's value and is no wider than it. Within the margin: the interval lies above "
    "−margin, but does not show the paper's sign. A claim without a paper's value holds if the interval lies on the better side. "
    "Ceiling effect: the other method leaves less room up to 1 than the paper's gain. One seed has no interval and "
    f"reproduces nothing. After the correction of Benjamini and Hochberg for all these claims, a verdict stands if q ≤ {LEVEL}."
)
FLOOR = "Below the floor: by the 95 % interval of the mean, a method may differ from itself by as much."
WITHIN = (
    "Within the same bytes: the best value of each, not smoothed, within the bytes that the first one has sent after its last "
    "round, or within the named bytes. A method that is evaluated more often within them has more values to choose from, and so "
    "is a little ahead of an equal one. `over log bytes` is the mean difference of these best values on a logarithmic scale, "
    "from the bytes for which both have been evaluated."
)
BYTES = tuple(BYTES_OF.values())
TARGET_COSTS = ("target_rounds", *(f"target_{name}" for name in BYTES), "target_simulated_seconds", "target_joules")
RUN_COSTS = (*BYTES, "simulated_seconds", "joules", "mflops", "parameters")
COSTS = (*TARGET_COSTS, *RUN_COSTS)
AT_BYTES = {f"at_{name}": name for name in BYTES}
"""Costs within which the best values are compared, by the names of such comparisons."""
MEAN, NEVER, RISE = "mean", "never_reached", "rise"
NUMBERS = (*VALUES, MEAN, RISE, *COSTS, *AT_BYTES, NEVER)
NOT_RUN = "not run yet"


@dataclass(frozen=True)
class Claim:
    """Claim that one cell is better than another.

    Attributes:
        text: the claim in words.
        better: name of a cell.
        than: name of another cell.
        number: number that is compared, one of `NUMBERS`.
        paper: the paper's difference or, for a cost, ratio; None for a claim that only says which is better.
        margin: how much worse `better` may be than `than`.
        rounds: round of `better` whose bytes count in a comparison at bytes; None for its last one.
        source: place of the figure in the paper, and its statistic.
        between: first and last round of `mean`; None for other numbers.
        num_bytes: bytes of a comparison at bytes; None for the bytes that `better` has spent.
        metrics: columns to compare in place of the study's metric; the first that a run has counts. Empty for that metric.
        target: value to reach; None if the number has none.
    """

    text: str
    better: str
    than: str
    number: str
    paper: float | None = None
    margin: float = 0.0
    rounds: int | None = None
    source: str = ""
    between: tuple[int, int] | None = None
    num_bytes: float | None = None
    metrics: tuple[str, ...] = ()
    target: float | None = None

    @property
    def is_ratio(self) -> bool:
        """True if a cost is compared."""
        return self.number in COSTS

    @property
    def is_of_paper(self) -> bool:
        """True if a paper makes the claim."""
        return self.paper is not None or bool(self.source)

    @property
    def compared(self) -> str:
        """Describe in words the values that are compared, and their cells."""
        cells = self.than if self.number == NEVER else f"{self.better}{' / ' if self.is_ratio else ' − '}{self.than}"
        return f"{self.what}: {cells}"

    @property
    def what(self) -> str:
        """Describe in words the number that is compared."""
        what = VALUES.get(self.number, self.number.removeprefix("target_").replace("_", " "))
        if self.target is not None:
            what += f" to {self.target:g}"
        if self.between is not None:
            what = f"mean of rounds {self.between[0]} to {self.between[1]}"
        if self.number in AT_BYTES:
            after = "" if self.rounds is None else f" after {self.rounds} rounds"
            sent = f"the {self._bytes} of {self.better}{after}"
            what = f"best within {sent if self.num_bytes is None else f'{in_bytes(self.num_bytes)} of {self._bytes}'}"
        if self.metrics:
            what += f" of {' or '.join(self.metrics)}"
        return what

    @property
    def _bytes(self) -> str:
        """Name of the bytes within which values are compared."""
        return AT_BYTES[self.number].replace("_", " ")

    def pairs(self, curves: Mapping[str, Mapping[int, Curve | None]], payer: str = "") -> list[Pair]:
        """Return the compared values for each seed of which both cells have a run.

        Whether a target is never reached is asked of `than` alone.

        Args:
            curves: curves by cell and seed; None if one has no finite value.
            payer: cell within whose bytes accuracies are compared if the claim names no number of bytes; by default `better`.
        """
        ours, theirs, paying = (curves.get(cell, {}) for cell in (self.better, self.than, payer or self.better))
        seeds = theirs.keys() if self.number == NEVER else ours.keys() & theirs.keys()
        found = ([self._own(of.get(seed)) for of in (ours, theirs, paying)] for seed in sorted(seeds))
        return [self._pair(*of_seed) for of_seed in found]

    def _own(self, curve: Curve | None) -> Curve | None:
        """Return the curve of the claim's own metric, if it has one."""
        if curve is None or not self.metrics:
            return curve
        with suppress(UserError):  # the run lacks the column, or has no finite value of it
            return Curve(curve.record, self._metric_of(curve))
        return None

    def _metric_of(self, curve: Curve) -> Metric:
        """Return the metric of a run that is compared: the study's, or the claim's own in the mode that the run gives it."""
        if not self.metrics:
            return curve.metric
        name = next((name for name in self.metrics if name in curve.record.columns), self.metrics[0])
        known = {} if curve.record.metric is None else {curve.record.metric["name"]: curve.record.metric["mode"]}
        mode = curve.metric.mode if name == curve.metric.name else known.get(name)
        return Metric(name, None, curve.metric.window, mode)

    def metric_in(self, curves: Mapping[str, Mapping[int, Curve | None]], metric: Metric) -> Metric:
        """Return the metric in which the runs are compared; the study's if no run is there."""
        runs = (curve for cell in (self.better, self.than) for curve in curves.get(cell, {}).values())
        return next((self._metric_of(curve) for curve in runs if curve is not None), metric)

    def _pair(self, ours: Curve | None, theirs: Curve | None, payer: Curve | None) -> Pair:
        if self.number == NEVER:
            return Pair(None, None if theirs is None else theirs.numbers.get("target_rounds"))
        if ours is None or theirs is None:
            better, than = (None if curve is None else float(curve.raw[-1]) for curve in (ours, theirs))
            return Pair(better, than, lacks=f"there is no finite {' or '.join(self.metrics) or 'value'} of")
        if self.number in AT_BYTES:
            return self._within_bytes(ours, theirs, payer)
        if self.between is not None:
            return means_between(ours, theirs, *self.between)
        if self.number == RISE:
            return rises_of(ours, theirs)
        name = self.number
        better, than = ours.numbers.get(name), theirs.numbers.get(name)
        # A run has all costs of the whole run, and of a target that it has reached, except those that it does not count.
        uncounted = self.is_ratio and any(
            curve.numbers.get(name) is None and (name in RUN_COSTS or curve.numbers.get("target_rounds") is not None)
            for curve in (ours, theirs)
        )
        cost = name.removeprefix("target_").replace("_", " ")
        return Pair(better, than, lacks=f"no {cost} are counted by" * uncounted)

    def _within_bytes(self, ours: Curve, theirs: Curve, payer: Curve | None) -> Pair:
        """Return the best values of two runs within the same bytes, and their difference over log bytes."""
        if self.num_bytes is not None:
            return bests_within(ours, theirs, AT_BYTES[self.number], self.num_bytes)
        if payer is None:
            return Pair(None, None, lacks="the bytes are unknown for")
        if payer.record.num_rounds < (self.rounds or 0):
            return Pair(None, float(theirs.raw[-1]), lacks=f"there are no {self.rounds} rounds of")
        spent = payer.record.spent
        paid = spent[AT_BYTES[self.number]][spent["rounds"] <= (inf if self.rounds is None else self.rounds)]
        return bests_within(ours, theirs, AT_BYTES[self.number], float(paid[-1])) if len(paid) else Pair(None, None)

    def effects(self, pairs: Sequence[Pair]) -> list[float] | None:
        """Return differences, without the noise of equal values, or logarithms of ratios; None unless every pair has one."""
        compared = [(pair.better, pair.than) for pair in pairs if pair.better is not None and pair.than is not None]
        if len(compared) < len(pairs) or (self.is_ratio and not all(a > 0 and b > 0 for a, b in compared)):
            return None
        return [log(a / b) if self.is_ratio else a - b if abs(a - b) > noise_of(a, b) else 0.0 for a, b in compared]

    def floor(self, runs: Sequence[tuple[str, str]], curves: Mapping[str, Mapping[int, Curve | None]]) -> float | None:
        """Return the largest mean effect that the 95 % interval of a method against itself contains; None if it is unknown.

        Args:
            runs: pairs of cells that are the same method.
            curves: curves by cell and seed.
        """
        ends = list[float]()
        for first, second in runs:
            same = replace(self, better=first, than=second)
            effects = same.effects(same.pairs(curves, payer=self.better))
            if effects is not None and len(effects) > 1:
                ends += student_interval(effects)
        return max(map(abs, ends), default=None)

    def why_no_floor(self, runs: Sequence[tuple[str, str]], curves: Mapping[str, Mapping[int, Curve | None]]) -> str:
        """Return the reason why the floor is unknown, in words."""
        same = [replace(self, better=first, than=second) for first, second in runs]
        pairs = [(claim, claim.pairs(curves, payer=self.better)) for claim in same]
        return next(claim._missing(of) for claim, of in pairs if len(of) > 1)

    def shown_floor(self, floor: float) -> str:
        """Return a floor as text: a difference or, for a cost, a factor."""
        return f"{exp(floor):.3g}" if self.is_ratio else shown(floor)

    def judge(self, pairs: Sequence[Pair], metric: Metric, floor: float | None = None) -> Verdict:
        """Return the verdict on the values of each seed.

        Args:
            pairs: compared values for each seed.
            metric: metric of the values.
            floor: effect up to which a method differs from itself; None if it is unknown.
        """
        if not pairs:
            return Verdict(NOT_RUN, 0)
        is_one = len(pairs) == 1
        if self.number == NEVER:
            return Verdict(self._never(pairs), len(pairs))
        no = "not reproduced" if self.is_of_paper else "does not hold"
        effects = self.effects(pairs)
        if effects is None:
            return Verdict(f"{'one seed' if is_one else no}: {self._missing(pairs)}", len(pairs))
        falls = metric.falls
        border = self.margin if falls else 0 - self.margin  # not -0
        if self.paper is None:
            paper = -inf if self.is_ratio or falls else inf
        else:
            paper = log(self.paper) if self.is_ratio else self.paper
        noise = SAME if self.is_ratio else min(noise_of(pair.better or 0.0, pair.than or 0.0) for pair in pairs)
        mean, (low, high) = fmean(effects), student_interval(effects)
        lowest, highest = (mean, mean) if is_one else (low, high)
        is_ahead, is_behind = lowest > border, highest < border
        if paper < border:
            is_ahead, is_behind = is_behind, is_ahead
        others = [pair.than for pair in pairs if pair.than is not None]
        room = inf if self.is_ratio or self.number == RISE else room_left(fmean(others), metric)
        are_alike = not is_one and self._are_alike(pairs, effects, noise)
        # Costs of whole runs need not vary, and runs that are the same in every seed lose nothing.
        is_known = are_alike and (self.number in RUN_COSTS or mean == 0)
        p = None if is_one or (is_known and (self.number in RUN_COSTS or border)) else student_p(effects, border, noise)
        has_ceiling = self.paper is not None and (-paper if falls else paper) > room and not is_behind
        is_below = floor is not None and abs(mean) <= floor
        has_sign = (low > 0 if paper > 0 else high < 0) and not (self.margin and is_below)
        if has_ceiling:
            # It could have shown the other sign, and so counts in the correction.
            outcome, p = f"ceiling effect: {self.than} leaves {shown(room)}", None if is_one else 1.0
        elif is_one:
            outcome = f"one seed: {self._side(mean, border, falls)}"
        elif not is_ahead and not is_behind:
            without = "" if isinf(paper) or low <= paper <= high else ", and not the paper's value"
            outcome = f"{no}: undecided, as the interval contains {exp(border) if self.is_ratio else border:g}{without}"
        elif floor is not None and is_below and (is_behind or not self.margin):
            outcome, p = f"{no}: below the floor of {self.shown_floor(floor)}", None
        elif are_alike and not is_known:
            outcome, p = f"{no}: undecided, all seeds have the same difference, which gives no interval", 1.0
        elif is_behind:
            outcome = f"{no}: the other sign"
        elif self.paper is None:
            outcome = "reproduced in sign" if self.is_of_paper else "holds"
        elif not has_sign:
            outcome = "within the margin; the paper's sign is not seen"
        else:
            is_of_size = low <= paper <= high and high - low <= abs(paper)
            is_of_size = is_of_size or (p is None and self._is_printed_alike(mean))
            outcome = "reproduced in size" if is_of_size else "reproduced in sign"
            p = p if p is None else student_p(effects, 0.0, noise)  # of the sign, not of the margin
        mean, low, high = (exp(x) if self.is_ratio else x for x in (mean if abs(mean) > noise else 0.0, low, high))
        areas = [pair.area for pair in pairs if pair.area is not None]
        area = fmean(areas) if len(areas) == len(pairs) else None
        return Verdict(outcome, len(effects), mean, low, high, area, p, has_ceiling)

    def _are_alike(self, pairs: Sequence[Pair], effects: Sequence[float], noise: float) -> bool:
        """True if all seeds have the same effect or, for a cost until a target, the same difference."""
        has_one_effect = max(effects) - min(effects) <= noise
        if has_one_effect or self.number not in TARGET_COSTS:
            return has_one_effect
        costs = [(pair.better or 0.0, pair.than or 0.0) for pair in pairs]
        differences = [better - than for better, than in costs]
        return max(differences) - min(differences) <= SAME * max(max(both) for both in costs)

    def _is_printed_alike(self, mean: float) -> bool:
        """True if a ratio that does not vary has the paper's figures."""
        return self.paper is not None and shown(exp(mean), is_ratio=True) == shown(self.paper, is_ratio=True)

    def _never(self, pairs: Sequence[Pair]) -> str:
        """Return the outcome of the claim that no run of `than` reaches the target."""
        num_reached, num_runs = sum(pair.than is not None for pair in pairs), len(pairs)
        if num_runs == 1:
            return f"one seed: {self.than} {'reaches' if num_reached else 'does not reach'} the target"
        if num_reached:
            no = "not reproduced" if self.is_of_paper else "does not hold"
            return f"{no}: {self.than} reaches the target in {num_reached} of {num_runs}"
        return f"{'reproduced' if self.is_of_paper else 'holds'}: {self.than} reaches the target in 0 of {num_runs}"

    def _missing(self, pairs: Sequence[Pair]) -> str:
        """Return the reason why there is no effect, in words."""
        missing = {
            self.better: sum(pair.better is None for pair in pairs),
            self.than: sum(pair.than is None for pair in pairs),
        }
        if not any(missing.values()):
            free = self.better if any(pair.better is not None and pair.better <= 0 for pair in pairs) else self.than
            return f"there is no ratio, as {free} costs nothing"
        lacks = next((pair.lacks for pair in pairs if pair.lacks), self._lacks())
        return f"{lacks} {', '.join(f'{name} in {n} of {len(pairs)}' for name, n in missing.items() if n)}"

    def _lacks(self) -> str:
        """Return the usual reason why a run has no number; ends in a preposition."""
        if self.is_ratio:
            return "the target was not reached by"
        if self.number in AT_BYTES:
            return "the bytes pay for no evaluation of"
        if self.number in ENDS:
            return "there is no finite value at the end of"
        return "there is no test value at the best validation of"

    def _side(self, effect: float, border: float, falls: bool) -> str:
        """Return the side of the border on which the only seed is, in words."""
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
        area: mean difference over the logarithm of the bytes; None unless values are compared at bytes.
        p: two-sided p-value of the border, which is 0, or the margin unless the verdict is about the sign; None if no interval
            decides, if nothing can vary, or if the difference is below the floor.
        has_ceiling: True if there is a ceiling effect, so that the claim cannot be reproduced.
    """

    outcome: str
    num_seeds: int
    mean: float | None = None
    low: float = -inf
    high: float = inf
    area: float | None = None
    p: float | None = None
    has_ceiling: bool = False

    def interval(self, is_ratio: bool) -> str:
        """Return the 95 % interval as text; empty if there is none."""
        if self.mean is None or self.num_seeds < 2:
            return ""
        return f"{shown(self.low, is_ratio)} to {shown(self.high, is_ratio)}"


def room_left(value: float, metric: Metric) -> float:
    """Return the largest possible gain over a value: the distance of an accuracy from 1, or of a loss or an error from 0.

    A value beyond its bound, such as an accuracy in per cent or the negative logarithm of a density, shows that it has none.
    """
    room = value if metric.falls else 1 - value if is_accuracy(metric.name) else inf
    return room if room >= 0 else inf


def corrected(verdicts: Sequence[Verdict]) -> list[str]:
    """Return for each verdict, in words, whether it stands after the correction for all; empty if no interval decides it."""
    return [
        "" if q is None else f"{'stands' if q <= LEVEL else 'undecided'} ({_shown_q(q)})" for q in q_values_of(verdicts)
    ]


def q_values_of(verdicts: Sequence[Verdict]) -> list[float | None]:
    """Return the q-value of each verdict after the correction for all; None if no interval decides it."""
    q_values = adjusted([verdict.p for verdict in verdicts])
    return [None if verdict.has_ceiling else q for q, verdict in zip(q_values, verdicts, strict=True)]


def _shown_q(q: float) -> str:
    """Return a q-value with two figures, or more where it would read as the level.

    >>> [_shown_q(q) for q in (0.0004, 0.0123, 0.05034, 0.05, 0.3)]
    ['q < 0.001', 'q 0.012', 'q 0.0503', 'q 0.05', 'q 0.3']
    """
    if q < 0.001:
        return "q < 0.001"
    two = f"{q:.2g}"
    return f"q {q:.3g}" if float(two) == LEVEL else f"q {two}"


def floors(
    claims: Sequence[Claim], runs: Sequence[tuple[str, str]], curves: Mapping[str, Mapping[int, Curve | None]]
) -> str:
    """Return in words the largest difference of methods from themselves in each number that the claims compare.

    It is empty if they compare none, or without runs.

    Args:
        claims: claims of a study.
        runs: pairs of cells that are the same method.
        curves: curves by cell and seed.
    """
    compared = {claim.what: claim for claim in claims if claim.number != NEVER}
    if not compared or not runs:
        return ""
    pairs = " and ".join(f"{first} from {second}" for first, second in runs)
    if all(len(curves.get(first, {}).keys() & curves.get(second, {}).keys()) < 2 for first, second in runs):
        return f"The floor, {pairs}, is not run yet."
    parts, unknown = list[str](), dict[str, list[str]]()
    for what, claim in compared.items():
        floor = claim.floor(runs, curves)
        if floor is None:
            unknown.setdefault(claim.why_no_floor(runs, curves), []).append(what)
        elif floor != 0:
            parts.append(f"{'a factor of ' * claim.is_ratio}{claim.shown_floor(floor)} in {what}")
    parts += [f"unknown in {' and '.join(numbers)}, as {reason}" for reason, numbers in unknown.items()]
    return f"The floor, {pairs}: {', '.join(parts) or '0'}."


def claims_table(claims: Sequence[Claim], verdicts: Sequence[Verdict]) -> Table:
    """Return the claims and their verdicts."""
    has_area, has_source = any(claim.number in AT_BYTES for claim in claims), any(claim.source for claim in claims)
    rows = []
    for claim, verdict, stands in zip(claims, verdicts, corrected(verdicts), strict=True):
        paper = "" if claim.paper is None else f"{claim.paper:.3g}"
        mean = "–" if verdict.mean is None else shown(verdict.mean, claim.is_ratio)
        area = "" if verdict.area is None else shown(verdict.area)
        words = [claim.text, claim.compared, *[claim.source] * has_source, verdict.outcome, stands]
        numbers = [paper, mean, verdict.interval(claim.is_ratio) or "–", *[area] * has_area, str(verdict.num_seeds)]
        rows.append([*words, *numbers])
    header = ["claim", "compared", *["in the paper"] * has_source, "verdict", "after correction"]
    numbers = ["paper", "here", "95 % interval", *["over log bytes"] * has_area, "seeds"]
    return Table([*header, *numbers], rows, num_texts=len(header))


def legend(claims: Sequence[Claim], floor: str = "") -> list[str]:
    """Return the explanation of these claims' table, with the study's floor in words."""
    return [LEGEND, *[f"{FLOOR} {floor}"] * bool(floor), *[WITHIN] * any(claim.number in AT_BYTES for claim in claims)]


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

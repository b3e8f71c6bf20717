"""Claims of a paper or of your own, and whether the runs of a study bear them out.

    text: the claim in words
    better, than: two cells of the study
    in: what is compared: `final` (the default), `last`, `best` (of the smoothed curve, for papers that print it),
        `at_best_validation`, as in the report's table, or the cost of reaching the target: `target_rounds`, `target_uplink`,
        `target_downlink`, `target_simulated_seconds`
    paper: what the paper has: the difference better − than of two values, the ratio better / than of two costs;
        without it the claim only says that one is better
    margin: how much worse `better` may be than `than` in a claim that little is lost (0 if not given; not for a cost)

Runs are paired by seed. A claim is reproduced in sign if the mean difference (of logarithms, for a ratio) is on the paper's
side of −margin and its 95 % interval by Student's t does not contain −margin; it is reproduced in size if the interval also
contains the paper's value. For a metric that falls, +margin takes the place of −margin. A claim without a paper's value
holds if the interval lies on the better side: above 0, for a cost below 1, and for a metric that falls below 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf, isinf, log
from statistics import fmean, stdev
from typing import Any

from lightning_fl.checks import check_choice, is_real
from lightning_fl.errors import nearest, require
from lightning_fl.outputs.metric import FINAL
from lightning_fl.report.comparison import VALUES
from lightning_fl.report.document import Table

LEGEND = (
    f"`final` is {FINAL}; `{VALUES['best']}` is chosen on the values that it reports. "
    "Runs are paired by seed. In sign: the 95 % interval of the mean (Student's t) lies on the paper's side of 0, for a ratio "
    "of 1, with a margin of −margin; in size: it also contains the paper's value. A claim without a paper's value holds if the "
    "interval lies on the better side."
)
COSTS = ("target_rounds", "target_uplink", "target_downlink", "target_simulated_seconds")
NUMBERS = (*VALUES, *COSTS)
KEYS = ("text", "better", "than", "in", "paper", "margin")
NEEDED = ("text", "better", "than")


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
    """

    text: str
    better: str
    than: str
    number: str
    paper: float | None = None
    margin: float = 0.0

    @property
    def is_ratio(self) -> bool:
        """True if a cost is compared."""
        return self.number in COSTS

    def judge(self, found: Mapping[str, Mapping[int, Mapping[str, float | None]]], falls: bool = False) -> Verdict:
        """Compare the cells' numbers.

        Args:
            found: numbers of each run by cell and seed; None are costs of a target that was not reached, and the value at the
                best validation of a run that tested nothing.
            falls: True if lower values of the metric are better.
        """
        yes, no = ("holds", "does not hold") if self.paper is None else ("reproduced in sign", "not reproduced")
        ours, theirs = found.get(self.better, {}), found.get(self.than, {})
        seeds = sorted(ours.keys() & theirs.keys())
        if not seeds:
            return Verdict("not tried", 0)
        pairs = [(ours[seed][self.number], theirs[seed][self.number]) for seed in seeds]
        known = [(a, b) for a, b in pairs if a is not None and b is not None]
        if len(known) < len(pairs):
            missing = {self.better: sum(a is None for a, _ in pairs), self.than: sum(b is None for _, b in pairs)}
            said = ", ".join(f"{name} in {n} of {len(pairs)}" for name, n in missing.items() if n)
            what = (
                "the target was not reached by" if self.is_ratio else "there is no test value at the best validation of"
            )
            return Verdict(f"{no}: {what} {said}", len(pairs))
        effects = [log(a / b) if self.is_ratio else a - b for a, b in known]
        low, high = student_interval(effects)
        border = self.margin if falls else 0 - self.margin  # not -0
        if self.paper is None:
            paper = -inf if self.is_ratio or falls else inf
        else:
            paper = log(self.paper) if self.is_ratio else self.paper
        one = " (one seed)" if len(effects) == 1 else ""
        lowest, highest = (effects[0], effects[0]) if one else (low, high)
        is_in_sign = lowest > border if paper > border else highest < border
        if one:
            why = one
        elif low <= border <= high:
            without = "" if isinf(paper) or low <= paper <= high else ", and not the paper's value"
            why = f": undecided, as the interval contains {exp(border) if self.is_ratio else border:g}{without}"
        else:
            why = ": the other sign"
        outcome = f"{no}{why}"
        if is_in_sign:
            outcome = "reproduced in size" if not one and low <= paper <= high else yes + one
        # The noise of single precision in equal values reads as 0.
        mean, noise = fmean(effects), 0 if self.is_ratio else 1e-6 * max(abs(a) for a, _ in known)
        shown = [exp(x) if self.is_ratio else x for x in (mean if abs(mean) > noise else 0.0, low, high)]
        return Verdict(outcome, len(effects), *shown)


@dataclass(frozen=True)
class Verdict:
    """Outcome of a claim.

    Attributes:
        outcome: in words.
        num_seeds: pairs of runs.
        mean: mean difference or ratio; None if it cannot be computed.
        low, high: its 95 % interval; infinite for one seed.
    """

    outcome: str
    num_seeds: int
    mean: float | None = None
    low: float = -inf
    high: float = inf


def read_claims(given: Any, cells: Sequence[str], has_target: bool) -> tuple[Claim, ...]:
    """Return the claims of a study file.

    Raises:
        UserError: a claim has an unknown key, cell or number, or lacks one.
    """
    require(isinstance(given, list), f"claims must be a list, got {given!r}.")
    claims = []
    for entry in given:
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
        paper, is_ratio = entry.get("paper"), number in COSTS
        is_allowed = paper is None or (is_real(paper) and (paper > 0 and paper != 1 if is_ratio else paper != 0))
        what = "a ratio above 0 other than 1" if is_ratio else "a difference other than 0"
        require(is_allowed, f"paper of the claim {entry['text']!r} must be {what}, got {paper!r}.")
        margin = entry.get("margin", 0)
        require(
            is_real(margin) and margin >= 0 and (paper is None or margin != abs(paper)) and not (margin and is_ratio),
            f"margin of the claim {entry['text']!r} must be a difference of 0 or more other than paper's, and a cost has none, "
            f"got {margin!r}.",
        )
        paper = None if paper is None else float(paper)
        claims.append(Claim(str(entry["text"]), entry["better"], entry["than"], number, paper, float(margin)))
    return tuple(claims)


def claims_table(claims: Sequence[Claim], verdicts: Sequence[Verdict]) -> Table:
    """Return the claims and their verdicts."""
    rows = []
    for claim, verdict in zip(claims, verdicts, strict=True):
        sign = " / " if claim.is_ratio else " − "
        paper = "" if claim.paper is None else f"{claim.paper:.3g}"
        mean = "–" if verdict.mean is None else f"{verdict.mean:.3g}"
        interval = "–" if verdict.mean is None or verdict.num_seeds < 2 else f"{verdict.low:.3g} to {verdict.high:.3g}"
        compared = f"{VALUES.get(claim.number, claim.number.replace('_', ' '))}: {claim.better}{sign}{claim.than}"
        rows.append([claim.text, compared, verdict.outcome, paper, mean, interval, str(verdict.num_seeds)])
    return Table(["claim", "compared", "verdict", "paper", "here", "95 % interval", "seeds"], rows, num_texts=3)


def student_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean by Student's t; infinite for one value."""
    if len(values) < 2:
        return -inf, inf
    from scipy.stats import t

    half = float(t.ppf(0.975, len(values) - 1)) * stdev(values) / len(values) ** 0.5
    return fmean(values) - half, fmean(values) + half

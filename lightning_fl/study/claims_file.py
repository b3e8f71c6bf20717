"""Claims in a study file.

    text: the claim in words
    better, than: two cells of the study
    in: number to compare
        final (the default), last, best (of the smoothed curve, for papers that print it), at_best_validation:
            as in the report's table
        mean: mean of the values over the rounds that `rounds` names
        rise: mean over the last half of the rounds less the mean over the first half: is `better` catching up?
        target_rounds, target_uplink, target_downlink, target_total_traffic, target_simulated_seconds, target_joules: the cost of
            reaching the target; total traffic is uplink + downlink
        uplink, downlink, total_traffic, simulated_seconds, joules, mflops, parameters: the cost of the whole run, or the size of
            its last model
        at_uplink, at_downlink, at_total_traffic: each one's best value (not smoothed) within the bytes that `better` has spent
            after its last round
        never_reached: whether no run of `than` reaches the target
    rounds: for mean, the first and the last round, as [151, 300]; for at_uplink and the like, the round of `better`
        whose bytes count
    bytes: for at_uplink and the like, the bytes; a run that ends earlier counts with its best value of all rounds
    metric: column of metrics.csv to compare in place of the study's, or a list of columns of which each run has one
    paper: the paper's figure: the difference better − than of two values, or the ratio better / than of two costs
    source: place of the figure in the paper, and its statistic; a claim with neither paper nor source is your own
    margin: how much worse `better` may be than `than` in a claim that little is lost (0 if not given; not for a cost)

Choose `rounds` and `bytes` before the runs: a round that is chosen where two curves differ most decides by chance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_fl.checks import as_number, check_choice, check_whole, is_real
from lightning_fl.errors import nearest, require
from lightning_fl.study.claims import AT_BYTES, COSTS, MEAN, NEVER, NUMBERS, TARGET_COSTS, Claim

KEYS = ("text", "better", "than", "in", "rounds", "bytes", "metric", "paper", "source", "margin")
NEEDED = ("text", "better", "than")
AT = ", ".join(AT_BYTES)


def read_claims(content: Any, cells: Sequence[str], target: float | None) -> tuple[Claim, ...]:
    """Return the claims of a study file.

    Args:
        content: content of the key `claims`.
        cells: names of the study's cells.
        target: the study's target; None if it has none.

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
        require(
            number != "largest_gap",
            f"in: largest_gap of the claim {entry['text']!r} tells equal methods apart in a fifth of all cases; use "
            f"`in: {MEAN}` with rounds that were chosen before the runs.",
        )
        check_choice(f"in of the claim {entry['text']!r}", number, NUMBERS)
        for name in (entry["better"], entry["than"]):
            require(name in cells, f"the claim {entry['text']!r} is about {name!r}; {nearest(str(name), cells)}.")
        to_reach = number in (*TARGET_COSTS, NEVER)
        require(target is not None or not to_reach, f"the claim {entry['text']!r} compares {number}: give a target.")
        rounds, between = _rounds(entry, number)
        num_bytes = as_number(entry.get("bytes"))
        if num_bytes is not None:
            require(
                number in AT_BYTES and rounds is None,
                f"bytes of the claim {entry['text']!r} is for `in: {AT}` without rounds, got `in: {number}`.",
            )
            require(
                is_real(num_bytes) and num_bytes > 0,
                f"bytes of the claim {entry['text']!r} must be a number above 0, got {num_bytes!r}.",
            )
        metrics = entry.get("metric", [])
        metrics = [metrics] if isinstance(metrics, str) else metrics
        require(
            isinstance(metrics, list) and all(isinstance(name, str) and name for name in metrics),
            f"metric of the claim {entry['text']!r} must be a column of metrics.csv or a list of columns, got {metrics!r}.",
        )
        require(
            not (metrics and to_reach), f"metric of the claim {entry['text']!r} is not for {number}: it has no target."
        )
        paper, is_ratio = as_number(entry.get("paper")), number in COSTS
        require(paper is None or number != NEVER, f"paper of the claim {entry['text']!r} has no meaning for {NEVER}.")
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
                between,
                None if num_bytes is None else float(num_bytes),
                tuple(metrics),
                target if to_reach else None,
            )
        )
    return tuple(claims)


def _rounds(entry: Mapping[str, Any], number: str) -> tuple[int | None, tuple[int, int] | None]:
    """Return the round of a comparison at bytes, and the first and last round of `mean`."""
    rounds, what = entry.get("rounds"), f"rounds of the claim {entry['text']!r}"
    if number == MEAN:
        require(
            isinstance(rounds, list) and len(rounds) == 2,
            f"{what} must be the first and the last round of `in: {MEAN}`, as [151, 300], got {rounds!r}.",
        )
        first, last = entry["rounds"]
        check_whole(what, first, 1)
        check_whole(what, last, first)
        return None, (first, last)
    if rounds is not None:
        require(number in AT_BYTES, f"{what} is for `in: {AT}` and `in: {MEAN}`, got `in: {number}`.")
        check_whole(what, rounds, 1)
    return rounds, None

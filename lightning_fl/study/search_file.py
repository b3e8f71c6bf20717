"""`search:` in a study file: flags whose values a search chooses for each combination.

search:
  trials: 20                # of every combination; the first has the combination's own values
  seed: 1000                # of all trials and of the sampler; none of the study's seeds (1000 if not given)
  metric: val/accuracy      # measured on samples that clients hold out (the study's metric, or val/accuracy, if not given)
  budget: 1.0e+8            # uplink bytes of all clients after which every run of the study ends; or `rounds: 60`
  halving: {first: 1.0e+7, factor: 3}  # stop the worse trials after 10, 30 … MB; or `hyperband`, with the same keys
  flags:                    # of all combinations
    model.learning_rate: {low: 0.01, high: 0.3, log: true}
    data.batch_size: {low: 8, high: 64, integer: true}
  own_flags:                # of a choice, or of a combination: more flags, or other values of those above
    FedProx: {algorithm.mu: {choices: [0.001, 0.01, 0.1, 1.0]}}
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_fl.checks import LARGEST_SEED, as_number, check_whole, is_real, is_whole
from lightning_fl.errors import nearest, require
from lightning_fl.outputs.metric import ACCURACY, TEST, VALIDATION
from lightning_fl.outputs.units import counted, in_bytes

KEYS = ("trials", "seed", "metric", "budget", "rounds", "halving", "hyperband", "flags", "own_flags")
RANGE_KEYS = ("low", "high", "log", "integer", "choices")
PRUNERS = ("halving", "hyperband")
SEED, SEEDS = 1000, ("seed_everything", "data.seed")
"""Default seed, and the flags that the seed of a run sets."""
MOST_TRIALS = 10_000
EXAMPLE = "{low: 0.01, high: 0.3} or {choices: [1, 5]}"


@dataclass(frozen=True)
class Range:
    """Values that a search may give to a flag.

    Attributes:
        low: lowest value; without meaning if there are choices.
        high: highest value.
        log: True to search evenly on the logarithmic scale.
        integer: True for whole numbers only.
        choices: the values, if they are not a range of numbers.
    """

    low: float = 0.0
    high: float = 0.0
    log: bool = False
    integer: bool = False
    choices: tuple[Any, ...] = ()

    @property
    def ends(self) -> tuple[Any, ...]:
        """Values to test whether a combination takes the flag: both ends, or all choices."""
        return self.choices or (self.low, self.high)

    def contains(self, value: Any) -> bool:
        """True if a value may be chosen."""
        if self.choices:
            return any(
                value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in self.choices
            )
        return (is_whole(value) if self.integer else is_real(value)) and self.low <= value <= self.high

    def __str__(self) -> str:
        if self.choices:
            return " or ".join(map(written, self.choices))
        notes = [word for word, is_so in (("log", self.log), ("integer", self.integer)) if is_so]
        return f"{written(self.low)} to {written(self.high)}" + f" ({', '.join(notes)})" * bool(notes)


@dataclass(frozen=True)
class Pruning:
    """Rungs at which the worse trials are stopped.

    Attributes:
        kind: `halving`, or `hyperband`, whose trials begin at different rungs.
        first: bytes or rounds of the first rung.
        factor: ratio of the bytes or rounds of successive rungs; one of `factor` trials goes on at each.
    """

    kind: str
    first: int
    factor: int


@dataclass(frozen=True)
class SearchFile:
    """Content of `search:`.

    Attributes:
        trials: number of trials of every combination.
        seed: seed of the sampler and of all trials.
        metric: column of metrics.csv by which trials are chosen.
        flags: ranges by flag, for each combination.
        budget: uplink bytes of all clients after which a run ends; None for a budget in rounds.
        rounds: rounds of a run; None for a budget in bytes.
        pruning: rungs at which the worse trials are stopped; None to train all trials to their end.
    """

    trials: int
    seed: int
    metric: str
    flags: Mapping[str, Mapping[str, Range]]
    budget: float | None = None
    rounds: int | None = None
    pruning: Pruning | None = None

    @property
    def arguments(self) -> tuple[str, ...]:
        """Flags that end every run of the study at the budget."""
        if self.budget is None:
            return (f"--trainer.max_rounds={self.rounds}",)
        return "--trainer.callbacks+=CommunicationMeter", f"--trainer.callbacks.max_uplink_bytes={self.budget:.17g}"

    @property
    def axis(self) -> str:
        """Cost in which budget and rungs are counted, as `Record.spent` names it."""
        return "rounds" if self.budget is None else "uplink"

    @property
    def limit(self) -> float:
        """Budget in bytes or rounds."""
        return float(self.rounds or 0) if self.budget is None else self.budget

    @property
    def rungs(self) -> tuple[int, ...]:
        """Bytes or rounds after which trials are compared, below the budget."""
        rungs, pruning = list[int](), self.pruning
        while pruning is not None and (rung := pruning.first * pruning.factor ** len(rungs)) < self.limit:
            rungs.append(rung)
        return tuple(rungs)

    def identity(self, combination: str) -> dict[str, Any]:
        """Return the settings that identify the trials of a combination: all except their number."""
        flags = {name: asdict(values) for name, values in self.flags[combination].items()}
        pruning = None if self.pruning is None else asdict(self.pruning)
        return {"seed": self.seed, "metric": self.metric, "limit": self.limit, "flags": flags, "pruning": pruning}

    def __str__(self) -> str:
        limit = counted(self.rounds, "round") if self.rounds is not None else f"{in_bytes(self.limit)} of uplink"
        rungs = ", ".join(map(self._shown, self.rungs))
        pruning = "" if self.pruning is None else f", with {self.pruning.kind} after {rungs}"
        return f"{counted(self.trials, 'trial')} of each combination, each of {limit} with seed {self.seed}{pruning}"

    def _shown(self, rung: int) -> str:
        return str(rung) if self.rounds is not None else in_bytes(rung)


def written(value: Any) -> str:
    """Return a value as a flag has it.

    >>> [written(value) for value in (0.1, 3, True, "lenet5")]
    ['0.1', '3', 'true', 'lenet5']
    """
    return str(value).lower() if isinstance(value, bool) else str(value)


def read_search(
    content: Any, combinations: Mapping[str, Sequence[str]], seeds: Sequence[int], metric: str | None
) -> SearchFile | None:
    """Return the search of a study file; None if it has none.

    Args:
        content: content of the key `search`.
        combinations: names of the choices of each combination.
        seeds: the study's seeds; the search's seed must not be one of them.
        metric: the study's metric.

    Raises:
        UserError: a key or a range is unknown or lacks values, or the metric does not come from a validation.
    """
    if content is None:
        return None
    require(isinstance(content, dict), f"search must have the keys {', '.join(KEYS)}; got {content!r}.")
    for key in content:
        require(key in KEYS, f"search has the key {key!r}; {nearest(str(key), KEYS)}.")
    require("trials" in content, "search needs the key 'trials', the number of trials of every combination.")
    check_whole("trials of search", content["trials"], 1, MOST_TRIALS)
    seed = content.get("seed", SEED)
    check_whole("seed of search", seed, 0, LARGEST_SEED)
    require(
        seed not in seeds,
        f"seed of search is {seed}, which is one of the study's seeds: the winners must be judged with seeds that the search has "
        "not seen.",
    )
    name = content.get("metric", metric or ACCURACY)
    require(isinstance(name, str), f"metric of search must be the name of a column of metrics.csv, got {name!r}.")
    check_validates(name)
    budget, rounds = _budget(content)
    return SearchFile(
        content["trials"],
        seed,
        name,
        _flags_of(content, combinations),
        budget,
        rounds,
        _pruning(content, budget if rounds is None else rounds),
    )


def check_validates(metric: str) -> None:
    """Raise `UserError` unless a metric's name is one of a validation."""
    require(
        re.search(VALIDATION, metric) is not None and re.search(TEST, metric) is None,
        f"metric of search must be measured on samples that clients hold out for validation, such as {ACCURACY}, because test "
        f"samples judge the winners; got {metric}.",
    )


def _budget(content: Mapping[str, Any]) -> tuple[float | None, int | None]:
    """Return the budget in bytes and in rounds; one of them is None."""
    given = [key for key in ("budget", "rounds") if key in content]
    require(
        len(given) == 1,
        "search needs one limit of a run: budget, in uplink bytes of all clients, or rounds; got "
        f"{' and '.join(given) or 'neither'}.",
    )
    if given == ["rounds"]:
        check_whole("rounds of search", content["rounds"], 1)
        return None, content["rounds"]
    budget = as_number(content["budget"])
    require(
        is_real(budget) and budget > 0,
        f"budget of search must be a number of uplink bytes above 0, such as 1.0e+8, got {content['budget']!r}.",
    )
    return float(budget), None


def _pruning(content: Mapping[str, Any], limit: Any) -> Pruning | None:
    """Return the rungs at which trials are stopped."""
    given = [kind for kind in PRUNERS if kind in content]
    require(len(given) < 2, "search has halving or hyperband, got both.")
    if not given:
        return None
    (kind,) = given
    of = content[kind]
    require(
        isinstance(of, dict) and "first" in of and of.keys() <= {"first", "factor"},
        f"{kind} of search has the keys first, the bytes or rounds of the first rung, and factor, got {of!r}.",
    )
    first, factor = as_number(of["first"]), of.get("factor", 3)
    require(
        is_real(first) and first >= 1 and float(first).is_integer() and first < limit,
        f"first of {kind} must be a whole number of bytes or rounds from 1 to below the budget, {limit:g}, got {of['first']!r}.",
    )
    check_whole(f"factor of {kind}", factor, 2)
    return Pruning(kind, int(first), factor)


def _flags_of(content: Mapping[str, Any], combinations: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Range]]:
    """Return the ranges of each combination."""
    common = _ranges(content.get("flags", {}), "flags of search")
    own = content.get("own_flags", {})
    require(isinstance(own, dict), f"own_flags of search must name choices or combinations, got {own!r}.")
    names = {name for combination, choices in combinations.items() for name in (combination, *choices)}
    for name in map(str, own):
        require(name in names, f"own_flags of search names {name!r}; {nearest(name, names)}.")
    ranges = {str(name): _ranges(of, f"own_flags of {name}") for name, of in own.items()}
    flags: dict[str, dict[str, Range]] = {}
    for combination, choices in combinations.items():
        flags[combination] = dict(common)
        for name in dict.fromkeys([*choices, combination]):  # the combination's own ranges replace its choices' ranges
            flags[combination] |= ranges.get(name, {})
        require(
            bool(flags[combination]),
            f"search has no flags for {combination}: give every combination at least one, so that all are tuned.",
        )
    return flags


def _ranges(content: Any, what: str) -> dict[str, Range]:
    """Return the ranges of flags."""
    require(isinstance(content, dict), f"{what} must be flags with their ranges, such as {EXAMPLE}; got {content!r}.")
    ranges = {}
    for flag, of in content.items():
        is_flag = isinstance(flag, str) and bool(flag) and not set(flag) & set("= +") and not flag.startswith("-")
        require(is_flag, f"{what} must name flags without dashes, such as model.learning_rate, got {flag!r}.")
        require(flag not in SEEDS, f"{what} has {flag}, but all trials have the search's own seed.")
        ranges[flag] = _range(of, flag)
    return ranges


def _range(content: Any, flag: str) -> Range:
    """Return the values that a flag may have."""
    require(
        isinstance(content, dict) and ("choices" in content or {"low", "high"} <= content.keys()),
        f"the range of {flag} needs values: low and high, or choices, such as {EXAMPLE}; got {content!r}.",
    )
    for key in content:
        require(key in RANGE_KEYS, f"the range of {flag} has the key {key!r}; {nearest(str(key), RANGE_KEYS)}.")
    if "choices" in content:
        choices = content["choices"]
        is_list = isinstance(choices, list) and all(isinstance(value, bool | int | float | str) for value in choices)
        require(
            len(content) == 1 and is_list and len({str(value) for value in choices}) == len(choices) > 1,
            f"the range of {flag} has choices or low and high; choices must be two or more different numbers or words, got "
            f"{content!r}.",
        )
        return Range(choices=tuple(map(as_number, choices)))
    low, high = as_number(content["low"]), as_number(content["high"])
    log, integer = content.get("log", False), content.get("integer", False)
    require(
        isinstance(log, bool) and isinstance(integer, bool),
        f"log and integer of the range of {flag} must be true or false, got {content!r}.",
    )
    require(
        is_real(low) and is_real(high) and low < high and (low > 0 or not log),
        f"the range of {flag} must have a low below its high{', both above 0 on a logarithmic scale' * log}, got {content!r}.",
    )
    if integer:
        require(
            float(low).is_integer() and float(high).is_integer(),
            f"the range of {flag} must have whole ends if integer is true, got {content!r}.",
        )
        low, high = int(low), int(high)
    return Range(low, high, log, integer)

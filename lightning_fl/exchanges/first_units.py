"""Smaller networks of the first units: HeteroFL (Diao, Ding and Tarokh, ICLR 2021), FjORD (Horváth et al., NeurIPS 2021)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import accumulate
from typing import Annotated, Any, TypeVar, cast

import numpy as np
from annotated_types import Gt
from torch import nn

from lightning_fl.data import FederatedDataModule
from lightning_fl.errors import require
from lightning_fl.exchanges.own_classes import check_outputs, train_on_own_classes
from lightning_fl.exchanges.partial_training import PartialTraining
from lightning_fl.slots import WIDTHS, Capacities, Job, Result, RoundContext, Width

J = TypeVar("J", bound=Job)


@dataclass(frozen=True)
class FirstUnits(PartialTraining):
    """Let each client receive, train and send the first ⌈r c⌉ of the c units of every hidden layer, where r is its level.

    Attributes:
        levels: share of the clients by level r, 0 < r ≤ 1; the shares sum to 1. Levels may be texts, as in JSON. With a deadline
            the shares mean nothing, and a list of levels will do.
        fixed: True if a client keeps its level, and the shares are exact; False if every client draws its level in each round.
        scaled: divide the outputs of hidden layers by r in training, because all networks share the weights of the next layer.
            Without normalisation the outputs of a network with l hidden layers grow by 1/r^l, so small networks may diverge.
        ordered: True for FjORD's ordered dropout: every step of a client trains the network of one level, drawn uniformly from
            those up to its own.
        deadline: simulated seconds above 0: every client has the widest of the levels with which a clock of clients expects its
            round, messages and training, to take no longer, and the smallest if there is none. None: `levels` has the shares.
        masked: True to set outputs of the last linear layer to 0 in training where the client has no sample of their class.
        distilled: True for FjORD's self-distillation, with ordered dropout: a step trains the client's whole network on its
            loss, and the one that it draws to give the same outputs for the classes.
    """

    one_message = True
    levels: Mapping[float, float] | Sequence[float] = field(default_factory=lambda: {1.0: 0.5, 0.5: 0.3, 0.25: 0.2})
    fixed: bool = True
    scaled: bool = True
    ordered: bool = False
    deadline: Annotated[float, Gt(0)] | None = None
    masked: bool = False
    distilled: bool = False

    def __post_init__(self) -> None:
        if self.deadline is not None and isinstance(self.levels, (list, tuple)) and all(map(_is_number, self.levels)):
            object.__setattr__(self, "levels", dict.fromkeys(self.levels, 1 / max(1, len(self.levels))))
        if isinstance(self.levels, Mapping):
            object.__setattr__(self, "levels", {_from_text(level): share for level, share in self.levels.items()})
        levels: Any = self.levels
        require(
            isinstance(levels, Mapping) and len(levels) > 0 and all(map(_is_number, [*levels, *levels.values()])),
            f"levels must be a mapping from levels to shares of the clients, such as {{1.0: 0.5, 0.5: 0.5}}, or "
            f"a list of levels with a deadline, got {levels!r}.",
        )
        for level, share in levels.items():
            require(
                0 < level <= 1, f"a level, the share of every hidden layer's units, must lie in (0, 1], got {level}."
            )
            require(0 <= share <= 1, f"level {level} must be that of a share of the clients in [0, 1], got {share}.")
        require(
            not (self.ordered and self.scaled),
            "FirstUnits divides outputs by a fixed level, but ordered dropout draws one in every step: set scaled to False.",
        )
        require(
            self.ordered or not self.distilled,
            "distilled lets a client's network teach narrower ones, which only ordered dropout draws: set ordered to True.",
        )
        require(
            self.fixed or self.deadline is None,
            "fixed is False, so that clients draw their levels, and with a deadline their clock decides: leave one of them out.",
        )
        if self.deadline is not None:
            return
        total = sum(levels.values())
        require(
            abs(total - 1) < 1e-6, f"the shares of the clients by level must sum to 1, got {total:g} of {dict(levels)}."
        )

    def width(self, client: int, context: RoundContext) -> Width | None:
        """Return the width of the client's level; None for level 1."""
        level = self._drawn(client, context) if self.deadline is None else self.level_in_time(client, context)
        in_steps = tuple(sorted(each for each in self._shares if each <= level)) if self.ordered else ()
        if level == 1 and len(in_steps) < 2:
            return None
        if len(in_steps) > 1:
            return Width(level, in_steps=in_steps, distils=self.distilled)
        return Width(level, divisor=level if self.scaled else 1.0)

    def _drawn(self, client: int, context: RoundContext) -> float:
        """Return the level of a client by the shares of the levels."""
        seed, now = context.draw.purpose[:2]
        if self.fixed:
            everyone = context.everyone
            place = (_ranks(seed, len(everyone))[bisect_left(everyone, client)] + 0.5) / len(everyone)
        else:
            place = np.random.default_rng([seed, now, WIDTHS, client]).random()
        return self._level(place)

    @property
    def _shares(self) -> Mapping[float, float]:
        """Share of the clients by level."""
        return cast(Mapping[float, float], self.levels)

    @property
    def capacities(self) -> Capacities | None:
        """Levels among which a clock of clients decides; None without a deadline."""
        return None if self.deadline is None else Capacities(tuple(sorted(self._shares, reverse=True)), self.deadline)

    def check_module(self, module: nn.Module, data: FederatedDataModule, method: str) -> None:
        """Raise `UserError` if it reads outputs for classes, and the network or the samples have none."""
        if self.masked:
            check_outputs(module, data, method, "masks the classes that a client lacks", "masked")
        if self.distilled:
            check_outputs(module, data, method, "compares a client's outputs for the classes", "distilled")

    def around_training(
        self, train: Callable[[J, Sequence[int]], Iterator[Result]], module: nn.Module, data: FederatedDataModule
    ) -> Callable[[J, Sequence[int]], Iterator[Result]]:
        """Let clients see their own classes alone, with `masked`."""
        return partial(train_on_own_classes, train, module, data) if self.masked else train

    @property
    def differs_in_steps(self) -> bool:  # type: ignore[override]
        """True with ordered dropout over several levels."""
        return self.ordered and len(self.levels) > 1

    @property
    def validated_widths(self) -> tuple[Width, ...]:
        """Widths of all levels below 1, the widest first."""
        return tuple(Width(level) for level in sorted(self.levels, reverse=True) if level < 1)

    def _level(self, place: float) -> float:
        """Return the level at a place in [0, 1) of all clients, of which each level has its share."""
        levels = list(self._shares)
        bounds = list(accumulate(self._shares.values()))
        return levels[min(bisect_right(bounds, place), len(levels) - 1)]


@lru_cache(maxsize=8)
def _ranks(seed: int, count: int) -> list[int]:
    """Return the place of each of some clients in a random order of them."""
    return np.random.default_rng([seed, 0, WIDTHS, 0]).permutation(count).tolist()


def _from_text(level: Any) -> Any:
    """Return the number that a text has, such as a key of JSON; whatever else it is, itself."""
    if isinstance(level, str):
        with suppress(ValueError):
            return float(level)
    return level


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)

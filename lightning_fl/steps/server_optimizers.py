"""Optimisers on the server.

- `Momentum`: ServerM; FedDUMAP: Liu et al., ACM TIST 2024, eq. 8 and 12; FedAvgM: Hsu et al., 2019.
- `Adagrad`, `Adam`, `Yogi`: Reddi et al., Adaptive Federated Optimization, ICLR 2021; the last after Zaheer et al., Adaptive
  Methods for Nonconvex Optimization, NeurIPS 2018.
- `MomentumInStages`: momentum that is applied after each of several steps, the two-stage FedDUM of the authors' code.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from annotated_types import Gt, Interval
from torch import Tensor

from lightning_fl.checks import LARGEST, Called
from lightning_fl.errors import require
from lightning_fl.slots import PROPOSAL, Rule, Server, ServerTurn, SetupTurn, State, Step
from lightning_fl.vectors.pieces import by_pieces, difference


@dataclass(frozen=True)
class Momentum(Step):
    """G = proposal − w;  m ← βm + (1 − β)G;  w ← w + η_g m.

    The paper's G has the opposite sign and is subtracted. Buffers are left as proposed.

    Attributes:
        beta: β in [0, 1); 0 with `learning_rate` 1 leaves the proposal as it is. Default of the paper's code: 0.9.
        learning_rate: η_g > 0, the server's learning rate.
        init_with: `zero` starts from m = 0, as in the formula; `first` from m = G of the first round, as in the paper's code,
            which applies that G about 1/(1 − β) times in total.
        dampening: False drops the factor (1 − β), as in FedAvgM.
    """

    sums_suffice = True
    changeable = frozenset({"beta", "learning_rate"})
    needs = uses = frozenset({PROPOSAL})
    changes_model = False
    beta: Annotated[float, Interval(ge=0, lt=1), Called("the server momentum beta")] = 0.9
    learning_rate: Annotated[float, Gt(0), Called("the server learning rate")] = 1.0
    init_with: Annotated[Literal["zero", "first"], Called("the momentum's start")] = "zero"
    dampening: bool = True

    def init(self, params: Tensor) -> State:
        """Return m = 0; with `first`, m is set in the first round."""
        return {"momentum": torch.zeros_like(params)} if self.init_with == "zero" else {}

    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Replace the proposal by w + η_g m."""
        if "momentum" in state:
            momentum = by_pieces(self._next, state["momentum"], turn.proposal, turn.params)
        else:
            momentum = difference(turn.proposal, turn.params)
        turn.proposal = by_pieces(self._moved, turn.params, momentum)
        return {"momentum": momentum}

    def _next(self, momentum: Tensor, proposal: Tensor, params: Tensor) -> Tensor:
        return self.beta * momentum + (1 - self.beta if self.dampening else 1.0) * (proposal - params)

    def _moved(self, params: Tensor, momentum: Tensor) -> Tensor:
        return params + self.learning_rate * momentum


class Adaptive(Step):
    """G = proposal − w;  m ← βm + (1 − β)G;  u ← second moment of G;  w ← w + η_g m / (√u + ε).

    m = 0 and u = ε² at the start, without a later correction. Buffers are left as proposed. A step is about η_g in every
    coordinate, so give a far smaller η_g than for `Momentum`, for instance 0.01. A subclass has these fields, and updates u.
    """

    needs = uses = frozenset({PROPOSAL})
    changes_model = False
    beta: Annotated[float, Interval(ge=0, lt=1), Called("the server momentum beta")]
    learning_rate: Annotated[float, Gt(0), Called("the server learning rate")]
    epsilon: Annotated[float, Gt(0), Called("{kind}'s epsilon")]

    def __post_init__(self) -> None:
        require(
            self.epsilon**2 <= LARGEST,
            f"{type(self).__name__}'s epsilon begins the second moment with its square, which must be finite in float32: "
            f"give at most {LARGEST**0.5:.2g}, got {self.epsilon!r}.",
        )

    def init(self, params: Tensor) -> State:
        """Return m = 0 and u = ε²."""
        return {"momentum": torch.zeros_like(params), "second": torch.full_like(params, self.epsilon**2)}

    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Replace the proposal by w + η_g m / (√u + ε)."""
        before = turn.proposal, turn.params
        momentum = by_pieces(self._next_momentum, state["momentum"], *before)
        second = by_pieces(self._next_second, state["second"], *before)
        turn.proposal = by_pieces(self._moved, turn.params, momentum, second)
        return {"momentum": momentum, "second": second}

    def _next_momentum(self, momentum: Tensor, proposal: Tensor, params: Tensor) -> Tensor:
        return self.beta * momentum + (1 - self.beta) * (proposal - params)

    def _next_second(self, second: Tensor, proposal: Tensor, params: Tensor) -> Tensor:
        return self.next_second(second, (proposal - params).square())

    def _moved(self, params: Tensor, momentum: Tensor, second: Tensor) -> Tensor:
        return params + self.learning_rate * momentum / (second.sqrt() + self.epsilon)

    @abstractmethod
    def next_second(self, second: Tensor, square: Tensor) -> Tensor:
        """Return the next u, given u and G², neither of which it changes."""


@dataclass(frozen=True)
class Adagrad(Adaptive):
    """`Adaptive` with u ← u + G².

    Attributes:
        beta: β in [0, 1).
        learning_rate: η_g > 0, the server's learning rate.
        epsilon: ε > 0, outside the root.
    """

    sums_suffice = True
    changeable = frozenset({"beta", "learning_rate", "epsilon"})
    beta: float = 0.0
    learning_rate: float = 1.0
    epsilon: float = 1e-3

    def next_second(self, second: Tensor, square: Tensor) -> Tensor:
        """Return u + G²."""
        return second + square


@dataclass(frozen=True)
class AdamLike(Adaptive):
    """Base class of `Adam` and `Yogi`.

    Attributes:
        beta: β in [0, 1).
        second_beta: β₂ in [0, 1).
        learning_rate: η_g > 0, the server's learning rate.
        epsilon: ε > 0, outside the root.
    """

    sums_suffice = True
    changeable = frozenset({"beta", "second_beta", "learning_rate", "epsilon"})
    beta: float = 0.9
    second_beta: Annotated[float, Interval(ge=0, lt=1), Called("{kind}'s second_beta")] = 0.99
    learning_rate: float = 1.0
    epsilon: float = 1e-3


@dataclass(frozen=True)
class Adam(AdamLike):
    """`Adaptive` with u ← β₂u + (1 − β₂)G²."""

    def next_second(self, second: Tensor, square: Tensor) -> Tensor:
        """Return β₂u + (1 − β₂)G²."""
        return self.second_beta * second + (1 - self.second_beta) * square


@dataclass(frozen=True)
class Yogi(AdamLike):
    """`Adaptive` with u ← u − (1 − β₂) G² sign(u − G²)."""

    def next_second(self, second: Tensor, square: Tensor) -> Tensor:
        """Return u − (1 − β₂) G² sign(u − G²)."""
        return second - (1 - self.second_beta) * square * torch.sign(second - square)


@dataclass(frozen=True)
class MomentumInStages(Step):
    """For each stage: G = its change of the model;  m ← βm + (1 − β)G;  w ← w + η_g m.  One m serves all stages.

    A chain that ends with `Momentum` differs: it applies momentum to the sum of the changes, once a round. A stage that does not
    change the model leaves m unchanged.

    Attributes:
        stages: steps without state, for instance `Apply()` and `DynamicServerUpdate()`.
        momentum: step that turns a change into momentum, `Momentum()`.
    """

    stages: tuple[Step, ...]
    momentum: Step

    def __post_init__(self) -> None:
        for part in (*self.stages, self.momentum):
            require(isinstance(part, Step), f"stages and momentum are steps, got {part!r}: give each as a class_path.")
        for stage in self.stages:
            plain = type(stage).init is Step.init and not stage.provides
            require(
                plain, f"a stage of MomentumInStages must not keep or share state, but {type(stage).__name__} does."
            )

    def steps(self) -> tuple[Step, ...]:
        """Return the stages, each followed by the momentum."""
        return tuple(step for stage in self.stages for step in (stage, self.momentum))

    def rules(self) -> tuple[Rule, ...]:
        """Return the rules of the stages."""
        return tuple(rule for stage in self.stages for rule in stage.rules())

    @property
    def sums_suffice(self) -> bool:  # type: ignore[override]
        """True if they suffice for the stages and the momentum."""
        return all(part.sums_suffice for part in (*self.stages, self.momentum))

    @property
    def changes_model(self) -> bool:
        """True if a stage changes the model."""
        return any(stage.changes_model for stage in self.stages)

    def check(self, server: Server) -> None:
        """Check the stages."""
        for stage in self.stages:
            stage.check(server)

    def prepare(self, turn: SetupTurn) -> None:
        """Prepare the stages."""
        for stage in self.stages:
            stage.prepare(turn)

    def init(self, params: Tensor) -> State:
        """Return the state of the momentum."""
        return self.momentum.init(params)

    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Run stage, momentum, stage, momentum …"""
        before = turn.params
        for stage in self.stages:
            stage(turn, {})
            if turn.proposal is not before:
                seen = replace(turn, params=before)
                state = self.momentum(seen, state)
                turn.proposal = before = seen.proposal
        return state

"""Momentum that is applied after each of several steps (the two-stage FedDUM of the authors' code)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from lightning_fl.errors import require
from lightning_fl.slots import Rule, Server, ServerTurn, SetUp, State, Step


@dataclass(frozen=True)
class MomentumInStages(Step):
    """For each stage: G = its change of the model;  m ← βm + (1 − β)G;  w ← w + η_g m.  One m serves all stages.

    Unlike a chain that ends with `Momentum`, which sees the sum of the changes once a round. A stage that leaves the model
    alone does not move m.

    Attributes:
        stages: steps without state, for instance `Apply()` and `DynamicServerUpdate()`.
        momentum: the step that turns a change into momentum, `Momentum()`.
    """

    stages: tuple[Step, ...]
    momentum: Step

    def __post_init__(self) -> None:
        for part in (*self.stages, self.momentum):
            require(isinstance(part, Step), f"stages and momentum are steps, got {part!r}: give each as a class_path.")
        for stage in self.stages:
            plain = type(stage).init is Step.init and not stage.shares and not stage.consumes
            require(plain, f"a stage of MomentumInStages keeps and shares nothing, which {type(stage).__name__} does.")

    def rules(self) -> tuple[Rule, ...]:
        """Those of the stages."""
        return tuple(rule for stage in self.stages for rule in stage.rules())

    def proposes(self) -> bool:
        """Where a stage does."""
        return any(stage.proposes() for stage in self.stages)

    def check(self, server: Server) -> None:
        """Check the stages."""
        for stage in self.stages:
            stage.check(server)

    def prepare(self, turn: SetUp) -> None:
        """Prepare the stages."""
        for stage in self.stages:
            stage.prepare(turn)

    def init(self, params: Tensor) -> State:
        """The momentum's."""
        return self.momentum.init(params)

    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Stage, momentum, stage, momentum …"""
        before = turn.params
        for stage in self.stages:
            stage(turn, {})
            if turn.proposal is not before:
                seen = replace(turn, params=before)
                state = self.momentum(seen, state)
                turn.proposal = before = seen.proposal
        return state

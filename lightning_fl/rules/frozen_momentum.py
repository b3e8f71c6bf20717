"""MimeLite's local rule (Karimireddy et al., Breaking the Centralized Barrier for Cross-Device Federated Learning, 2021)."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_fl.checks import check_between
from lightning_fl.slots import MEAN_GRADIENT, Gradients, LocalTraining, Message, Rule


@dataclass(frozen=True)
class FrozenMomentum(Rule):
    """y ← y − η(βm + (1 − β)g);  sends y − w and ∇F_k(w).

    m is the server's and stays fixed; ∇F_k(w) is the gradient on all the client's samples at the received model.

    Attributes:
        beta: β in [0, 1); 0 is plain SGD.
    """

    own_step = True
    reads = Gradients.MINIBATCH | Gradients.FULL_AT_RECEIVED
    receives = frozenset({"moments/momentum"})
    sends = frozenset({MEAN_GRADIENT})
    beta: float = 0.9

    def __post_init__(self) -> None:
        check_between("the client momentum", self.beta, 0, 1, "[)")

    def step(self, local: LocalTraining) -> None:
        """Take a step: y ← y − η(βm + (1 − β)g)."""
        direction = self.beta * local.received["moments/momentum"] + (1 - self.beta) * local.gradient
        local.params.sub_(direction * local.learning_rate)

    def finish(self, local: LocalTraining) -> Message:
        """Return y − w and ∇F_k(w)."""
        return {**super().finish(local), MEAN_GRADIENT: local.full_gradient}

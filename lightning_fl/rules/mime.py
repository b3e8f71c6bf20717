"""Local rules of Mime and MimeLite (Karimireddy et al., Breaking the Centralized Barrier for Cross-Device Federated
Learning, 2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval

from lightning_fl.checks import Called
from lightning_fl.slots import MEAN_GRADIENT, Gradients, LocalTraining, Message, Rule


@dataclass(frozen=True)
class _FixedMomentum(Rule):
    """y ← y − η(βm + (1 − β)g).  m is the server's and stays fixed during local training.

    Attributes:
        beta: β in [0, 1).
    """

    changeable = frozenset({"beta"})
    own_step = True
    needs = frozenset({"moments/momentum"})
    beta: Annotated[float, Interval(ge=0, lt=1), Called("the client momentum")] = 0.9

    def step(self, local: LocalTraining) -> None:
        """Take a step: y ← y − η(βm + (1 − β)g)."""
        direction = self.beta * local.received["moments/momentum"] + (1 - self.beta) * local.gradient
        local.params.sub_(direction * local.learning_rate)


@dataclass(frozen=True)
class FrozenMomentum(_FixedMomentum):
    """y ← y − η(βm + (1 − β)g);  sends y − w and ∇F_k(w).

    m is the server's and stays fixed; ∇F_k(w) is the gradient on all the client's samples at the received model.

    Attributes:
        beta: β in [0, 1); 0 is plain SGD.
    """

    reads = Gradients.MINIBATCH | Gradients.FULL_AT_RECEIVED
    provides = frozenset({MEAN_GRADIENT})

    def finish(self, local: LocalTraining) -> Message:
        """Return y − w and ∇F_k(w)."""
        return {**super().finish(local), MEAN_GRADIENT: local.full_gradient}


@dataclass(frozen=True)
class CorrectedMomentum(_FixedMomentum):
    """g ← g(y) − g(w) + Σ_k p_k ∇F_k(w), both g of the same minibatch;  y ← y − η(βm + (1 − β)g);  sends y − w.

    m is the server's and stays fixed during local training. The sum is over the clients of this round, at the model w that they
    received, so that at y = w every client's step is the cohort's full gradient step. The mean of an earlier round, from other
    clients at another model, would not achieve this. So before training, clients send ∇F_k(w), which the server also needs for
    m, and receive the mean, as in the paper's Algorithm 1 and google/fedjax.

    The module's random numbers, such as dropout's, are the same in both gradients. Both include weight decay, and if the
    trainer clips, each is clipped on its own.
    """

    reads = Gradients.MINIBATCH | Gradients.MINIBATCH_AT_RECEIVED
    needs = frozenset({"moments/momentum", MEAN_GRADIENT})

    def correct(self, local: LocalTraining) -> None:
        """Correct the gradient: g ← g(y) − g(w) + Σ_k p_k ∇F_k(w)."""
        local.gradient.add_(local.received[MEAN_GRADIENT] - local.gradient_at_received)

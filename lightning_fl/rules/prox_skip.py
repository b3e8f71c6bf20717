"""Scaffnew's local rule (Mishchenko et al., ProxSkip: Yes! Local Gradient Steps Provably Lead to Communication Acceleration!
Finally!, ICML 2022).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from annotated_types import Interval
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_fl.checks import Called
from lightning_fl.slots import LocalTraining, Message, RoundContext, Rule, State
from lightning_fl.vectors.pieces import difference, pieces


@dataclass(frozen=True)
class ProxSkip(Rule):
    """y ← y − η(g − h_k), τ times;  u_k = y − (η/p) h_k;  sends u_k − w.  Then h_k = (p/η)(w⁺ − u_k), w⁺ the next model.

    τ is geometric with mean 1/p, one draw for all clients of a round, which seed and round decide. h_k is 0 until the client's
    first upload is accepted. The client keeps u_k and η, so that h_k is exact where η changes from round to round; if groups of
    parameters have different η, they change by the same factor. If w⁺ is the mean of all u_k, the h_k add up to 0.

    Attributes:
        p: probability p in (0, 1] that a step is the last of its round; 1 is one step a round. The paper's is 1/√κ, where κ is
            the condition number of the loss.
    """

    changeable = frozenset({"p"})
    own_step = True
    plain_sgd_reason = "with which the h_k are the gradients at the optimum"
    needs_whole_upload = True
    provides = frozenset({"model"})  # of which the client keeps a copy
    p: Annotated[float, Interval(gt=0, le=1), Called("p, the probability that a step ends the round,")] = 0.1

    def check(self, context: RoundContext) -> None:
        """Print that the rule decides the number of steps."""
        rank_zero_info(
            f"The number of local steps is drawn in each round for all clients, {1 / self.p:.4g} on average (p={self.p:g}); "
            "local_epochs and local_steps are ignored."
        )

    def steps_in_round(self, context: RoundContext) -> int:
        """Return τ."""
        return int(np.random.default_rng(context.draw.seed("local steps", common=True)).geometric(self.p))

    def init(self, params: Tensor) -> State:
        """Return u_k = w, so that h_k = 0, whatever η."""
        return {"sent": params.clone(), "scalars/rate": params.new_zeros(1)}

    def start(self, local: LocalTraining) -> None:
        """Compute w − u_k = (η'/p) h_k, and p/η', where η' is the learning rate of the client's last round."""
        rate = local.state["scalars/rate"]
        local.memory["shift"] = difference(local.received["model"], local.state["sent"])
        local.memory["scale"] = torch.where(rate > 0, self.p / rate, 0.0)

    def step(self, local: LocalTraining) -> None:
        """Take a step of SGD: y ← y − η(g − h_k)."""
        factor = local.memory["scale"] * _largest(local.learning_rate, local.params)
        for params, gradient, shift, rate, part in pieces(
            local.params, local.gradient, local.memory["shift"], local.learning_rate, factor
        ):
            params.sub_(gradient * rate).add_(shift * part)

    def finish(self, local: LocalTraining) -> Message:
        """Return u_k − w; the client keeps u_k and η, the mean over its steps."""
        rate = _largest(local.sum_learning_rate, local.params) / max(local.num_steps, 1)
        sent = local.params - local.memory.pop("shift") * (local.memory["scale"] * rate / self.p)
        local.state = {"sent": sent, "scalars/rate": rate.expand(*local.params.shape[:-1], 1)}
        return {"model": difference(sent, local.received["model"])}


def _largest(rate: float | Tensor, like: Tensor) -> Tensor:
    """Return the largest of the learning rates (1,)."""
    return torch.as_tensor(rate, dtype=like.dtype, device=like.device).max().view(1)

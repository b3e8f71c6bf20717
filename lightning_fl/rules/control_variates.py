"""SCAFFOLD's local rule (Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fl.slots import LocalTraining, Message, Rule, State

CONTROL = "moments/control"


@dataclass(frozen=True)
class ControlVariates(Rule):
    """y ← y − η(g − c_k + c);  c_k⁺ = c_k − c + (w − y)/Σ_s η_s;  sends y − w and c_k⁺ − c_k.

    The paper's option II. c_k stays with the client from round to round and starts at zero; a client whose upload is not
    accepted keeps its earlier c_k. Σ_s η_s is the sum of the learning rates of all steps, τη where η is constant. c_k does not
    change in a coordinate that was not trained (its Σ_s η_s is 0).

    The steps are plain SGD's, and g includes weight decay: with heavy-ball momentum ρ the estimate (w − y)/Σ_s η_s would be
    about 1/(1 − ρ) times too large.
    """

    own_step = True
    why_plain_sgd = (
        "where momentum ρ would make its estimate of a client's mean gradient about 1/(1 − ρ) times too large"
    )
    needs_whole_upload = True
    needs = provides = frozenset({CONTROL})

    def init(self, params: Tensor) -> State:
        """Return c_k = 0."""
        return {"control": torch.zeros_like(params)}

    def start(self, local: LocalTraining) -> None:
        """Compute c − c_k, which is the same in all steps."""
        local.memory["correction"] = local.received[CONTROL] - local.state["control"]

    def correct(self, local: LocalTraining) -> None:
        """Correct the gradient: g ← g − c_k + c."""
        local.gradient.add_(local.memory["correction"])

    def step(self, local: LocalTraining) -> None:
        """Take a step of SGD: y ← y − ηg."""
        local.params.sub_(local.gradient * local.learning_rate)

    def finish(self, local: LocalTraining) -> Message:
        """Return y − w and c_k⁺ − c_k; the client keeps c_k⁺."""
        delta = local.params - local.received["model"]
        total = torch.as_tensor(local.sum_learning_rate, dtype=delta.dtype, device=delta.device)
        change = torch.where(total > 0, -local.received[CONTROL] - delta / total, 0.0)
        local.state = {"control": local.state["control"] + change}
        return {"model": delta, CONTROL: change}

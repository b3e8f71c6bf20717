"""SCAFFOLD's local rule (Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fl.slots import LocalTraining, Message, Rule, State
from lightning_fl.vectors.pieces import difference, empty_like, pieces, subtract_scaled

CONTROL = "moments/control"


@dataclass(frozen=True)
class ControlVariates(Rule):
    """y ← y − η(g − c_k + c);  c_k⁺ = c_k − c + (w − y)/Σ_s η_s;  sends y − w and c_k⁺ − c_k.

    The paper's option II. c_k stays with the client from round to round and starts at zero; a client whose upload is not
    accepted keeps its earlier c_k. Σ_s η_s is the sum of the learning rates of all steps, τη where η is constant. c_k does not
    change in a coordinate that was not trained (its Σ_s η_s is 0).

    The steps are plain SGD's, and g includes weight decay: with heavy-ball momentum ρ the estimate (w − y)/Σ_s η_s would be
    about 1/(1 − ρ) times too large.

    Attributes:
        masked_correction: False corrects in each step only the coordinates whose gradient is not exactly 0, and so not those
            of a channel that dynamic gates switch off for all samples of the step. c_k⁺ is the mean gradient in both cases:
            with m_s the coordinates that step s corrects, c_k⁺ = (w − y)/Σ_s η_s − (c − c_k) Σ_s η_s m_s / Σ_s η_s.
    """

    masked_correction: bool = True

    own_step = True
    plain_sgd_reason = (
        "where momentum ρ would make its estimate of a client's mean gradient about 1/(1 − ρ) times too large"
    )
    needs_whole_upload = True
    needs = provides = frozenset({CONTROL})

    def init(self, params: Tensor) -> State:
        """Return c_k = 0."""
        return {"control": torch.zeros_like(params)}

    def start(self, local: LocalTraining) -> None:
        """Compute c − c_k, which is the same in all steps."""
        local.memory["correction"] = difference(local.received[CONTROL], local.state["control"])
        if not self.masked_correction:  # Σ_s η_s m_s; dry rounds finish without a step
            local.memory["corrected"] = torch.zeros_like(local.memory["correction"])

    def observe(self, local: LocalTraining) -> None:
        """Note where the gradient is not 0, before weight decay is added to it."""
        if not self.masked_correction:
            local.memory["trained"] = (local.gradient != 0).to(local.gradient.dtype)

    def correct(self, local: LocalTraining) -> None:
        """Correct the gradient: g ← g − c_k + c."""
        if self.masked_correction:
            local.gradient.add_(local.memory["correction"])
            return
        trained = local.memory["trained"]
        local.gradient.add_(local.memory["correction"] * trained)
        local.memory["corrected"] = local.memory["corrected"] + trained * local.learning_rate

    def step(self, local: LocalTraining) -> None:
        """Take a step of SGD: y ← y − ηg."""
        subtract_scaled(local.params, local.gradient, local.learning_rate)

    def finish(self, local: LocalTraining) -> Message:
        """Return y − w and c_k⁺ − c_k; the client keeps c_k⁺."""
        delta = difference(local.params, local.received["model"])
        total = torch.as_tensor(local.sum_learning_rate, dtype=delta.dtype, device=delta.device)
        correction, used = local.received[CONTROL], local.memory.pop("correction")
        if not self.masked_correction and local.num_steps:  # Σ_s η_s m_s (c − c_k) / Σ_s η_s in place of c − c_k
            correction = local.state["control"] + used * local.memory["corrected"] / total
        del used
        change, control = empty_like(delta), empty_like(delta)
        for parts in pieces(change, control, local.state["control"], correction, delta, total):
            _end(*parts)
        local.state = {"control": control}
        return {"model": delta, CONTROL: change}


def _end(change: Tensor, control: Tensor, before: Tensor, correction: Tensor, delta: Tensor, total: Tensor) -> None:
    """Write c_k⁺ − c_k and c_k⁺ into the first two vectors."""
    change.copy_(torch.where(total > 0, -correction - delta / total, 0.0))
    torch.add(before, change, out=control)

"""MOON's local rule (Li, He, Song, Model-Contrastive Federated Learning, CVPR 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt
from torch import Tensor
from torch.nn.functional import cosine_similarity, logsigmoid

from lightning_fl.checks import Called
from lightning_fl.slots import Gradients, LocalTraining, Message, Rule, State

LAST, LAST_BUFFERS = "last", "last/buffers"


@dataclass(frozen=True)
class ModelContrast(Rule):
    """Add μ mean log(1 + exp((s(z, z_k) − s(z, z_x))/τ)) to the loss of each minibatch; s is the cosine.

    z, z_x and z_k are the representations of a sample by the client's model, by the received one, and by the one with which the
    client ended its last round. It keeps that model with its float buffers; in its first round z_k = z_x, and the term is
    constant.

    Attributes:
        mu: weight μ ≥ 0; 0 is FedAvg. The paper tries 0.1, 1, 5 and 10.
        tau: temperature τ > 0. Default of the paper: 0.5.
        layer: name of the module's part whose input is the representation; None for the last linear layer.
    """

    reads = Gradients.REPRESENTATIONS
    changeable = frozenset({"mu", "tau"})
    mu: Annotated[float, Ge(0), Called("mu, the weight of MOON's contrastive loss,")] = 1.0
    tau: Annotated[float, Gt(0), Called("tau, the temperature of MOON's contrastive loss,")] = 0.5
    layer: str | None = None

    @property
    def representation(self) -> str | None:
        """Name of the part whose input is the representation; None for the last linear layer."""
        return self.layer

    def init(self, params: Tensor) -> State:
        """Return the received model in place of a last one."""
        return {LAST: params.clone()}

    def compared(self, local: LocalTraining) -> Sequence[tuple[Tensor, Tensor]]:
        """Return the received and the last model."""
        received, state = local.received, local.state
        return [
            (received["model"], received["buffers"]),
            (state[LAST], state.get(LAST_BUFFERS, received["buffers"])),
        ]

    def penalty(self, own: Tensor, others: Sequence[Tensor]) -> Tensor:
        """Return the contrastive loss times μ."""
        received, last = (cosine_similarity(own, other, dim=-1) for other in others)
        return self.mu * -logsigmoid((received - last) / self.tau).mean()

    def finish(self, local: LocalTraining) -> Message:
        """Return y − x; the client keeps its model."""
        local.state = {LAST: local.params.clone(), LAST_BUFFERS: local.buffers.clone()}
        return super().finish(local)

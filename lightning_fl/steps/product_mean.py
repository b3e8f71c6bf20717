"""Average the products of LoRA's factors (Hu et al., ICLR 2022) instead of the factors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fl.errors import require
from lightning_fl.slots import UPLOAD_WEIGHTS, UPLOADS, ServerTurn, SetupTurn, State, Step
from lightning_fl.vectors.layer_groups import factor_pairs


@dataclass(frozen=True)
class ProductMean(Step):
    """Replace B A of each LoRA layer by the best approximation of rank r of Σ_k p_k (B + ΔB_k)(A + ΔA_k), p_k = n_k / Σ_j n_j.

    With the singular values Σ of the sum, B = U√Σ and A = √Σ Vᵀ. All other parameters and buffers are averaged as by `Apply`. It
    needs the aggregator `KeepUploads(WeightedMean())`, and never forms the whole product.
    """

    needs = frozenset({UPLOADS})
    uses = needs | {"model"}
    moves_coordinates = True
    asks_clients = False

    def prepare(self, turn: SetupTurn) -> None:
        """Raise `UserError` if the model trains no pair of factors."""
        require(
            bool(factor_pairs(turn.context.layout.names)),
            "ProductMean needs both LoRA factors of a layer (lora_A, lora_B), and the model trains none.",
        )

    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Start the chain: propose the mean model with the factors of the mean products."""
        turn.proposal = turn.params + turn.merged["model"]
        if "buffers" in turn.merged:
            turn.proposed_buffers = turn.buffers + turn.merged["buffers"]
        shares = turn.merged[UPLOAD_WEIGHTS].double().to(turn.params.device)
        shares = shares / shares.sum()
        start, deltas = turn.context.layout.views(turn.params), turn.context.layout.views(turn.merged[UPLOADS])
        proposal = turn.context.layout.views(turn.proposal)
        for pair in factor_pairs(turn.context.layout.names):
            own_a, own_b = (start[name].double() + deltas[name].double() for name in pair)
            factors = mean_product(
                own_b.flatten(2), own_a.flatten(2), shares
            )  # the kernels of a convolution are columns of A
            for name, mean in zip(reversed(pair), factors, strict=True):
                proposal[name].copy_(mean.view_as(proposal[name]))
        return state


def mean_product(b: Tensor, a: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Return factors (n, r), (r, m) of the best approximation of rank r of Σ_k p_k B_k A_k.

    Args:
        b: B_k (K, n, r).
        a: A_k (K, r, m).
        shares: p_k (K,).
    """
    rank = b.shape[-1]
    left, left_core = torch.linalg.qr((b * shares[:, None, None]).movedim(0, 1).flatten(1))
    right, right_core = torch.linalg.qr(a.flatten(0, 1).T)
    u, values, vt = torch.linalg.svd(left_core @ right_core.T, full_matrices=False)
    num_kept = min(rank, len(values))
    roots = values[:num_kept].sqrt()
    # Ranks above the sides of the matrix are filled with 0.
    mean_b, mean_a = b.new_zeros(b.shape[1:]), a.new_zeros(a.shape[1:])
    mean_b[:, :num_kept] = left @ u[:, :num_kept] * roots
    mean_a[:num_kept] = (right @ vt[:num_kept].T * roots).T
    return mean_b, mean_a

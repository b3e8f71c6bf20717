"""Uploads weighted by their similarity to the server's own update (FLTrust: Cao et al., NDSS 2021, arXiv:2012.13995).

g = the server's delta, trained on its own samples;   T_k = max(0, cos(Δ_k, g));   w ← w + Σ_k T_k (‖g‖/‖Δ_k‖) Δ_k / Σ_k T_k
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_fl.slots import UPLOADS, Server, ServerTurn, State, Step

PREFIX = UPLOADS.removesuffix("model")


@dataclass(frozen=True)
class TrustScores(Step):
    """Average the uploads, scaled to the length of the server's own update, with weights by cosine similarity to it.

    Use it instead of `Apply`, with the aggregator `KeepUploads(WeightedMean())`. It tolerates any number of attackers, and
    needs server data. If no upload has a positive similarity, or the server's update is 0, the model stays as it is. Scores
    compare the models; the same factors hold for buffers and all other entries.

    Reports `robust/trusted`, the number of clients with a score above 0.
    """

    needs = frozenset({UPLOADS})
    uses = frozenset({UPLOADS, "model"})

    def check(self, server: Server) -> None:
        """Raise `UserError` without server data."""
        server.require_samples()

    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Propose the model moved by the trusted uploads."""
        rows = turn.uploads("model").double()
        trained = turn.server.train({"model": turn.params, "buffers": turn.buffers}).message["model"].double()
        lengths, length = torch.linalg.vector_norm(rows, dim=1), torch.linalg.vector_norm(trained)
        directed = (rows @ trained).clamp(min=0) * (lengths > 0)
        scores = directed / (lengths * length).clamp(min=torch.finfo(rows.dtype).tiny)
        turn.metrics["robust/trusted"] = int((scores > 0).sum())
        turn.report_kept(scores)
        total = scores.sum()
        shares = scores * length / lengths.clamp(min=torch.finfo(rows.dtype).tiny) / torch.where(total > 0, total, 1.0)
        names = [name for name in turn.merged if f"{PREFIX}{name}" in turn.merged]
        for name in names:
            merged = shares @ turn.uploads(name).double()
            turn.merged[name] = merged.to(turn.merged[name].dtype)
        turn.proposal = turn.params + turn.merged["model"]
        if "buffers" in names:
            turn.proposed_buffers = turn.buffers + turn.merged["buffers"]
        return state

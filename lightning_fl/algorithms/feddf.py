"""FedDF: Lin et al., Ensemble Distillation for Robust Model Fusion in Federated Learning, NeurIPS 2020 (arXiv:2006.07242).

server:    w_h ← w + Σ_k n_k Δ_k / Σ_k n_k; the clients' models are kept    aggregator: KeepUploads of WeightedMean, step: Apply
           w ← w_h after Adam on KL(softmax(mean of the clients' logits) ‖ softmax(student's logits)),
           on the inputs of the server's samples                                 step: Distillation
the rest is FedAvg
"""

from __future__ import annotations

from typing import Any, Literal

from lightning_fl.aggregators import KeepUploads, WeightedMean
from lightning_fl.algorithms.method import Method
from lightning_fl.steps import Apply, Distillation


class FedDF(Method):
    """FedAvg, then distillation of the clients' models into the average model on the server's inputs."""

    def __init__(
        self,
        max_steps: int = 200,
        batch_size: int = 128,
        learning_rate: float = 1e-3,
        temperature: float = 1.0,
        average: Literal["logits", "probs"] = "logits",
        val_fraction: float = 0.1,
        freeze_batch_norm: bool = False,
        **slots: Any,
    ) -> None:
        """Fill the aggregator and step slots.

        Args:
            max_steps: Steps of the distillation in a round, at least 0; 0 is FedAvg, the paper takes up to 10,000.
            batch_size: Batch size of the distillation, at least 1.
            learning_rate: Learning rate of its Adam, falling to 0 along a cosine.
            temperature: Temperature that softens the logits, above 0.
            average: Average the clients' logits, or their probs.
            val_fraction: Share of the server's samples held out to choose the best model of the distillation, in [0, 1).
            freeze_batch_norm: Keep the statistics of batch normalisation as averaged.
        """
        distillation = Distillation(
            max_steps=max_steps,
            batch_size=batch_size,
            learning_rate=learning_rate,
            temperature=temperature,
            average=average,
            val_fraction=val_fraction,
            freeze_batch_norm=freeze_batch_norm,
        )
        super().__init__((Apply(), distillation), aggregator=KeepUploads(WeightedMean()), **slots)

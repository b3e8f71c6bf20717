"""Your own method in one file: FedDyn (Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021).

client k:  y ← y − η(g − λ_k + α(y − w));  sends Δ_k = y − w;  λ_k ← λ_k − αΔ_k          rule: DynamicRegulariser
server:    s ← s + Σ_k Δ_k / N;  w ← w + Σ_k Δ_k / K + s                                  step: Drift
aggregator: the mean over the K clients of the round with equal weights; N is the number of all clients. λ_k = 0 and s = 0 at the
start. The paper's h is −αs. FedDyn sends no more than FedAvg.

    python own_method.py
    lightning-fl fit --config ../configs/quickstart.yaml --algorithm own_method.FedDyn --algorithm.alpha 0.05
"""

from dataclasses import dataclass
from typing import Annotated, Any

import lightning as L
import torch
from annotated_types import Gt
from torch import Tensor

from lightning_fl import FederatedTrainer
from lightning_fl.aggregators import WeightedMean
from lightning_fl.algorithms import FedAvg, Method
from lightning_fl.data import Digits, Dirichlet
from lightning_fl.modules import ImageClassifier
from lightning_fl.slots import LocalTraining, Message, Rule, ServerTurn, State, Step
from lightning_fl.steps import Apply


@dataclass(frozen=True)
class DynamicRegulariser(Rule):
    """Add −⟨λ_k, y⟩ + (α/2)‖y − w‖² to the loss; the module's own optimiser makes the steps.

    Attributes:
        alpha: Weight α > 0 of the regulariser.
    """

    alpha: Annotated[float, Gt(0)] = 0.01

    def init(self, params: Tensor) -> State:
        """Return λ_k = 0."""
        return {"gradient": torch.zeros_like(params)}

    def correct(self, local: LocalTraining) -> None:
        """Set g ← g − λ_k + α(y − w)."""
        local.gradient.sub_(local.state["gradient"])
        local.gradient.add_(local.params - local.received["model"], alpha=self.alpha)

    def finish(self, local: LocalTraining) -> Message:
        """Return Δ_k and set λ_k ← λ_k − αΔ_k."""
        delta = local.params - local.received["model"]
        local.state = {"gradient": local.state["gradient"] - self.alpha * delta}
        return {"model": delta}


@dataclass(frozen=True)
class Drift(Step):
    """Set s ← s + (K/N) Δ̄ and w ← proposal + s, where Δ̄ is the mean delta of the round's K clients."""

    changes_model = False  # it only adds to the change of the step before it

    def init(self, params: Tensor) -> State:
        """Return s = 0."""
        return {"drift": torch.zeros_like(params)}

    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Add the drift to the proposal."""
        share = len(turn.clients) / turn.context.num_clients
        drift = state["drift"] + share * turn.merged["model"]
        turn.proposal = turn.proposal + drift
        return {"drift": drift}


class FedDyn(Method):
    """FedAvg with a regulariser that changes every round, so that the clients' optima agree with the federation's."""

    def __init__(self, alpha: float = 0.01, **slots: Any) -> None:
        """Fill the slots of the rule, the aggregator and the steps.

        Args:
            alpha: Weight α > 0 of the regulariser.
            slots: The slots that are left: codecs, exchange, further steps of the server, personal.
        """
        super().__init__(
            (Apply(), Drift()), rule=DynamicRegulariser(alpha), aggregator=WeightedMean(weighting="uniform"), **slots
        )


def main() -> None:
    """Compare FedDyn with FedAvg on clients that hold few of the classes."""
    for algorithm in (FedAvg(), FedDyn(alpha=0.05)):
        L.seed_everything(0)
        trainer = FederatedTrainer(
            max_rounds=20,
            clients_per_round=5,
            local_epochs=2,
            accelerator="cpu",
            default_root_dir=f"runs/own_method/{algorithm.name}",
            enable_progress_bar=False,
        )
        data = Digits(num_clients=20, partition=Dirichlet(alpha=0.1))
        model = ImageClassifier("linear", num_classes=10, in_channels=1, image_size=8, learning_rate=0.1)
        trainer.fit(model, data, algorithm, verbose=False)
        print(f"{algorithm.name}  accuracy {float(trainer.callback_metrics['val/accuracy']):.4f}")


if __name__ == "__main__":
    main()

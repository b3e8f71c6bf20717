"""Models of the server besides the first (IFCA; Ghosh et al., NeurIPS 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Interval
from torch import Tensor

from lightning_fl.checks import Called
from lightning_fl.slots import Message, ServerTurn, State, Step, several_models
from lightning_fl.vectors.pieces import sum_of


@dataclass(frozen=True)
class FurtherModels(Step):
    """w_j ← w_j + Δ_j for the models besides the first; they are the step's state, and are sent with the first model.

    They begin as the first model with some signs flipped at random. For weights drawn around 0 this equals another draw;
    numbers that are 0, such as biases, stay 0. Which signs are flipped depends on the number of the model alone, not on the seed,
    and factors that begin positive, such as those of normalisation, are flipped, too. `Apply()` adds the change of the first
    model; no other step may change it.

    Attributes:
        num_models: all models C ≥ 1.
        turned: probability in (0, 1) that a sign is flipped; 1/2 makes the draws independent, smaller values stay near
            pretrained weights.
    """

    sums_suffice = True
    changes_model = False
    num_models: Annotated[int, Ge(1)] = 2
    turned: Annotated[float, Interval(gt=0, lt=1), Called("turned, the probability that a sign is turned,")] = 0.5

    @property
    def needs(self) -> frozenset[str]:
        """The changes of the models besides the first."""
        return frozenset(several_models(self.num_models)[1:])

    @property
    def uses(self) -> frozenset[str]:
        """The same."""
        return self.needs

    @property
    def provides(self) -> frozenset[str]:
        """The models besides the first."""
        return self.needs

    def init(self, params: Tensor) -> State:
        """Return copies of the first model, each with other signs flipped."""
        models = {}
        for place, name in enumerate(several_models(self.num_models)[1:], start=1):
            drawn = torch.rand(len(params), generator=torch.Generator().manual_seed(place)) < self.turned
            models[name] = torch.where(drawn.to(params.device), -params, params)
        return models

    def share(self, state: State) -> Message:
        """Return the models."""
        return dict(state)

    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Add the changes; what no client trains stays as it is, which errors of lossy codecs would move."""
        models = {name: sum_of(model, turn.merged[name]) for name, model in state.items()}
        for name, model in state.items():
            for part in turn.server.untrained:
                models[name][part] = model[part]
        return models

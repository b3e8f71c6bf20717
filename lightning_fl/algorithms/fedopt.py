"""Optimisers on the server: Reddi et al., Adaptive Federated Optimization, ICLR 2021 (arXiv:2003.00295).

server:    Δ = Σ_k p_k Δ_k                                         aggregator: WeightedMean
           m ← β₁m + (1 − β₁)Δ;  w ← w + η m / (√v + τ)            steps: Apply, and one of
             ServerAdagrad  v ← v + Δ²                             Adagrad
             ServerAdam     v ← β₂v + (1 − β₂)Δ²                   Adam
             ServerYogi     v ← v − (1 − β₂) Δ² sign(v − Δ²)       Yogi
           m = 0 and v = τ² at the start
FedOpt     w ← one step of a torch optimiser with the gradient −Δ  steps: Apply, ServerOptimizer
the rest is FedAvg; nothing more is sent

There is no bias correction, and τ is outside the root, as in the paper's Algorithm 2. The weights p_k are shares of samples, or
equal, as the paper prints them. FedOpt with torch.optim.Adam is another method than ServerAdam: v starts at 0, and it corrects
both moments. With torch.optim.Adagrad(eps=τ, initial_accumulator_value=τ²) it is ServerAdagrad with β₁ = 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_fl.aggregators import WeightedMean
from lightning_fl.algorithms.method import Method
from lightning_fl.steps import Adagrad, Adam, Apply, ServerOptimizer, Yogi

Weighting = Literal["samples", "uniform"]


class FedOpt(Method):
    """Any torch optimiser on the server, with the clients' mean change as its gradient."""

    def __init__(
        self,
        server_optimizer: Callable[[Iterable[Tensor]], Optimizer] = lambda params: SGD(params, lr=1.0, momentum=0.9),
        weighting: Weighting = "samples",
        **slots: Any,
    ) -> None:
        """Fill the aggregator and step slots.

        Args:
            server_optimizer: Function from parameters to a torch optimiser, such as partial(torch.optim.Adam, lr=0.01); in YAML
                its class_path and init_args. The default is FedAvgM.
            weighting: Average by `samples`, or with `uniform` weights.
        """
        step = ServerOptimizer(server_optimizer)
        super().__init__((Apply(), step), aggregator=WeightedMean(weighting), **slots)
        self.given_arguments = {**self.given_arguments, "server_optimizer": step.optimizer}


class ServerAdagrad(Method):
    """Adagrad on the server: FedAdagrad."""

    def __init__(
        self,
        learning_rate: float = 0.01,
        beta1: float = 0.0,
        tau: float = 1e-3,
        weighting: Weighting = "samples",
        **slots: Any,
    ) -> None:
        """Fill the aggregator and step slots.

        Args:
            learning_rate: Learning rate η > 0 of the server, to be tuned.
            beta1: Decay β₁ of the first moment, in [0, 1).
            tau: τ > 0, outside the root.
            weighting: Average by `samples`, or with `uniform` weights.
        """
        step = Adagrad(beta1, learning_rate, tau)
        super().__init__((Apply(), step), aggregator=WeightedMean(weighting), **slots)


class AdaptiveServer(Method):
    """Base class of ServerAdam and ServerYogi, which name the step."""

    step_class: type[Adam] | type[Yogi]

    def __init__(
        self,
        learning_rate: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-3,
        weighting: Weighting = "samples",
        **slots: Any,
    ) -> None:
        """Fill the aggregator and step slots.

        Args:
            learning_rate: Learning rate η > 0 of the server, to be tuned. A step is about η in every coordinate.
            beta1: Decay β₁ of the first moment, in [0, 1).
            beta2: Decay β₂ of the second moment, in [0, 1).
            tau: τ > 0, outside the root. A smaller one makes the step more adaptive.
            weighting: Average by `samples`, or with `uniform` weights.
        """
        step = self.step_class(beta1, beta2, learning_rate, tau)
        super().__init__((Apply(), step), aggregator=WeightedMean(weighting), **slots)


class ServerAdam(AdaptiveServer):
    """Adam on the server: the FedAdam of Reddi et al."""

    step_class = Adam


class ServerYogi(AdaptiveServer):
    """Yogi on the server: FedYogi."""

    step_class = Yogi

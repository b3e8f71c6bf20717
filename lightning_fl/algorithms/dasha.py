"""DASHA: Tyurin et al., DASHA: Distributed Nonconvex Optimization with Communication Compression and Optimal Oracle Complexity,
ICLR 2023 (openreview:VA1YpcNr7ul), Algorithm 1.

client k:  ∇F_k(w) on all samples, or on one minibatch             rule: GradientStep
           m_k = C(∇F_k(w) − h_k − a (g_k − h_k))                  uplink: Differences
           g_k ← g_k + m_k;  h_k ← ∇F_k(w), for the next round
server:    g ← g + (1/N) Σ_k m_k;  w ← w − γ g                     aggregator: WeightedMean, step: Accumulate

a = 1/(2ω + 1) for a codec C with E C(x) = x and E‖C(x) − x‖² ≤ ω‖x‖². An upload has the bits of C. The error of g vanishes as
the model converges, for any non-IID clients; the error of compressed gradients does not. γ is the module's learning rate.
Clients multiply by it, so all vectors are −γ times the paper's. The theory needs a small γ ≤ 1/(L + L̂ √(16 ω (2ω + 1)/N)).

g_k and h_k are 0 before a client's first round; the authors send the first gradient uncompressed. The paper has all clients in
each round. Here, clients outside a round keep g_k and h_k, and g stays the mean of all g_k. With minibatches this is the
paper's DASHA-MVR with b = 1, and g has the variance of the gradients. With `Dense` (ω = 0), full gradients and all clients, it
is gradient descent.
"""

from __future__ import annotations

from typing import Any, Literal

from lightning_fl.aggregators import WeightedMean
from lightning_fl.algorithms.method import Method
from lightning_fl.codecs import Differences, RandomK
from lightning_fl.rules import GradientStep
from lightning_fl.slots import Codec
from lightning_fl.steps import Accumulate


class DASHA(Method):
    """Gradient descent with compressed differences of gradients, whose error vanishes as the model converges."""

    def __init__(
        self,
        codec: Codec = RandomK(),  # noqa: B008 -- parts are frozen
        momentum: float | None = None,
        batch: Literal["full", "minibatch"] = "full",
        **slots: Any,
    ) -> None:
        """Fill the rule, uplink and aggregator slots and the first step.

        Args:
            codec: Unbiased codec C with a known relative variance ω: RandomK, QSGD, TernGrad without clip, or Dense.
            momentum: Momentum a in (0, 1]; 1/(2ω + 1), as in the paper, if not given.
            batch: Gradient of a client on all of its samples (full), or on one minibatch.
        """
        super().__init__(
            (Accumulate(),),
            rule=GradientStep(batch),
            uplink=Differences(codec, momentum),
            aggregator=WeightedMean("uniform"),
            **slots,
        )

"""FedDP: Yu et al., Heterogeneous Federated Learning using Dynamic Model Pruning and Adaptive Gradient, CCGrid 2023
(arXiv:2106.06921); gates after Gao et al., Dynamic Channel Pruning: Feature Boosting and Suppression, ICLR 2019
(arXiv:1810.05331).

client k:  w ← w,  w_g its own gates, at first the same for all clients
           every convolution l:  z_l = A_l pool(x_l) + a_l,  y_l = norm(conv(x_l)) ⊙ top-K(sigmoid z_l)
           L = CE + λ Σ_l mean ‖z_l‖₁, one backward pass
           w ← w − η (∇_w L − c_k + c), or the base method's step; w_g ← w_g − η ∇_{w_g} L
           keeps w_g; the upload is the base method's               personal: PersonalGates
server:    as in the base method

If all samples of a step switch a channel off, only the correction c − c_k moves its filter. `masked_correction=False` leaves
the filter unchanged, which is the other reading of "no gradient retained for them".

Gates never cross, so the bits are the base method's. The printed algorithm has errors, such as a second gradient for the gates
after the step, and 1/(Eη) in place of the number of steps; the rules of the base methods correct them. With a top-K without a
gradient, only the lasso would train the gates; the straight-through estimator adds the task's gradient. The authors' released
code has neither gates nor control variates, but sets small weights of convolutions to 0 after every epoch:
`variant="threshold"`.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Annotated, Any, Literal

from annotated_types import Ge

from lightning_fl.aggregators import WeightedMean
from lightning_fl.algorithms.algorithm import Algorithm
from lightning_fl.algorithms.method import Wrapper
from lightning_fl.checks import Called
from lightning_fl.errors import require
from lightning_fl.personal import PersonalGates
from lightning_fl.rules import ControlVariates, Thresholded
from lightning_fl.slots import Validation
from lightning_fl.steps import Apply, ControlUpdate


class FedDP(Wrapper):
    """Any method; each client prunes channels for each sample, with gates of its own."""

    changeable = frozenset({"validation_clients"})

    def __init__(
        self,
        base: Algorithm | None = None,
        keep: float = 0.7071,
        penalty: float = 1e-8,
        gate_mode: Literal["ste", "multiply", "index"] = "ste",
        detach_gate_input: bool = True,
        seed: int = 0,
        validation_clients: Annotated[int, Ge(1)] | None = None,
        variant: Literal["gates", "threshold"] = "gates",
        pruning_threshold: Annotated[float, Ge(0), Called("pruning_threshold, a magnitude,")] = 1e-3,
        masked_correction: bool | None = None,
        **slots: Any,
    ) -> None:
        """Take over the slots of the base method.

        Args:
            base: Method under the gates: FedAvg, FedProx, FedNova, SCAFFOLD …; SCAFFOLD if not given, as in the paper.
            keep: Share of each convolution's channels to keep, in (0, 1]; 0.7071 halves the MACs of a chain such as
                VGG-11, about 0.65 those of ResNet-32 (without those that read zeros), 1 is the base.
            penalty: Weight λ ≥ 0 of the lasso on the gates.
            gate_mode: Choose channels (ste), also scale them (multiply), or choose without the task's gradient (index), so that
                only the lasso trains the gates.
            detach_gate_input: Stop a gate's gradient at its input.
            seed: Seed of the gates that all clients start with.
            validation_clients: Number of clients whose gates are validated; trainer.validation_clients if not given.
            variant: Prune by gates, or by threshold as in the authors' released code.
            pruning_threshold: Largest magnitude that the threshold variant sets to 0, at least 0.
            masked_correction: Correct SCAFFOLD's gradient also where a step's samples switch a channel off, as the paper's
                algorithm prints and if not given; False corrects only where the gradient is not 0.
        """
        gates = PersonalGates(keep, penalty, gate_mode, detach_gate_input, seed)
        base = _scaffold() if base is None else copy(base)
        if masked_correction is False:
            name = base.name if isinstance(base, Algorithm) else repr(base)
            require(
                isinstance(base, Algorithm) and isinstance(base.rule, ControlVariates),
                f"masked_correction=False is for SCAFFOLD, which corrects gradients; {name} does not.",
            )
            base.rule = ControlVariates(masked_correction=False)
        if variant == "threshold" and isinstance(base, Algorithm):  # anything else is refused below
            base.rule = Thresholded(base.rule, pruning_threshold)
        super().__init__(base, [gates] if variant == "gates" else [], **slots)
        if validation_clients is not None:
            self.validation_clients = validation_clients

    def validate(self, validation: Validation) -> dict[str, float]:
        """Return the values of the base method with gates, and the paper's cost."""
        values = super().validate(validation)
        if validation.context is not None:
            context = validation.context
            values["feddp/paper_cost_bytes"] = 4 * context.layout.numel * validation.cohort_size * context.round
        return values


def _scaffold() -> Algorithm:
    steps: Sequence[Any] = (Apply(), ControlUpdate())
    return Algorithm(rule=ControlVariates(), aggregator=WeightedMean("samples"), steps=steps)

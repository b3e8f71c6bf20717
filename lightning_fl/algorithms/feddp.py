"""FedDP: Yu et al., Heterogeneous Federated Learning using Dynamic Model Pruning and Adaptive Gradient, CCGrid 2023
(arXiv:2106.06921); gates after Gao et al., Dynamic Channel Pruning: Feature Boosting and Suppression, ICLR 2019
(arXiv:1810.05331).

client k:  w ← w,  w_g its own gates, at first the same for all clients
           every convolution l:  z_l = A_l pool(x_l) + a_l,  y_l = norm(conv(x_l)) ⊙ top-K(sigmoid z_l)
           L = CE + λ Σ_l mean ‖z_l‖₁, one backward pass
           w ← w − η (∇_w L − c_k + c), or the base method's step; w_g ← w_g − η ∇_{w_g} L
           keeps w_g; the upload is the base method's               callback: DynamicGates, owned by the clients
server:    as in the base method

Where all samples of a step switch a channel off, the correction c − c_k alone moves its filter; `masked_correction=False` leaves
it where it is, the other reading of "no gradient retained for them".

Gates never cross, so the bits are the base method's. The printed algorithm has errors, such as a second gradient for the gates
after the step, and 1/(Eη) in place of the number of steps; the rules of the base methods correct them. With a top-K without a
gradient, only the lasso would train the gates; the straight-through estimator adds the task's gradient. The authors' released
code has neither gates nor control variates, but sets small weights of convolutions to 0 after every epoch:
`variant="threshold"`.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule
from torch import nn

from lightning_fl.aggregators import WeightedMean
from lightning_fl.algorithms.algorithm import Algorithm, is_or_wraps, mean_over_clients
from lightning_fl.algorithms.method import Wrapper
from lightning_fl.callbacks import DynamicGates
from lightning_fl.checks import check_at_least, check_choice, check_whole
from lightning_fl.errors import require
from lightning_fl.gates import gate_parameters, gates_of, remove_gates, sliced, without_gates
from lightning_fl.rules import ControlVariates, Thresholded
from lightning_fl.slots import Server, Setting, Validation, forwards
from lightning_fl.steps import Apply, ControlUpdate


@forwards("base")
class FedDP(Wrapper):
    """Any method, with clients that prune channels dynamically by their own gates."""

    changeable = frozenset({"validation_clients"})

    def __init__(
        self,
        base: Algorithm | None = None,
        keep: float = 0.7071,
        penalty: float = 1e-8,
        gate_mode: Literal["ste", "multiply", "index"] = "ste",
        detach_gate_input: bool = True,
        seed: int = 0,
        validation_clients: int | None = None,
        variant: Literal["gates", "threshold"] = "gates",
        pruning_threshold: float = 1e-3,
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
            validation_clients: Number of clients whose gates are validated, drawn anew every time; all if not given.
            variant: Prune by gates, or by threshold as in the authors' released code.
            pruning_threshold: Largest magnitude that the threshold variant sets to 0, at least 0.
            masked_correction: Correct SCAFFOLD's gradient also where a step's samples switch a channel off, as the paper's
                algorithm prints and if not given; False corrects only where the gradient is not 0.
        """
        check_choice("variant", variant, ("gates", "threshold"))
        if validation_clients is not None:
            check_whole("validation_clients", validation_clients, 1)
        is_itself = isinstance(base, Algorithm) and is_or_wraps(base, FedDP)
        require(
            base is None or (isinstance(base, Algorithm) and not is_itself and base.trains_in_rounds),
            "base must be a method that trains clients in rounds, such as FedAvg(), FedProx(), FedNova() or SCAFFOLD(), got "
            f"{'FedDP itself' if is_itself else repr(base)}.",
        )
        self.gates = ClientGates(DynamicGates(keep, penalty, gate_mode, detach_gate_input, seed=seed))
        base = _scaffold() if base is None else copy(base)
        check_at_least("pruning_threshold, a magnitude,", pruning_threshold, 0)
        if masked_correction is False:
            require(
                isinstance(base.rule, ControlVariates),
                f"masked_correction=False is for SCAFFOLD, which corrects gradients; {base.name} does not.",
            )
            base.rule = ControlVariates(masked_correction=False)
        if variant == "threshold":
            base.rule = Thresholded(base.rule, pruning_threshold)
        super().__init__(base=base, **slots)
        self.validation_clients = validation_clients
        self.variant = variant

    def personal_parameters(self, module: nn.Module) -> list[str]:
        """Return the gates, and the base method's personal parameters."""
        own = {*self.base.personal_parameters(module), *(gate_parameters(module) if self.variant == "gates" else ())}
        return [name for name, _ in module.named_parameters() if name in own]

    def check(self, setting: Setting, server: Server, cohort_size: int) -> None:
        """Raise `UserError` unless the run fits the base method, the threshold rule and `validation_clients`."""
        require(
            self.validation_clients is None or self.validation_clients <= setting.num_clients,
            f"validation_clients is {self.validation_clients}, but the federation has {setting.num_clients} clients: give at "
            f"most {setting.num_clients}, or leave it out to validate with all.",
        )
        self.base.check(setting, server, cohort_size)

    def validate(self, validation: Validation) -> dict[str, float]:
        """Return means over clients with their gates, metrics without gates, MACs of inference, and the paper's cost."""
        found = self._gated(validation) if gates_of(validation.module) else self.base.validate(validation)
        if validation.setting is not None:
            setting = validation.setting
            found["feddp/paper_cost_bytes"] = 4 * setting.layout.numel * validation.cohort_size * setting.round
        return found

    def _gated(self, validation: Validation) -> dict[str, float]:
        means = mean_over_clients(validation, validation.clients(self.validation_clients))
        with without_gates(validation.module):
            dense = validation.averages()
        macs = validation.macs(sliced)
        return {
            **means,
            **{f"{name}_gated": means[name] for name in dense},
            **{f"{name}_dense": value for name, value in dense.items()},
            **({} if macs is None else {"model/macs_gated": macs}),
        }

    def configure_callbacks(self) -> list[Callback]:
        """Return the callbacks of the base method, and the gates."""
        return [*self.base.configure_callbacks(), *([self.gates] if self.variant == "gates" else [])]


class ClientGates(Callback):
    """Gates on the module while a trainer runs, but not in its `state_dict`: the server has none."""

    def __init__(self, gates: DynamicGates) -> None:
        self.gates = gates
        self._hook: Any = None

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Add the gates, and omit them from checkpoints and exports."""
        self.gates.setup(trainer, pl_module, stage)
        if self._hook is not None:
            self._hook.remove()
        self._hook = pl_module.register_state_dict_post_hook(_leave_out)

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Remove the gates."""
        self.gates.teardown(trainer, pl_module, stage)
        remove_gates(pl_module)
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def _leave_out(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    """Remove the gates from a `state_dict`."""
    for name in gate_parameters(module):
        state_dict.pop(prefix + name, None)


def _scaffold() -> Algorithm:
    steps: Sequence[Any] = (Apply(), ControlUpdate())
    return Algorithm(rule=ControlVariates(), aggregator=WeightedMean("samples"), steps=steps)

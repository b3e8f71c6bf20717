"""Dynamic channel pruning in any Lightning trainer: FedDP's gates (Yu et al., CCGrid 2023) on a single network.

Each convolution uses only K = max(1, round(keep · C_out)) channels, chosen for every sample by a small gate that reads the
convolution's input: `lightning_fl.gates` has the formulas. Each training step adds λ Σ_l mean ‖z_l‖₁ to its loss, where z are
the gates' outputs before their sigmoid.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from annotated_types import Ge, Interval
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_fl.checks import LARGEST_SEED, Called, checked, is_a, name_parts
from lightning_fl.errors import require
from lightning_fl.gates import add_gates, describe_gates, gates_of, penalised
from lightning_fl.gates.gate import Keep, Mode
from lightning_fl.gates.network import SKIPPED

TRAINING_STEP = "training_step"


class DynamicGates(Callback):
    """Add gates to a module's convolutions, and train them with it.

    The gates are children of the convolutions (`conv1.gate.weight`), added in `setup`, so `configure_optimizers` finds them among
    `self.parameters()`, and checkpoints contain them. They stay on the module after the training, for `validate`, `test` and
    `lightning_fl.gates.sliced`; `lightning_fl.gates.remove_gates` removes them. The mask follows the normalisation behind a
    convolution, so the next layer gets exactly 0 from a channel that was not chosen. During training, all channels are
    computed and then masked. Other layers, such as attention, have no gates; a fit prints the share of the parameters that
    gated convolutions hold.

    Args:
        keep: share of the channels to keep, in (0, 1]; 1 adds no gates. 0.7071 halves the MACs of a chain.
        penalty: weight λ ≥ 0 of the lasso on the gates.
        mode: `ste` chooses channels; `multiply` also scales the kept ones by sigmoid(z); `index` chooses, and only the penalty
            trains the gates.
        detach_input: stop a gate's gradient at its input.
        skip: whole parts of names, such as `conv1` or `shortcut`; convolutions with one of them in their name get no gate.
        seed: seed of the gates' initial weights.

    Raises:
        UserError: an argument is out of range; later, the module has no convolutions, or no layer of a given name, or a callback
            before this one averages the weights of the module without gates.
    """

    in_rehearsals = True
    """True if a plan's rehearsal calls its hooks, because the model or the messages depend on them."""

    @checked
    def __init__(
        self,
        keep: Keep = 0.7071,
        penalty: Annotated[float, Ge(0), Called("penalty, the weight of the lasso on the gates,")] = 1e-8,
        mode: Mode = "ste",
        detach_input: bool = True,
        skip: Sequence[str] = SKIPPED,
        seed: Annotated[int, Interval(ge=0, le=LARGEST_SEED)] = 0,
    ) -> None:
        self.keep = keep
        self.penalty = penalty
        self.mode = mode
        self.detach_input = detach_input
        self.skip = name_parts(skip)
        self.seed = seed

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Add the gates, unless the module has some, and add the penalty to the loss."""
        gates = gates_of(pl_module)
        if not gates:
            gates = add_gates(pl_module, self.keep, self.mode, self.detach_input, self.skip, self.seed)
            if stage == "fit" and gates:
                self._refuse_earlier_averages(trainer, pl_module)
        _unwrap_step(pl_module)
        if stage == "fit" and gates:
            rank_zero_info(f"DynamicGates gates {describe_gates(pl_module)} of {type(pl_module).__name__}.")
        if stage == "fit" and gates and self.penalty:
            require(
                pl_module.automatic_optimization,
                f"DynamicGates adds its penalty to the loss that training_step returns, but {type(pl_module).__name__} does not "
                "use it, because automatic_optimization is False: give penalty=0 and add lightning_fl.gates.lasso yourself.",
            )
            step = penalised(pl_module.training_step, list(gates.values()), self.penalty)
            vars(pl_module)[TRAINING_STEP] = step

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Restore the module's own training step."""
        _unwrap_step(pl_module)

    def _refuse_earlier_averages(self, trainer: Any, module: LightningModule) -> None:
        """Raise `UserError` if a callback before this one averages weights; it has copied the module in its `setup`."""
        callbacks = trainer.callbacks
        is_there = self in callbacks  # FedDP's own are not
        for other in callbacks[: callbacks.index(self)] if is_there else ():
            name = type(other).__name__
            require(
                not is_a(other, WeightAveraging, StochasticWeightAveraging),
                f"{name} averages the parameters that {type(module).__name__} has without the gates of DynamicGates: put "
                f"DynamicGates before {name} in the callbacks.",
            )


def _unwrap_step(module: LightningModule) -> None:
    """Remove the penalty from a module's training step; a step that was set on the object, such as a compiled one, stays."""
    step = vars(module).get(TRAINING_STEP)
    if isinstance(step, penalised):
        del vars(module)[TRAINING_STEP]
        if step.step != module.training_step:
            vars(module)[TRAINING_STEP] = step.step

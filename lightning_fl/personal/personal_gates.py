"""Channel gates that every client keeps: FedDP (Yu et al., CCGrid 2023); `lightning_fl.gates` has their formulas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule
from torch import nn

from lightning_fl.callbacks import DynamicGates
from lightning_fl.gates import gate_parameters, remove_gates, sliced, without_gates
from lightning_fl.slots import Owned, Personal, Validation


@dataclass(frozen=True)
class PersonalGates(Personal):
    """Let every client prune channels dynamically by gates of its own, which it trains with the model.

    Attributes:
        keep: share of each convolution's channels to keep, in (0, 1]; 1 adds no gates.
        penalty: weight λ ≥ 0 of the lasso on the gates.
        mode: choose channels (`ste`), also scale them (`multiply`), or choose without the task's gradient (`index`).
        detach_input: stop a gate's gradient at its input.
        seed: seed of the gates that all clients start with.
    """

    keep: float = 0.7071
    penalty: float = 1e-8
    mode: Literal["ste", "multiply", "index"] = "ste"
    detach_input: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        self.configure_callbacks()  # which checks the hyper-parameters

    def owned(self, module: nn.Module) -> Owned:
        """Return the names of the gates' parameters."""
        return Owned(frozenset(gate_parameters(module)))

    def configure_callbacks(self) -> list[Callback]:
        """Return the callback that adds the gates and their penalty."""
        gates = DynamicGates(self.keep, self.penalty, self.mode, self.detach_input, seed=self.seed)
        return [ClientGates(gates)]

    def validate(self, validation: Validation, means: dict[str, float]) -> dict[str, float]:
        """Return the means with the clients' gates again, metrics without gates, and the MACs of inference."""
        if not gate_parameters(validation.module):
            return {}
        with without_gates(validation.module):
            dense = validation.averages()
        macs = validation.macs(sliced)
        return {
            **{f"{name}_gated": means[name] for name in dense},
            **{f"{name}_dense": value for name, value in dense.items()},
            **({} if macs is None else {"model/macs_gated": macs}),
        }


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

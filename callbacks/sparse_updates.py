"""Sparse updates in any Lightning trainer: of every optimiser step only the k largest changes are made (FedAdam-SSM's mask).

Δw, Δm, Δv = what the optimiser's step changed;  mask = the k largest |Δw| (or |Δm|, |Δv|) over the whole model
w, m, v ← those before + (Δw, Δm, Δv) ⊙ mask

With error feedback Δw + e takes the place of Δw, and e ← (Δw + e) ⊙ (1 − mask). Where workers exchange steps in place of models,
this is what one of them sends: 32k bits for every vector and min(d, k⌈log2 d⌉) for the mask.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor

from lightning_fl.errors import UserError, nearest, require
from lightning_fl.pruning import plans_of
from lightning_fl.sparse import num_kept, positions_bits, top_k

WEIGHT = "parameter"
# Whose change chooses, by the names that torch's optimisers give their moments.
MASKS: dict[str, tuple[str, ...]] = {
    "parameters": (WEIGHT,),
    "first_moment": ("exp_avg", "momentum_buffer"),
    "second_moment": ("exp_avg_sq",),
}


class SparseUpdates(Callback):
    """Let every optimiser step change only a share of the model, and count what sending such steps takes.

    All parameters of an optimiser are one vector of d numbers; k = max(1, ⌊alpha · d⌋) of them change. Moments that the
    optimiser keeps for each number (Adam's two, SGD's momentum) share the mask and keep their old values elsewhere. A moment that
    the first step creates counts from zero. Under DDP every process makes the same step and takes the same mask.

    Logs `sparse/bytes`, what the steps so far would have cost to send.

    Args:
        alpha: share of the numbers that a step may change, in (0, 1]; 1 changes nothing but the count.
        mask: whose change chooses: that of the `parameters`, the `first_moment` or the `second_moment`.
        error_feedback: add what was left out of a step to the next one.

    Raises:
        UserError: alpha outside its range, an unknown mask, or an optimiser without the moment that the mask asks for.
    """

    def __init__(
        self,
        alpha: float = 0.05,
        mask: Literal["parameters", "first_moment", "second_moment"] = "parameters",
        error_feedback: bool = False,
    ) -> None:
        require(0 < alpha <= 1, f"alpha is the share of numbers that a step changes and lies in (0, 1], got {alpha}.")
        if mask not in MASKS:
            raise UserError(f"mask {mask!r} is unknown; {nearest(str(mask), MASKS)}.")
        self.alpha = alpha
        self.mask = mask
        self.error_feedback = error_feedback
        self.sent_bits = 0
        self._residual: Tensor | None = None
        self._shapes: list[torch.Size] = []
        self._num_plans = 0
        self._optimizer: torch.optim.Optimizer | None = None
        self._before: list[dict[str, Tensor]] = []

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """What was left out, if the checkpoint brought some, belongs to the module as it is now."""
        self._num_plans = len(plans_of(pl_module))

    def on_before_optimizer_step(
        self, trainer: Any, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Keep a copy of what the step is about to change."""
        self._sparsify()  # the step of another optimiser in the same batch
        self._follow_pruning(pl_module, _parameters(optimizer))
        self._optimizer = optimizer
        self._before = [
            {WEIGHT: p.detach().clone(), **{name: x.clone() for name, x in _moments(optimizer, p).items()}}
            for p in _parameters(optimizer)
        ]

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *batch: Any) -> None:
        """The step is done, if there was one."""
        self._sparsify()

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Log the count."""
        pl_module.log("sparse/bytes", self.sent_bits / 8)

    def on_client_download(self, trainer: Any, pl_module: LightningModule, client: int) -> None:
        """A federation's hook: another client begins, to which what the last one left out is nothing."""
        self._residual = None

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"sent_bits": self.sent_bits, "residual": self._residual, "shapes": [list(x) for x in self._shapes]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From the checkpoint."""
        self.sent_bits, self._residual = state_dict["sent_bits"], state_dict["residual"]
        self._shapes = [torch.Size(x) for x in state_dict.get("shapes", [])]  # 0.1 did not save them

    def _follow_pruning(self, module: LightningModule, parameters: list[Tensor]) -> None:
        """Cut what was left out as the module has been cut since."""
        plans = plans_of(module)[self._num_plans :]
        if self._residual is not None and plans:
            names = {id(parameter): name for name, parameter in module.named_parameters()}
            parts = self._residual.split([shape.numel() for shape in self._shapes])
            cut = []
            for parameter, part, shape in zip(parameters, parts, self._shapes, strict=True):
                whole = part.view(shape)
                cut.append(reduce(lambda x, plan: plan.cut(names[id(parameter)], x), plans, whole))
            self._residual = _flat(cut)
        self._shapes, self._num_plans = [x.shape for x in parameters], self._num_plans + len(plans)

    @torch.no_grad()
    def _sparsify(self) -> None:
        """Undo the step but for the largest changes."""
        optimizer, self._optimizer = self._optimizer, None
        if optimizer is None:
            return
        after = [{WEIGHT: p.detach(), **_moments(optimizer, p)} for p in _parameters(optimizer)]
        names = [name for name in after[0] if all(name in tensors for tensors in after)]
        before = {
            name: _flat([old.get(name, torch.zeros_like(new[WEIGHT])) for old, new in self._pairs(after)])
            for name in names
        }
        now = {name: _flat([tensors[name] for tensors in after]) for name in names}
        wanted = now[WEIGHT]
        if self._residual is not None:
            wanted = wanted + self._residual.to(wanted)
        leader = next((name for name in MASKS[self.mask] if name in names), None)
        if leader is None:
            raise UserError(
                f"mask {self.mask!r} needs a moment that {type(optimizer).__name__} does not keep: take 'parameters'."
            )
        changes = wanted - before[WEIGHT] if leader == WEIGHT else now[leader] - before[leader]
        positions = top_k(changes, num_kept(self.alpha, len(changes)))
        if self.error_feedback:
            self._residual = (wanted - before[WEIGHT]).index_fill_(0, positions, 0.0)
        for name in names:
            kept = before[name].index_copy_(0, positions, (wanted if name == WEIGHT else now[name])[positions])
            for tensors, part in zip(after, kept.split([t[WEIGHT].numel() for t in after]), strict=True):
                tensors[name].copy_(part.view_as(tensors[name]))
        width = wanted.element_size() * 8
        self.sent_bits += len(names) * width * len(positions) + positions_bits(len(positions), len(changes))

    def _pairs(self, after: list[dict[str, Tensor]]) -> Iterable[tuple[dict[str, Tensor], dict[str, Tensor]]]:
        return zip(self._before, after, strict=True)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _moments(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """What the optimiser keeps for each number of the parameter, by its name."""
    state = optimizer.state.get(parameter, {})
    return {name: x for name, x in state.items() if isinstance(x, Tensor) and x.shape == parameter.shape and x.dim()}


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in tensors])

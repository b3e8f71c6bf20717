"""Sparse updates in any Lightning trainer: keep only the k largest changes of optimiser steps (FedAdam-SSM's mask).

Δw, Δm, Δv = the changes of n optimiser steps;  mask = the k largest |Δw| (or |Δm|, |Δv|) over the whole model
w, m, v ← values before the steps + (Δw, Δm, Δv) ⊙ mask

With error feedback Δw + e replaces Δw, and e ← (Δw + e) ⊙ (1 − mask). If workers exchange updates instead of models, each
sends 32k bits per vector and min(d, k⌈log2 d⌉) for the mask.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Interval
from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_fl.checks import Called, checked, needs_closure
from lightning_fl.coding.top_k import num_kept, positions_bits, top_k
from lightning_fl.errors import UserError, require
from lightning_fl.pruning import Masks, masks_of, plans_of

WEIGHT = "parameter"
# Vectors whose changes give the mask, by the names of moments in torch's optimisers.
MASKS: dict[str, tuple[str, ...]] = {
    "parameters": (WEIGHT,),
    "first_moment": ("exp_avg", "momentum_buffer"),
    "second_moment": ("exp_avg_sq",),
}


@dataclass
class _Update:
    """Changes of one optimiser since its last exchange."""

    steps: int = 0
    before: list[dict[str, Tensor]] = field(default_factory=list)  # parameters and moments at the exchange, by name
    left_out: Tensor | None = None  # (d,)
    shapes: list[torch.Size] = field(default_factory=list)  # of the parameters, in the order of left_out


class SparseUpdates(Callback):
    """Restrict optimiser steps to the largest changes, and count the bytes of such sparse updates.

    All parameters of an optimiser form one vector of d numbers; k = max(1, ⌊alpha · d⌋) of them change in `every_n_steps`
    steps, or in fewer at the end of an epoch or of the training. Moments that the optimiser keeps for each number (Adam's two,
    SGD's momentum) share the mask, and keep their old values elsewhere. A moment that the first step creates starts from zero;
    moments of a parameter without gradient stay zero. Every optimiser has its own mask. Under DDP every process makes the same
    steps and takes the same mask; DDP itself still exchanges whole gradients.

    An update of n vectors, the parameters among them, counts 32nk + min(d, k⌈log2 d⌉) bits. During an exchange there are three
    copies of the model's vectors. The exchange follows the step at once, so that averages of weights, and a second optimiser of
    the same batch, see the sparse step. Checkpoints contain the left-out parts, an unfinished update and the count.

    Adam learns little from sparse single steps, because most numbers rarely get new moments. With ten steps or more between two
    exchanges, as on FedAdam-SSM's clients, it learns about as well as without the callback.

    In a federation every local step of every client is sparse, and a client starts with no left-out part. If a method makes
    the clients' steps itself, the steps are sparse, but the method's own moments are not.

    Logs `sparse/bytes`, the bytes that would have been sent for all updates so far; in a federation, for the local steps, not
    for the uploads.

    Args:
        alpha: share of the numbers that an update may change, in (0, 1]; 1 only counts.
        mask: vector whose largest changes are kept: the `parameters`, the `first_moment` or the `second_moment`.
        error_feedback: add the left-out part of an update to the next one.
        every_n_steps: optimiser steps between two exchanges, at least 1; must be 1 in a federation, which has exchanges of its
            own.

    Raises:
        UserError: an argument is out of range, the mask is unknown, the optimiser does not keep the mask's moment, or it is
            LBFGS.
    """

    columns_of_clients = ("sparse/",)

    in_rehearsals = True
    """True if a plan's rehearsal calls its hooks, because the model or the messages depend on them."""

    @checked
    def __init__(
        self,
        alpha: Annotated[
            float, Interval(gt=0, le=1), Called("alpha, the share of numbers that an update changes,")
        ] = 0.05,
        mask: Literal["parameters", "first_moment", "second_moment"] = "parameters",
        error_feedback: bool = False,
        every_n_steps: Annotated[int, Ge(1)] = 1,
    ) -> None:
        self.alpha = alpha
        self.mask = mask
        self.error_feedback = error_feedback
        self.every_n_steps = every_n_steps
        self.sent_bits = self._epoch_bits = 0
        self._in_federation = False
        self._num_plans = 0
        self._updates: dict[int, _Update] = {}  # by the optimiser's index in the trainer
        # Parameters of the updates, because Lightning's `toggle_optimizer` freezes those of other optimisers for a while.
        self._parameters: dict[int, list[Tensor]] = {}
        self._handles: dict[int, RemovableHandle] = {}  # of hooks after steps

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Reset for a new training."""
        self._let_go()
        self._in_federation, self._epoch_bits = hasattr(trainer, "evaluate_clients"), 0
        if stage == "fit" and trainer.current_epoch == 0:
            self.sent_bits, self._updates = 0, {}

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Note the prunings so far: left-out parts from a checkpoint already fit the pruned module.

        Raises:
            UserError: an optimiser computes several gradients within a step.
        """
        self._num_plans = len(plans_of(pl_module))
        self._parameters = dict(enumerate(map(_trained, trainer.optimizers)))
        for optimizer in trainer.optimizers:
            require(
                not needs_closure(optimizer),
                f"SparseUpdates masks the steps of an optimiser, but {type(optimizer).__name__} computes several gradients "
                "within a step: use another optimiser, such as Adam.",
            )

    def on_before_optimizer_step(
        self, trainer: Any, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Copy the tensors that the next steps will change."""
        self._exchange(trainer)  # this optimiser may have made a step in the same batch
        self._follow_pruning(trainer, pl_module)
        index = trainer.optimizers.index(optimizer)
        update = self._updates.setdefault(index, _Update())
        if update.steps == 0:
            before, parameters = self._parameters[index], _trained(optimizer)
            self._parameters[index] = parameters
            _keep_left_out(update, before, parameters, masks_of(pl_module), pl_module)
            update.shapes = [p.shape for p in parameters]
            update.before = [
                {WEIGHT: p.detach().clone(), **{name: x.clone() for name, x in _moments(optimizer, p).items()}}
                for p in parameters
            ]
        update.steps += 1
        # Elsewhere, the federation steps vectors, not the parameters. Wrappers of optimisers may have no hooks.
        steps_parameters = not self._in_federation or not pl_module.automatic_optimization
        if steps_parameters and hasattr(optimizer, "_optimizer_step_post_hooks"):
            if index in self._handles:
                self._handles[index].remove()
            # Added anew at each step, so that it comes after the hooks that hold pruned weights at 0.
            self._handles[index] = optimizer.register_step_post_hook(lambda *step: self._exchange(trainer))

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *batch: Any) -> None:
        """Exchange updates that are complete, or all at the end of an epoch."""
        self._exchange(trainer, in_any_case=self.every_n_steps > 1 and trainer.is_last_batch)

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Exchange the updates of a training that ends within an epoch, and log the bytes so far."""
        if self.every_n_steps > 1:
            self._exchange(trainer, in_any_case=True)
        bits, self._epoch_bits = self._epoch_bits, 0
        if self._in_federation and trainer.world_size > 1:  # each process trains clients of its own
            bits = int(trainer.strategy.reduce(torch.tensor(bits, device=pl_module.device), reduce_op="sum"))
        self.sent_bits += bits
        num_bytes = torch.tensor(self.sent_bits / 8, dtype=torch.float64)  # a Python float would become float32
        pl_module.log("sparse/bytes", num_bytes)

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Remove the hooks of the optimisers."""
        self._let_go()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without the hooks, which belong to the optimisers of this training."""
        return {**vars(self), "_handles": {}}

    def _let_go(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles = {}

    def on_client_download(self, trainer: Any, pl_module: LightningModule, client: int) -> None:
        """Drop the last client's updates when another client starts in a federation."""
        require(
            self.every_n_steps == 1,
            f"SparseUpdates needs every_n_steps 1 in a federation, got {self.every_n_steps}: "
            "use a method such as FedAdamSSM for sparse uploads.",
        )
        self._updates.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        sent_bits = self.sent_bits + self._epoch_bits
        return {"sent_bits": sent_bits, "updates": {i: dict(vars(x)) for i, x in self._updates.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a checkpoint."""
        self.sent_bits = state_dict["sent_bits"]
        self._updates = {i: _Update(**x) for i, x in state_dict["updates"].items()}

    def _exchange(self, trainer: Any, in_any_case: bool = False) -> None:
        """Thin out the complete updates, or all that have begun."""
        for index, update in self._updates.items():
            if update.steps == self.every_n_steps or (in_any_case and update.steps):
                self._thin_out(update, trainer.optimizers[index], self._parameters[index])
                update.steps, update.before = 0, []

    def _follow_pruning(self, trainer: Any, module: LightningModule) -> None:
        """Prune the kept tensors as the module has been pruned since."""
        plans = plans_of(module)[self._num_plans :]
        if not plans:
            return
        names = {id(parameter): name for name, parameter in module.named_parameters()}

        def cut(parameter: Tensor, tensor: Tensor) -> Tensor:
            return reduce(lambda x, plan: plan.cut(names[id(parameter)], x), plans, tensor)

        for index, update in self._updates.items():
            parameters = self._parameters[index]
            update.before = [
                {name: cut(parameter, x) for name, x in tensors.items()}
                for parameter, tensors in zip(parameters, update.before, strict=bool(update.before))
            ]
            if update.left_out is not None:
                parts = update.left_out.split([shape.numel() for shape in update.shapes])
                wholes = zip(parameters, parts, update.shapes, strict=True)
                update.left_out = _flat([cut(parameter, part.view(shape)) for parameter, part, shape in wholes])
            update.shapes = [parameter.shape for parameter in parameters]
        self._num_plans += len(plans)

    @torch.no_grad()
    def _thin_out(self, update: _Update, optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> None:
        """Undo an update of these parameters except its largest changes."""
        after = [{WEIGHT: p.detach(), **_moments(optimizer, p)} for p in parameters]
        names = list(dict.fromkeys(name for tensors in after for name in tensors))
        now = {name: _vector(after, name) for name in names}
        before = {name: _vector(update.before, name).to(now[name]) for name in names}
        wanted = now[WEIGHT]
        if update.left_out is not None:
            wanted = wanted + update.left_out.to(wanted)
        leader = next((name for name in MASKS[self.mask] if name in names), None)
        if leader is None:
            raise UserError(
                f"mask {self.mask!r} needs a moment that {type(optimizer).__name__} does not keep: use 'parameters'."
            )
        changes = wanted - before[WEIGHT] if leader == WEIGHT else now[leader] - before[leader]
        positions = top_k(changes, num_kept(self.alpha, len(changes)))
        if self.error_feedback:
            update.left_out = (wanted - before[WEIGHT]).index_fill_(0, positions, 0.0)
        for name in names:
            updated = before[name].index_copy_(0, positions, (wanted if name == WEIGHT else now[name])[positions])
            for tensors, part in zip(after, updated.split([t[WEIGHT].numel() for t in after]), strict=True):
                if name in tensors:
                    tensors[name].copy_(part.view_as(tensors[name]))
        width = wanted.element_size() * 8
        self._epoch_bits += len(names) * width * len(positions) + positions_bits(len(positions), len(changes))


def _keep_left_out(
    update: _Update, before: list[Tensor], now: list[Tensor], masks: Masks, module: LightningModule
) -> None:
    """Keep what was left out of the parameters that an optimiser trains now, except where `MagnitudePruning` has set them to 0.

    Args:
        update: holds it.
        before: parameters that the optimiser has trained, as they are ordered in it.
        now: those that it trains from now on; others may have been frozen or unfrozen since.
        masks: masks of the module.
        module: the module.
    """
    if update.left_out is None:
        return
    parts = dict(zip(map(id, before), update.left_out.split([shape.numel() for shape in update.shapes]), strict=True))
    for name, parameter in module.named_parameters():
        if name in masks and id(parameter) in parts:
            part = parts[id(parameter)]
            parts[id(parameter)] = part * masks[name].flatten().to(part.device)
    new = update.left_out.new_zeros
    update.left_out = torch.cat([parts[id(p)] if id(p) in parts else new(p.numel()) for p in now])


def _trained(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _moments(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return the optimiser's tensors in the shape of the parameter, by name."""
    state = optimizer.state.get(parameter, {})
    return {name: x for name, x in state.items() if isinstance(x, Tensor) and x.shape == parameter.shape and x.dim()}


def _vector(parts: list[dict[str, Tensor]], name: str) -> Tensor:
    """Return one vector (d,) over all parameters; zeros for a parameter without it, such as one that got no gradient yet."""
    return _flat([tensors[name] if name in tensors else torch.zeros_like(tensors[WEIGHT]) for tensors in parts])


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in tensors])

"""Manual optimisation: the module makes its steps itself in `training_step`, with one optimiser or several.

Each client starts with optimisers without a state, at the hyper-parameters of the round and with its schedulers, and its steps
change the parameters in the flat storage. No gradient is masked, clipped or gathered, so only methods that read the trained
weights allow it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn

from lightning_fl.errors import UserError, require
from lightning_fl.flat_module.hooks import Hooks
from lightning_fl.flat_module.local_progress import LocalProgress
from lightning_fl.flat_module.optimizers.fresh_state import FreshState
from lightning_fl.flat_module.optimizers.module_optimizer import REPLACED, check_rates, set_groups
from lightning_fl.flat_module.optimizers.schedules import Schedules, check_schedulers
from lightning_fl.internals import configured_optimizers, configured_schedulers_manually
from lightning_fl.pruning import Plan
from lightning_fl.slots import Gradients, Personal, Rule
from lightning_fl.vectors.layout import Layout


class Bound(Protocol):
    """Attributes of the flat module that the steps change."""

    params: Tensor
    progress: LocalProgress | None

    @property
    def module(self) -> LightningModule:
        """The module."""

    @property
    def hooks(self) -> Hooks:
        """Calls Lightning's hooks."""

    def bind_replaced(self) -> None:
        """Make parameters whose data something has replaced views of `params` again."""


class AllOptimizers:
    """The parameter groups of all optimisers, as if they were one.

    Attributes:
        param_groups: the groups of all optimisers, one after the other.
        state: always empty: each optimiser has its own.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.state: dict[Any, Any] = {}


class ManualOptimizers:
    """The optimisers of a module that steps them itself; it stands in for `ModuleOptimizer`.

    Attributes:
        optimizers: the module's optimisers.
        wrapped: the same, as `self.optimizers()` returns them to the module.
        optimizer: their groups, as those of one optimiser.
        schedules: hyper-parameters of the round, and the schedulers, which the module steps itself.
        names: names of the parameters that they step.
        personal_names: names of the personal parameters in each group, which these optimisers step like the others.
        groups_at_first: names of the parameters in each group of each optimiser as `configure_optimizers` returned them.
        params: vector (d,) whose views are the module's parameters.
    """

    is_elementwise = False
    is_plain_sgd = False
    momentum = None
    decays = False
    weight_decay = 0.0
    stepped = ()
    rates = ()
    acts_without_gradient = False
    has_step_hooks = False

    def __init__(self, flat_module: Bound, layout: Layout) -> None:
        """Call `configure_optimizers`.

        Raises:
            UserError: it returns no optimiser, or a scheduler that cannot go on with them.
        """
        module = flat_module.module
        configured: Any = module.configure_optimizers()
        optimizers, schedulers, _ = configured_optimizers(configured) if configured is not None else ([], [], None)
        name = type(module).__name__
        require(bool(optimizers), f"{name}.configure_optimizers returns no optimizer, so no client would train.")
        configs = configured_schedulers_manually(schedulers)
        check_schedulers(name, optimizers, configs)
        self.optimizers: list[torch.optim.Optimizer] = list(optimizers)
        for optimizer in self.optimizers:
            check_rates(optimizer)
        self.optimizer = AllOptimizers(self.optimizers)
        self.schedules = Schedules(self.optimizer, configs, module.lr_scheduler_step, by_module=True)  # type: ignore[arg-type]
        self._named = {p: name for name, p in module.named_parameters()}
        self._adopt_groups(layout)
        self.groups_at_first = self.group_names
        self._fresh_state = FreshState(self.optimizers)
        self._flat_module = flat_module
        self.wrapped = [LightningOptimizer(one) for one in self.optimizers]
        for one in self.wrapped:
            one._strategy = self  # type: ignore[assignment]  # of which it takes `optimizer_step` and `lightning_module`

    def _adopt_groups(self, layout: Layout) -> None:
        """Read the groups, and tell the parameters of the layout from personal ones."""
        groups = self.optimizer.param_groups = AllOptimizers(self.optimizers).param_groups
        named, shared = self._named, set(layout.names)
        self.names = shared.intersection(named.get(p, "") for group in groups for p in group["params"])
        self.personal_names = [
            [named[p] for p in group["params"] if p.requires_grad and named.get(p, "") not in shared and p in named]
            for group in groups
        ]
        self._adopted = self.group_names

    @property
    def has_other_groups(self) -> bool:
        """True if a callback has changed the groups since they were read, as `add_param_group` does."""
        return self.group_names != self._adopted

    @property
    def group_names(self) -> list[list[list[str]]]:
        """Names of the parameters in each group of each optimiser; "" for one that is not the module's."""
        groups = [one.param_groups for one in self.optimizers]
        return [[[self._named.get(p, "") for p in group["params"]] for group in of_one] for of_one in groups]

    def set_groups(self, groups: Sequence[Sequence[Sequence[nn.Parameter]]]) -> None:
        """Put these parameters into the groups of each optimiser; new groups have its defaults."""
        for optimizer, of_one in zip(self.optimizers, groups, strict=True):
            set_groups(optimizer, of_one)

    def showing_parameters(self) -> AbstractContextManager[None]:
        """Do nothing: the groups have the module's parameters."""
        return nullcontext()

    @property
    def lightning_module(self) -> LightningModule:
        """The module, whose `toggle_optimizer` an optimiser's `toggle_model` calls."""
        return self._flat_module.module

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], *unused: Any, **options: Any
    ) -> Any:
        """Make a step of one optimiser, as `lightning.Trainer` does: the closure, then the hook, then the step.

        Raises:
            UserError: no client trains, so that the step would change the server's model.
        """
        progress = self._flat_module.progress
        if progress is None:
            raise UserError(
                f"{type(self.lightning_module).__name__} steps an optimizer outside a client's training: do it in training_step."
            )
        self._flat_module.bind_replaced()  # `forward` may have moved what is about to be stepped

        def closing() -> Any:
            result = closure()
            for listener in self._flat_module.hooks.step_listeners().on_before_optimizer_step:
                listener(optimizer)
            return result

        result = optimizer.step(closure=closing, **options)
        if (unpruned := progress.local.context.unpruned) is not None:
            self._flat_module.params.mul_(unpruned.factors)
        progress.local.num_steps += 1
        return result

    def bind(self, params: Tensor, gradient: Tensor | None) -> None:
        """Note the vector of which the parameters are views; they carry their gradients themselves."""
        self.params = params

    def follow(self, plans: Sequence[Plan], layout: Layout) -> None:
        """Adapt to a module that is pruned or trains more, whose parameters are the same objects, and to groups of callbacks."""
        self._adopt_groups(layout)
        self._fresh_state.follow(plans, self._named)

    def activate(self, names: Sequence[str]) -> None:
        """Do nothing: the module steps what it likes."""

    def follow_replaced(self, optimizers: Sequence[torch.optim.Optimizer], configs: Sequence[Any]) -> None:
        """Refuse optimisers or schedulers that a hook has put in the place of these."""
        raise UserError(REPLACED)

    def narrow(self, num_clients: int) -> None:
        """Do nothing: clients that make their own steps are never stacked."""

    def step(self) -> None:
        """Refuse a step that the module does not make itself."""
        raise RuntimeError("a rule made a step of a module that makes its steps itself, which check_manual refuses")

    def start_client(self) -> None:
        """Empty the states of all optimisers; their hyper-parameters are those of the round already."""
        self._fresh_state.begin()
        self.schedules.adopt()

    def end_client(self) -> None:
        """Restore the hyper-parameters and schedulers with which every client starts, and empty the states."""
        self.schedules.end_client()
        self._fresh_state.end()

    @property
    def description(self) -> str:
        """Names of the optimisers, for error messages."""
        return " and ".join(type(optimizer).__name__ for optimizer in self.optimizers)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the first group."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def largest_rate(self) -> float:
        """Largest present learning rate of all parameter groups."""
        return max(float(group["lr"]) for group in self.optimizer.param_groups)


def check_manual(module: LightningModule, method: str, parts: Iterable[Rule | Personal], flags: dict[str, Any]) -> None:
    """Check that a federation can leave the steps to a module with `automatic_optimization = False`.

    Args:
        module: the module.
        method: name of the federated method.
        parts: its rules, the server's included, and what its clients keep.
        flags: values of the trainer's flags that concern steps, None where they are not given.

    Raises:
        UserError: the method reads gradients or makes steps, or a flag would change steps.
    """
    if module.automatic_optimization:
        return
    name = f"{type(module).__name__} has automatic_optimization = False, so it makes its steps itself"
    for part in parts:
        makes_steps = part.own_step or (
            part.has_phases if isinstance(part, Personal) else type(part).step is not Rule.step
        )
        require(
            part.reads == Gradients.NONE and not makes_steps,
            f"{name}, but {method} ({type(part).__name__}) needs the gradients or makes the steps: use a method that reads only "
            "the trained weights, as FedAvg with any server method, codec or personal layers, or automatic optimization.",
        )
    for flag, value in flags.items():
        require(value is None, f"{name}, which {flag}={value} does not reach: leave it out.")

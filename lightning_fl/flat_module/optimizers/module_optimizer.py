"""Drive the module's own optimiser in a federation: one optimiser serves all clients, and its state is emptied for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim.sgd import sgd

from lightning_fl.checks import needs_closure, overrides
from lightning_fl.checks.misconfiguration import MisconfigurationError
from lightning_fl.errors import UserError, require
from lightning_fl.flat_module.optimizers.fresh_state import FreshState
from lightning_fl.flat_module.optimizers.plain_sgd import plain_sgd
from lightning_fl.flat_module.optimizers.schedules import Schedules, check_schedulers
from lightning_fl.internals import configured_optimizers, configured_schedulers
from lightning_fl.pruning import Plan
from lightning_fl.vectors.layout import Layout

# These update each coordinate from that coordinate only, so they may step one flat vector instead of many tensors.
ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
SEVERAL = ": with automatic_optimization = False, training_step may step several itself"
REPLACED = (
    "a hook has replaced optimisers or schedulers in the middle of the run, which a federation follows only if there are no "
    "schedulers and one optimiser, of torch and of the same class: change its groups instead, self.optimizers().param_groups."
)
NO_MOMENTUM = {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "maximize": False}


class ModuleOptimizer:
    """Drive the one optimiser that `configure_optimizers` returns.

    Attributes:
        optimizer: the module's optimiser.
        schedules: its schedulers.
        is_elementwise: True if it updates each coordinate from that coordinate only, and may do so in flat vectors.
        names: names of the parameters that it steps.
        stepped: parts of the flat vector that these cover.
        personal_names: names of the personal parameters in each of its groups, which it does not step itself.
        groups_at_first: names of the parameters in each of its groups as `configure_optimizers` returned them.
        params: vector or stack that it steps: see `bind`.
    """

    def __init__(
        self, module: LightningModule, layout: Layout, by_plain_sgd: bool = False, by_lightning: bool = False
    ) -> None:
        """Call `configure_optimizers`; `bind` sets the tensor to step.

        Args:
            module: module that configures the optimiser.
            layout: positions of the parameters in the flat vectors; trainable parameters without one are personal.
            by_plain_sgd: True to step by plain SGD instead, at the optimiser's learning rates.
            by_lightning: True if Lightning's own loop makes the steps, with a closure, which LBFGS needs, and of the module's own
                parameters.

        Raises:
            UserError: the module has no optimiser, or several, or a scheduler that cannot go on with it.
        """
        configured: Any = module.configure_optimizers()
        optimizers, schedulers, monitor = (
            configured_optimizers(configured) if configured is not None else ([], [], None)
        )
        if len(optimizers) != 1:
            raise UserError(
                f"{type(module).__name__}.configure_optimizers must return one optimizer for federated training, "
                f"got {len(optimizers)}{SEVERAL if len(optimizers) > 1 else ''}."
            )
        configs = configured_schedulers(schedulers, monitor)
        check_schedulers(type(module).__name__, optimizers, configs)
        for kind in (type(config.scheduler) for config in configs if not overrides("lr_scheduler_step", module)):
            if not hasattr(kind, "step"):
                raise MisconfigurationError(
                    f"{kind.__name__} of {type(module).__name__}.configure_optimizers doesn't follow PyTorch's LRScheduler API, "
                    "because it has no step: write it, or override lr_scheduler_step."
                )
        self._by_plain_sgd = by_plain_sgd
        if by_plain_sgd:
            optimizers = [plain_sgd(optimizers[0], configs)]
        self.optimizer: torch.optim.Optimizer = optimizers[0]
        if needs_closure(self.optimizer) and not by_lightning:
            raise UserError(
                f"{type(self.optimizer).__name__} needs the loss several times in a step (a closure), but a federation makes "
                "a step from one gradient: use runner 'lightning', or let configure_optimizers return SGD, Adam or another that "
                "needs none."
            )
        check_rates(self.optimizer)
        _check_parameters(self.optimizer, module)
        self.schedules = Schedules(self.optimizer, configs, module.lr_scheduler_step)
        self._names = {parameter: name for name, parameter in module.named_parameters()}
        self._whole_groups: list[list[nn.Parameter]] = []
        self._bound = [group["params"] for group in self.optimizer.param_groups]
        self._adopt_groups(layout)
        self.groups_at_first = self.group_names
        self._fresh_state = FreshState([self.optimizer])
        # In some releases of torch, Adagrad creates its state in the constructor, not in the first step: such an optimiser keeps
        # the parameters it was given, and every client starts from that state.
        has_state = any(self._fresh_state.states)
        self.is_elementwise = type(self.optimizer) in ELEMENTWISE and not has_state and not by_lightning
        # Schedulers warn if they step before `optimizer.step`, which neither a rule's own step nor the plain step calls.
        self.optimizer._opt_called = True

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimiser, in a list."""
        return [self.optimizer]

    def bind(self, params: Tensor, gradient: Tensor | None) -> None:
        """Step `params` from now on, each parameter once `activate` has named it.

        Args:
            params: vector (d,) whose views are the module's parameters, or a stack (n, d) of clients, for an elementwise
                optimiser.
            gradient: gradient of the same shape, whose views are the parameters' gradients; None: the module's parameters carry
                their gradients themselves, and all are stepped.

        Raises:
            UserError: the optimiser cannot step this gradient.
        """
        require(
            gradient is None or type(self.optimizer) is not torch.optim.SparseAdam,
            "SparseAdam steps sparse gradients only, but this method or runner makes them dense: use Adam, or FedAvg with the "
            "runner 'serial' or 'lightning'.",
        )
        self.params, self._gradient = params, gradient
        self.stepped = self._layout.slices(self.names)
        self._weight_decay: float | Tensor | None = None
        self._group_slices: list[list[slice]] = [[] for _ in self._groups]
        is_plain = self.is_plain_sgd and not self.has_step_hooks
        self.step: Callable[[], Any] = self._plain_step if is_plain else self.optimizer.step
        if gradient is None:
            self._group_slices = [self._slices(group) for group in self._groups]
        for group, members in zip(self.optimizer.param_groups, self._groups, strict=True):
            group["params"] = [] if gradient is not None and self.is_elementwise else list(members)
        self._bound = [group["params"] for group in self.optimizer.param_groups]

    def _adopt_groups(self, layout: Layout) -> None:
        """Read the groups, and tell the parameters of the layout from personal ones."""
        self._layout, self._whole_groups = layout, self._present_groups()
        shared = set(layout.names)
        personal = {p: name for p, name in self._names.items() if p.requires_grad and name not in shared}
        self._groups = [[p for p in members if p not in personal] for members in self._whole_groups]
        self.names = shared.intersection(self._names[p] for members in self._groups for p in members)
        self.personal_names = [[personal[p] for p in members if p in personal] for members in self._whole_groups]

    def _present_groups(self) -> list[list[nn.Parameter]]:
        """Return the module's parameters in each group, in whose place a group may have stretches of the flat vector."""
        present = []
        for position, group in enumerate(self.optimizer.param_groups):
            members = group["params"]
            if position < len(self._whole_groups) and members is self._bound[position]:
                known = set(self._whole_groups[position])
                members = [*self._whole_groups[position], *(p for p in members if p in self._names and p not in known)]
            present.append(list(members))
        return present

    @property
    def has_other_groups(self) -> bool:
        """True if a callback has changed the groups since the optimiser was bound, as `add_param_group` does."""
        now = [id(group["params"]) for group in self.optimizer.param_groups]
        return now != list(map(id, self._bound)) or self._has_other_members()

    def _has_other_members(self) -> bool:
        present, known = self._present_groups(), self._whole_groups
        return [list(map(id, members)) for members in present] != [list(map(id, members)) for members in known]

    @property
    def group_names(self) -> list[list[list[str]]]:
        """Names of the parameters in each group, of the one optimiser."""
        return [[[self._names[p] for p in members] for members in self._whole_groups]]

    def set_groups(self, groups: Sequence[Sequence[Sequence[nn.Parameter]]]) -> None:
        """Put these parameters into the groups of the one optimiser; new groups have its defaults."""
        set_groups(self.optimizer, groups[0])

    def follow_replaced(self, optimizers: Sequence[torch.optim.Optimizer], configs: Sequence[Any]) -> None:
        """Take over the groups of an optimiser that a hook has put in the place of this one.

        Args:
            optimizers: the optimisers that are there now.
            configs: the schedulers that are there now.

        Raises:
            UserError: it is not one optimiser of the same class of torch, or there are schedulers.
        """
        kind = type(self.optimizer)
        if self._by_plain_sgd and len(optimizers) == 1 and not configs:
            optimizers = [plain_sgd(optimizers[0], configs)]
        is_alike = kind.__module__.startswith("torch.optim.") and [type(other) for other in optimizers] == [kind]
        require(is_alike and not configs and not self.schedules.configs, REPLACED)
        groups, others = self.optimizer.param_groups, optimizers[0].param_groups
        for group, other in zip(groups, others, strict=False):
            group.update(other)
        groups[len(others) :] = others[len(groups) :]

    @contextmanager
    def showing_parameters(self) -> Iterator[None]:
        """Let callbacks find the module's parameters in the groups, and add others."""
        groups, bound = list(self.optimizer.param_groups), [group["params"] for group in self.optimizer.param_groups]
        for group, members in zip(groups, self._present_groups(), strict=True):
            group["params"] = members
        yield
        if not self._has_other_members():
            for group, members in zip(groups, bound, strict=True):
                group["params"] = members

    @contextmanager
    def as_bound(self) -> Iterator[None]:
        """Let the groups have what `bind` has put into them, within `showing_parameters`."""
        groups, shown = list(self.optimizer.param_groups), [group["params"] for group in self.optimizer.param_groups]
        for group, members in zip(groups, self._bound, strict=False):  # a hook may have added a group
            group["params"] = members
        yield
        for group, members in zip(groups, shown, strict=True):
            group["params"] = members

    def follow(self, plans: Sequence[Plan], layout: Layout) -> None:
        """Adapt to a module that is pruned or trains more, whose parameters are the same objects, and to groups of callbacks.

        Args:
            plans: the prunings, one after the other.
            layout: new positions of the parameters.
        """
        for parameter in (p for members in self._present_groups() for p in members if p not in self._names):
            raise UserError(
                f"a callback or hook gives the optimizer a parameter of shape {tuple(parameter.shape)} that the module does not "
                "have, so that no client would send it: make it an attribute of the module."
            )
        self._adopt_groups(layout)
        self._fresh_state.follow(plans, self._names)

    def cut_to(self, plan: Plan, layout: Layout) -> None:
        """Adapt to a module that is a smaller network for a while; states with which clients begin are cut as copies.

        Args:
            plan: the cut.
            layout: positions of the parameters that are left.
        """
        self._fresh_state = self._fresh_state.copied()
        self.follow([plan], layout)

    def narrow(self, num_clients: int) -> None:
        """Keep only the first clients of the stack."""
        assert self._gradient is not None
        self.params, self._gradient = self.params[:num_clients], self._gradient[:num_clients]
        for group in self.optimizer.param_groups:
            for stretch in group["params"]:
                shape, gradient, state = stretch.shape, stretch.grad, self.optimizer.state[stretch]
                stretch.grad = None
                stretch.data = stretch.data[:num_clients]
                stretch.grad = gradient[:num_clients]
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.shape == shape:
                        state[name] = value[:num_clients]

    @property
    def is_plain_sgd(self) -> bool:
        """True if the optimiser is SGD without momentum and `maximize`, so that a rule may replace its step."""
        return type(self.optimizer) is torch.optim.SGD and not (
            self.schedules.cycles_momentum
            or any(group["momentum"] or group["maximize"] for group in self.optimizer.param_groups)
        )

    @property
    def has_step_hooks(self) -> bool:
        """True if something has registered functions to call before or after each step."""
        return bool(self.optimizer._optimizer_step_pre_hooks or self.optimizer._optimizer_step_post_hooks)

    @property
    def acts_without_gradient(self) -> bool:
        """True if a step moves parameters whose gradient is 0, so that it matters whether they have one."""
        return not self.is_plain_sgd or self.decays

    @property
    def momentum(self) -> float | None:
        """Momentum ρ of SGD, v ← ρv + g; 0 for other optimisers; None with dampening or nesterov, or if it varies."""
        if type(self.optimizer) is not torch.optim.SGD:
            return 0.0
        if self.schedules.cycles_momentum:
            return None
        groups = self.optimizer.param_groups
        if len({group["momentum"] for group in groups}) > 1:
            return None
        rho = groups[0]["momentum"]
        return None if rho and any(group["dampening"] or group["nesterov"] for group in groups) else float(rho)

    @property
    def description(self) -> str:
        """Name of the optimiser with its momentum, for error messages."""
        momentum = self.optimizer.param_groups[0].get("momentum")
        return type(self.optimizer).__name__ + (f" with momentum {momentum}" if momentum else "")

    def activate(self, names: Sequence[str]) -> None:
        """Step these parameters, too, from now on.

        A parameter must not change before its first gradient, neither by weight decay nor by momentum. An elementwise
        optimiser steps contiguous slices of the flat vector instead of single parameters.
        """
        self._weight_decay = None
        for group, members, slices in zip(self.optimizer.param_groups, self._groups, self._group_slices, strict=True):
            taken = self._slices([p for p in members if self._names.get(p) in names])
            slices += taken
            if self.is_elementwise and self._gradient is not None:
                group["params"] += map(self._stretch, taken)

    @contextmanager
    def leaving_out(self, names: Sequence[str]) -> Iterator[None]:
        """Leave these parameters out of the steps within, as torch leaves out those without a gradient."""
        if self.is_elementwise:
            parts = self._layout.slices(names)
            self._cut({edge for part in parts for edge in (part.start, part.stop)})
            groups = zip(self.optimizer.param_groups, self._group_slices, strict=True)
            stretches = [pair for group, slices in groups for pair in zip(group["params"], slices, strict=True)]
            left_out = [s for s, own in stretches if any(p.start <= own.start and own.stop <= p.stop for p in parts)]
        else:
            left_out = [p for members in self._groups for p in members if self._names.get(p) in names]
        gradients = [parameter.grad for parameter in left_out]
        for parameter in left_out:
            parameter.grad = None
        yield
        for parameter, gradient in zip(left_out, gradients, strict=True):
            parameter.grad = gradient

    def _cut(self, edges: set[int]) -> None:
        """Cut the stretches that are stepped, and their states, at these positions of the flat vector."""
        for group, slices in zip(self.optimizer.param_groups, self._group_slices, strict=True):
            whole = list(zip(group["params"], slices, strict=True))
            group["params"].clear()
            slices.clear()
            for stretch, covered in whole:
                inner = sorted(edge for edge in edges if covered.start < edge < covered.stop)
                if not inner:
                    slices.append(covered)
                    group["params"].append(stretch)
                    continue
                state = self.optimizer.state.pop(stretch, {})
                for start, stop in pairwise([covered.start, *inner, covered.stop]):
                    slices.append(slice(start, stop))
                    group["params"].append(self._stretch(slices[-1]))
                    own = slice(start - covered.start, stop - covered.start)
                    self.optimizer.state[group["params"][-1]] = {
                        name: x[..., own] if isinstance(x, Tensor) and x.shape == stretch.shape else deepcopy(x)
                        for name, x in state.items()
                    }

    def _stretch(self, part: slice) -> nn.Parameter:
        """Return a part of the vector or stack as a parameter with its gradient."""
        assert self._gradient is not None
        stretch = nn.Parameter(self.params[..., part])
        stretch.grad = self._gradient[..., part]
        return stretch

    def _slices(self, parameters: Iterable[nn.Parameter]) -> list[slice]:
        """Return the slices of the flat vector that these parameters cover."""
        return self._layout.slices(self._names[p] for p in parameters if p in self._names)

    @torch.no_grad()
    def _plain_step(self) -> None:
        """Step the parameters by SGD without the overhead of `Optimizer.step`: same numbers, less time."""
        for group in self.optimizer.param_groups:
            used = [p for p in group["params"] if p.grad is not None]
            options = {"weight_decay": group["weight_decay"], "lr": group["lr"], **NO_MOMENTUM}
            sgd(used, [p.grad for p in used], [None] * len(used), foreach=True, **options)

    def start_client(self) -> None:
        """Empty the optimiser's state; its hyper-parameters are those of the round already."""
        self._fresh_state.begin()
        self._weight_decay = None
        self.schedules.adopt()

    def end_client(self) -> None:
        """Restore the hyper-parameters and schedulers with which every client starts, and empty the state."""
        self.schedules.end_client()
        self._fresh_state.end()

    @property
    def learning_rate(self) -> float | Tensor:
        """Current learning rate: a number, or (d,) if parameter groups differ (0 for a parameter in no group)."""
        return self._per_coordinate("lr")

    @property
    def rates(self) -> list[Any]:
        """Current learning rate of each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    @property
    def largest_rate(self) -> float:
        """Largest present learning rate of all parameter groups."""
        return max((float(group["lr"]) for group in self.optimizer.param_groups), default=0.0)

    @property
    def decays(self) -> bool:
        """True if any parameter group has weight decay."""
        return any(group["weight_decay"] for group in self.optimizer.param_groups)

    @property
    def weight_decay(self) -> float | Tensor:
        """Weight decay: a number, or (d,) if parameter groups differ; constant during a local training."""
        if self._weight_decay is None:
            self._weight_decay = self._per_coordinate("weight_decay")
        return self._weight_decay

    def _per_coordinate(self, key: str) -> float | Tensor:
        groups = self.optimizer.param_groups
        covered = sum(part.stop - part.start for slices in self._group_slices for part in slices)
        if len(groups) == 1 and covered == self.params.shape[-1]:
            return float(groups[0][key])
        values = self.params.new_zeros(self.params.shape[-1])
        for group, slices in zip(groups, self._group_slices, strict=True):
            for part in slices:
                values[part] = float(group[key])
        return values


def set_groups(optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[nn.Parameter]]) -> None:
    """Put these parameters into an optimiser's groups, unless they are fewer; new groups have its defaults."""
    present = optimizer.param_groups
    if len(groups) >= len(present):
        present += [dict(optimizer.defaults) for _ in groups[len(present) :]]
        for group, members in zip(present, groups, strict=True):
            group["params"] = list(members)


def _check_parameters(optimizer: torch.optim.Optimizer, module: LightningModule) -> None:
    """Raise `UserError` if the optimiser has a parameter that is not the module's, which no message would carry."""
    known = set(module.parameters())
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        require(
            parameter in known,
            f"{type(module).__name__}.configure_optimizers gives its optimizer a parameter of shape {tuple(parameter.shape)} "
            "that the module does not have, so that no client would send it: make it an attribute of the module.",
        )


def check_rates(optimizer: torch.optim.Optimizer) -> None:
    """Refuse groups without a learning rate, and rates that the parameters' type cannot hold: torch overflows in a step."""
    for group in optimizer.param_groups:
        require(
            "lr" in group,
            f"{type(optimizer).__name__} has no learning rate lr in its parameter groups, which schedulers, methods and logs "
            "read: use an optimizer that has one.",
        )
        floats = [p for p in group["params"] if p.is_floating_point()]  # frozen ones may be packed in integers
        largest = min((torch.finfo(p.dtype).max for p in floats), default=float("inf"))
        for name in ("lr", "weight_decay"):
            value = float(group.get(name) or 0)
            require(
                abs(value) <= largest,
                f"{name} of {type(optimizer).__name__} is {value}, but the parameters hold numbers of at most {largest:.3g}: "
                "use a smaller one.",
            )

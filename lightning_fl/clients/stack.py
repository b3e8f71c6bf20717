"""The models of several clients, one row each, trained by one module in one mapped call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from lightning.fabric.plugins.precision import MixedPrecision
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_unflatten

from lightning_fl.clients.client_job import ClientJob
from lightning_fl.clients.stack_batches import Group
from lightning_fl.errors import require
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.flat_module.module_logs import RowLogs
from lightning_fl.flat_module.step_graph import StackStep
from lightning_fl.slots import State
from lightning_fl.vectors.flat_gradient import FlatGradient
from lightning_fl.vectors.layout import Tree
from lightning_fl.vectors.personal import PERSONAL, PERSONAL_BUFFERS, counter_entry


class Stack:
    """n clients on flat storage with a leading axis.

    `torch.func.vmap` maps the module's `training_step` over the rows: convolutions become grouped, matrix products batched, and
    one kernel computes all clients instead of one small client.

    Attributes:
        params, gradient: parameters and gradients (n, d).
        owned: what the clients own, as entries of their states (n, ...), changed in place; `personal_leaves` are the parameters
            in it by name, with their gradients.
        buffers: shared float buffers (n, d_b), changed in place.
        counters: shared integer buffers by name (n, ...), changed in place.
        compiled_sizes: samples of a minibatch with which a step of all clients is computed by a compiled graph.
    """

    def __init__(
        self,
        flat_module: FlatModule,
        params: Tensor,
        owned: State,
        buffers: Tensor,
        counters: Tree,
        gradient: Tensor,
        parameter_names: Sequence[str] = (),
        compiled_sizes: Collection[int] = (),
    ) -> None:
        """Bind the clients' parameters, gradients and buffers to this storage.

        Args:
            flat_module: holds the module, whose own tensors do not change.
            params: (n, d).
            owned: (n, ...) by entry of the clients' states.
            buffers: (n, d_b).
            counters: (n, ...) by name.
            gradient: (n, d).
            parameter_names: names of the parameters that have had a gradient.
            compiled_sizes: see the attribute.
        """
        self._flat_module = flat_module
        self.params, self.buffers, self.counters, self.gradient = params, buffers, counters, gradient
        self.owned, personal_buffers = owned, flat_module.personal.buffers
        self.compiled_sizes = compiled_sizes
        views, personal_views = flat_module.layout.views(params), {}
        if PERSONAL in owned:
            personal_views = flat_module.personal.layout.views(owned[PERSONAL])
        self._views = views | personal_views
        self.personal_leaves = _leaves(personal_views, flat_module.personal.leaves.values())
        self._leaves = _leaves(views, flat_module.parameters)
        self._tells_missing = flat_module.optimizer.acts_without_gradient
        self._flat_gradient = FlatGradient(
            flat_module.layout, list(self._leaves.values()), gradient, parameter_names, self._tells_missing
        )
        self._arrived: list[tuple[Sequence[int], set[str]]] = []
        self._buffer_views = flat_module.buffer_layout.views(buffers)
        self._counters = counters
        if PERSONAL_BUFFERS in owned:
            self._buffer_views = self._buffer_views | personal_buffers.layout.views(owned[PERSONAL_BUFFERS])
            self._counters = counters | {name: owned[counter_entry(name)] for name in personal_buffers.counter_names}

    @classmethod
    def of(
        cls,
        flat_module: FlatModule,
        job: ClientJob,
        owned: State,
        num_clients: int,
        compiled_sizes: Collection[int] = (),
    ) -> Stack:
        """Return a stack in which every client has the received model and what it owns, entries (n, ...)."""
        params, buffers = (job.received[name].expand(num_clients, -1).clone() for name in ("model", "buffers"))
        stacked = {name: tensor.expand(num_clients, *tensor.shape).clone() for name, tensor in job.counters.items()}
        gradient = torch.zeros_like(params)
        return cls(flat_module, params, owned, buffers, stacked, gradient, compiled_sizes=compiled_sizes)

    def restart(self, job: ClientJob) -> None:
        """Reset every client to the received model."""
        self.params.copy_(job.received["model"])
        self.buffers.copy_(job.received["buffers"])
        for name, counter in self.counters.items():
            counter.copy_(job.counters[name])

    def move_to(self, params: Tensor, other: Stack) -> None:
        """Set the clients' parameters to others (n, d), and their buffers to those of another stack of the same clients."""
        self.params.copy_(params)
        self.buffers.copy_(other.buffers)
        for name, counter in self.counters.items():
            counter.copy_(other.counters[name])
        for name, entry in self.owned.items():
            if name != PERSONAL:
                entry.copy_(other.owned[name])

    def restarted(self, job: ClientJob) -> Stack:
        """Return a stack of the same clients at the received model, which shares their parameters, but not their buffers."""
        owned = {name: x if name == PERSONAL else x.clone() for name, x in self.owned.items()}
        return Stack.of(self._flat_module, job, owned, len(self.params), self.compiled_sizes)

    def keep_owned_buffers(self) -> Callable[[], None]:
        """Return a function that restores the buffers that the clients own now."""
        saved = [(x, x.clone()) for name, x in self.owned.items() if name != PERSONAL]

        def restore() -> None:
            for present, before in saved:
                present.copy_(before)

        return restore

    def first(self, num_clients: int) -> Stack:
        """Return a stack of the first clients only, on the same storage."""
        return Stack(
            self._flat_module,
            self.params[:num_clients],
            {name: entry[:num_clients] for name, entry in self.owned.items()},
            self.buffers[:num_clients],
            {name: tensor[:num_clients] for name, tensor in self.counters.items()},
            self.gradient[:num_clients],
            self._flat_gradient.names,
        )

    def zero_gradient(self) -> None:
        """Reset the gradients."""
        for leaf in self.personal_leaves.values():
            leaf.grad = None
        self._flat_gradient.zero()
        self._arrived.clear()

    def _note_arrived(self, group: Group, gradient: FlatGradient) -> None:
        """Note which parameters of some clients have a gradient in this step."""
        if self._tells_missing:
            self._arrived.append((group.rows, set(gradient.names).difference(gradient.missing)))

    def require_gradients(self) -> None:
        """Raise `UserError` if the optimiser would move a parameter of a client that has no gradient in this step.

        One step serves the whole stack, so it cannot leave out a parameter for single clients.
        """
        if not self._tells_missing:
            return
        names = set(self._flat_gradient.names)
        if all(arrived == names for _, arrived in self._arrived):
            return
        for name in self._flat_gradient.names:
            rows = {row for group, arrived in self._arrived if name in arrived for row in group}
            require(
                len(rows) == len(self.params),
                f"{name} of {type(self._flat_module.module).__name__} has no gradient in some steps, in which its optimizer "
                "leaves it out, but clients that train at once step all parameters: use trainer.runner 'serial'.",
            )

    def backward(self, group: Group, factors: float | Tensor, logs: RowLogs) -> list[str]:
        """Add the gradients of one batch for each of some clients.

        Args:
            group: the clients and their batches.
            factors: factors of the losses, one for all clients or one for each.
            logs: collects the values that the module logs.

        Returns:
            Names of the parameters that got their first gradient.
        """
        if self._flat_module.progress is not None:
            self._flat_module.progress.batch_index = group.batch_index
        if len(group.rows) == len(self.params):
            if (
                group.size in self.compiled_sizes
                and (names := self._backward_by_graph(group, factors, logs)) is not None
            ):
                return names
            losses = self._losses(group, logs)
            self._flat_module.require_gradient(losses)
            with warnings.catch_warnings():
                # Autograd prefers dense gradients; a row of a stack is not dense, which costs nothing here.
                warnings.filterwarnings("ignore", "grad and param do not obey")
                self._flat_module.fabric.backward((losses * factors).sum())
            discovered = self._flat_gradient.discover()
            self._note_arrived(group, self._flat_gradient)
            return discovered
        # Clients with batches of another size train on copies of their rows.
        index = torch.tensor(group.rows).to(self.params.device, non_blocking=True)
        counters = {name: tensor[index] for name, tensor in self.counters.items()}
        params, owned = self.params[index], {name: entry[index] for name, entry in self.owned.items()}
        part = Stack(self._flat_module, params, owned, self.buffers[index], counters, torch.zeros_like(params))
        part.backward(group, factors, logs)
        self._flat_gradient.complete()
        self.gradient.index_add_(0, index, part.gradient)
        for name, leaf in part.personal_leaves.items():
            if leaf.grad is not None:
                whole = self.personal_leaves[name]
                whole.grad = torch.zeros_like(whole) if whole.grad is None else whole.grad
                whole.grad.index_add_(0, index, leaf.grad)
        self.buffers.index_copy_(0, index, part.buffers)
        for name, counter in self.counters.items():
            counter.index_copy_(0, index, part.counters[name])
        for name, entry in self.owned.items():
            if name != PERSONAL:
                entry.index_copy_(0, index, part.owned[name])
        self._note_arrived(group, part._flat_gradient)
        return self._flat_gradient.admit(part._flat_gradient.names)

    def _backward_by_graph(self, group: Group, factors: float | Tensor, logs: RowLogs) -> list[str] | None:
        """Do as `backward` does by a compiled graph; None if it has to run eagerly."""
        flat_module, lent = self._flat_module, self._lent_buffers()
        assert flat_module.compiled is not None
        step = StackStep(self._views, lent, group.batch_index)
        with flat_module.fabric.autocast():
            computed = flat_module.compiled.of_stack(tree_unflatten(group.leaves, group.structure), step)
        if computed is None:
            return None
        self._adopt_buffers(computed.buffers)
        for (name, how, named), value in computed.logs:
            logs.log(name, value, *how, **named)
        self._add_losses(computed.losses, logs)
        gradient, factor = computed.gradient, 1.0
        if isinstance(factors, Tensor):
            shared = gradient.shared * factors.unsqueeze(1)
        else:
            shared, factor = gradient.shared, factors
        for name, of_leaf in gradient.personal.items():
            leaf = self.personal_leaves[name]
            scaled = of_leaf * (
                factors.view(-1, *[1] * (of_leaf.dim() - 1)) if isinstance(factors, Tensor) else factors
            )
            leaf.grad = scaled if leaf.grad is None else leaf.grad.add_(scaled)
        discovered = self._flat_gradient.add(shared, gradient.names, factor)
        self._note_arrived(group, self._flat_gradient)
        return discovered

    def _lent_buffers(self) -> Tree:
        """Return the buffers by name (n, …), those of floats as copies in the module's dtype."""
        # Mapped batch normalisation writes to dense tensors only.
        lent = {
            name: view.to(self._flat_module.buffer(name).dtype).contiguous()
            for name, view in self._buffer_views.items()
        }
        return lent | self._counters

    def _adopt_buffers(self, buffers: Tree) -> None:
        """Take over what a step has written to buffers (n, …)."""
        for name, value in buffers.items():
            home = self._buffer_views[name] if name in self._buffer_views else self._counters[name]
            if value is not home:
                home.copy_(value.detach())

    @torch.compiler.set_stance("force_eager")  # torch maps no compiled function over clients
    def _losses(self, group: Group, logs: RowLogs) -> Tensor:
        """Return the loss of each row (n,), with its autograd graph."""
        flat_module = self._flat_module
        values = list(group.leaves)
        positions = [position for position, value in enumerate(values) if isinstance(value, Tensor)]
        tensors = [values[position] for position in positions]
        lent = self._lent_buffers()
        recorded: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

        def train(params: Tree, buffers: Tree, rows: list[Tensor]) -> tuple[Any, list[Tensor], Tree]:
            for position, row in zip(positions, rows, strict=True):
                values[position] = row
            batch, logged = tree_unflatten(values, group.structure), []

            def record(name: str, value: Any, *how: Any, **named: Any) -> None:
                recorded.append((name, how, named))
                logged.append(torch.as_tensor(value).clone())

            with flat_module.lending(params | buffers, record):
                loss, _ = flat_module.training_step(batch, group.batch_index)
                require(
                    loss is not None,
                    "training_step returns no loss for a batch, which clients that train at once cannot leave out.",
                )
                replaced = {
                    name: tensor for name in buffers if (tensor := flat_module.buffer(name)) is not buffers[name]
                }
            return loss, logged, replaced

        with flat_module.fabric.autocast():
            losses, logged, replaced = vmap(train, randomness="different")(
                self._leaves | self.personal_leaves, lent, tensors
            )
        self._adopt_buffers(lent | replaced)
        for (name, how, named), value in zip(recorded, logged, strict=True):
            logs.log(name, value, *how, **named)
        self._add_losses(losses, logs)
        return losses

    def _add_losses(self, losses: Tensor, logs: RowLogs) -> None:
        """Collect the loss of each row; `UserError` if mixed precision has rounded them.

        Mapped, cross_entropy and others escape autocast, which computes them in float32 for a single client.
        """
        precision = self._flat_module.fabric.strategy.precision
        require(
            not isinstance(precision, MixedPrecision) or losses.dtype != torch.bfloat16,
            "its loss is a bfloat16 number, because torch casts fewer operations to float32 for clients that train at once; "
            "compute it from logits.float(), or use precision 32-true",
        )
        logs.add_loss(losses)


def _leaves(views: Tree, parameters: Iterable[Tensor]) -> Tree:
    """Return views of a stack as leaves, which need a gradient where the module's parameters now do."""
    return {
        name: view.detach().requires_grad_(parameter.requires_grad)
        for (name, view), parameter in zip(views.items(), parameters, strict=True)
    }

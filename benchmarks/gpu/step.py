"""One optimiser step of a stack: its kernels, the time lost between them, and what CUDA graphs and torch.compile gain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from peers import Work
from round_time import LEARNING_RATE
from torch import Tensor
from torch.func import functional_call, grad, vmap

from gpu import Plan, Row, allow_tf32, in_federation, in_turns, kernels, sentence
from lightning_fl.clients.client_job import Batch, ClientJob
from lightning_fl.clients.gradients import gradient_treatment, treat_stack
from lightning_fl.clients.local_training import rule_step
from lightning_fl.clients.stack import Stack
from lightning_fl.clients.stack_batches import groups_of
from lightning_fl.engine.engine import Engine
from lightning_fl.errors import require
from lightning_fl.flat_module.module_logs import LogCollector, RowLogs
from lightning_fl.slots import LocalTraining
from lightning_fl.vectors.layout import Tree


class StackedStep:
    """Optimiser step of all clients of a federation, each always on its first batch, made as `train_stack` makes it."""

    def __init__(self, engine: Engine) -> None:
        """Stack the clients with the server's model."""
        flat_module = self.flat_module = engine.flat_module
        data, run, rule = engine.data, engine.run, engine.algorithm.rule
        received = {"model": run.params, "buffers": run.buffers}
        self.job = ClientJob(rule, engine.context, received, engine.schedule, run)
        firsts = [next(iter(data.client(k).batches(data.batch_size))) for k in range(data.num_clients)]
        contents = [flat_module.transfer(batch, data.train.resident) for batch in firsts]
        batches = [[Batch(content, data.batch_size, 0, 1.0, ends_step=True)] for content in contents]
        (self.group,) = groups_of(batches)  # made before the step, as the gather of a pass is
        self.stack = Stack.of(flat_module, self.job, {}, len(batches))
        flat_module.personal_optimizer.bind(self.stack.personal_leaves)
        flat_module.optimizer.bind(self.stack.params, self.stack.gradient)
        flat_module.optimizer.start_client()
        self.local = LocalTraining(
            self.job.context, received, self.stack.params, self.stack.gradient, flat_module.optimizer.step
        )
        self.local.learning_rate = flat_module.optimizer.learning_rate
        rule.start(self.local)

    def __call__(self) -> None:
        """Make the step."""
        logs = RowLogs(LogCollector())
        logs.rows = self.group.rows
        self.stack.zero_gradient()
        if found := self.stack.backward(self.group, 1.0, logs):
            self.flat_module.optimizer.activate(found)
        treat = partial(treat_stack, self.stack, self.job, self.flat_module.optimizer.stepped)
        rule_step(self.local, self.job, self.flat_module, treat, None, None)

    def update(self, step: Callable[[], None]) -> Tensor:
        """Return the update (n, d) of the received model by one step of this or another kind."""
        self.stack.restart(self.job)
        step()
        return self.stack.params - self.job.received["model"]


class SerialStep:
    """Optimiser step of one client, always on its first batch, made as `train_locally` makes it."""

    def __init__(self, engine: Engine) -> None:
        """Load the server's model."""
        flat_module = self.flat_module = engine.flat_module
        data, run, rule = engine.data, engine.run, engine.algorithm.rule
        received = {"model": run.params, "buffers": run.buffers}
        self.job = ClientJob(rule, engine.context, received, engine.schedule, run)
        first = next(iter(data.client(0).batches(data.batch_size)))
        self.batch = flat_module.transfer(first, data.train.resident)
        flat_module.load_server_model(run)
        flat_module.bind_optimizer()
        flat_module.optimizer.start_client()
        self.local = LocalTraining(
            self.job.context, received, flat_module.params, flat_module.gradient.vector, flat_module.optimizer.step
        )
        self.local.learning_rate = flat_module.optimizer.learning_rate
        rule.start(self.local)
        self.treat = gradient_treatment(flat_module, self.job)

    def __call__(self) -> None:
        """Make the step."""
        flat_module = self.flat_module
        loss, _ = flat_module.training_step(self.batch, 0)
        flat_module.gradient.zero()
        flat_module.fabric.backward(loss)
        if flat_module.after_backward():
            self.local.learning_rate = flat_module.optimizer.learning_rate
        rule_step(self.local, self.job, flat_module, self.treat, None, None)

    def update(self, step: Callable[[], None]) -> Tensor:
        """Return the update (d,) of the received model by one step of this or another kind."""
        self.flat_module.params.copy_(self.job.received["model"])
        step()
        return self.flat_module.params - self.job.received["model"]


def in_cuda_graph(ours: StackedStep | SerialStep, device: str) -> Callable[[], None]:
    """Return the replay of a CUDA graph of the step."""
    require(device == "cuda", "a CUDA graph needs a GPU")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # the first backward passes on a stream allocate what a graph must not
        for _ in range(3):
            ours()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        ours()
    return graph.replay


def functional(ours: StackedStep, device: str, mode: str | None = None) -> Callable[[], None]:
    """Return the same step of plain SGD written with `torch.func` only, compiled in this mode of torch.compile unless None."""
    require(not ours.job.received["buffers"].numel(), "the functional step does not change buffers")
    require(mode != "reduce-overhead" or device == "cuda", "a CUDA graph needs a GPU")
    module, layout = ours.flat_module.module, ours.job.context.layout
    images, labels = ours.group.leaves

    def loss(params: Tree, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(module, params, (images,)), labels)

    def updated(params: Tree, images: Tensor, labels: Tensor) -> Tree:
        gradients = vmap(grad(loss))(params, images, labels)
        return {name: params[name] - LEARNING_RATE * gradients[name] for name in params}

    if mode is not None:
        torch.compiler.reset()
        how = {"mode": mode} if device == "cuda" else {"backend": "aot_eager"}  # a CPU may lack a compiler
        updated = torch.compile(updated, fullgraph=True, dynamic=False, **how)
    leaves = layout.views(ours.stack.params)

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        torch._foreach_copy_(list(leaves.values()), list(updated(leaves, images, labels).values()))

    return step


WAYS: dict[str, Callable[[StackedStep, str], Callable[[], None]]] = {
    "CUDA graph of our step": in_cuda_graph,
    "functional step": functional,
    "functional step, compiled": partial(functional, mode="default"),
    "functional step, compiled with CUDA graphs": partial(functional, mode="reduce-overhead"),
}


def step(plan: Plan) -> None:
    """Measure the stacked step of some networks and numbers of clients."""
    allow_tf32(False)
    for name, clients in plan.sizes.steps:
        label = Row("step", f"{name} × {clients}", "all ways")
        plan.attempt(label, partial(_steps, label, name, clients, plan))


def _steps(label: Row, name: str, clients: int, plan: Plan) -> None:
    def measure(engine: Engine, work: Work) -> None:
        ours = StackedStep(engine)
        _profile(replace(label, way="our step"), ours, plan)
        for way, make in WAYS.items():
            row = replace(label, way=way)
            plan.attempt(row, partial(_compare, row, make, ours, plan))

    def measure_serial(engine: Engine, work: Work) -> None:
        ours = SerialStep(engine)
        alone = replace(label, case=f"{name} × 1")
        _profile(replace(alone, way="our serial step"), ours, plan)
        row = replace(alone, way="CUDA graph of our serial step")
        plan.attempt(row, partial(_compare, row, in_cuda_graph, ours, plan))

    in_federation(name, clients, plan, measure)
    in_federation(name, 1, plan, measure_serial, runner="serial")


def _profile(label: Row, ours: StackedStep | SerialStep, plan: Plan) -> None:
    """Add our step's time, its kernels, and the time lost between them."""
    ms = _ms({"": ours}, plan)[""]
    count, seconds = kernels(ours)
    in_kernels, on_gpu = 1e3 * sum(seconds.values()), plan.device == "cuda"
    text = f"{count} {'kernels' if on_gpu else 'operators'}, {in_kernels:.3g} ms in them"
    lost = f", {ms[1] - in_kernels:.3g} ms lost between them" if on_gpu else ""
    longest = {kernel: round(1e3 * value, 4) for kernel, value in list(seconds.items())[:10]}
    numbers = {"kernels": count, "kernel_ms": in_kernels, "longest_ms": longest}
    busy = in_kernels / ms[1] if on_gpu else None
    plan.add(replace(label, ms=ms, busy=busy, result=text + lost, numbers=numbers))


def _compare(label: Row, make: Callable[..., Callable[[], None]], ours: StackedStep | SerialStep, plan: Plan) -> None:
    """Add the time of another kind of step, in turns with ours; if it does not work, that is the finding."""
    try:
        other = make(ours, plan.device)
        expected, found = ours.update(ours), ours.update(other)
        ms = _ms({"ours": ours, "other": other}, plan)
    except Exception as error:
        plan.add(replace(label, skipped=sentence(error)))
        return
    ratio, deviation = ms["other"][1] / ms["ours"][1], float((found - expected).norm() / expected.norm())
    text = f"{ratio:.2f} × the time of our step; distance of the updates {deviation:.1e}"
    plan.add(replace(label, ms=ms["other"], result=text, numbers={"ratio": ratio, "deviation": deviation}))


def _ms(steps: dict[str, Callable[[], None]], plan: Plan) -> dict[str, tuple[float, ...]]:
    """Return least, median and largest milliseconds of one step of each kind."""
    count = plan.sizes.steps_in_turn

    def repeat(step: Callable[[], None]) -> None:
        for _ in range(count):
            step()

    timed = in_turns({name: partial(repeat, step) for name, step in steps.items()}, plan.sizes.turns, seconds=3)
    return {name: tuple(value / count for value in entry.ms) for name, entry in timed.items()}

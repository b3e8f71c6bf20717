"""Choose the runner that trains the clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from traceback import extract_tb
from typing import Any, Literal

import torch
from lightning.fabric.plugins.precision import MixedPrecision
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric

from lightning_fl.clients.client_job import ClientJob
from lightning_fl.clients.serial import serial
from lightning_fl.clients.stack_batches import Member
from lightning_fl.clients.stacked import (
    Stacked,
    even_size,
    first_sentence,
    has_equal_clients,
    shared_attributes,
    train_stack,
)
from lightning_fl.data import FederatedDataModule, Selection
from lightning_fl.errors import UserError
from lightning_fl.flat_module.convolution_chains import is_compiled
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.flat_module.hooks import StepListeners
from lightning_fl.flat_module.module_buffers import unsaved_buffers
from lightning_fl.flat_module.plain_attributes import RestorableAttributes
from lightning_fl.slots import Gradients, Result, model_keeper
from lightning_fl.state.run_state import CLIENT
from lightning_fl.vectors.layout import holders_of

Runner = Callable[[FlatModule, ClientJob, Sequence[int], FederatedDataModule], Iterator[Result]]

# All limits are fixed, because free memory, which depends on other programs, would change the last bits of the results.
# On a CPU a stack spares the overhead of small operations, but its grouped convolutions are slower (docs/explanation/speed.md).
MOST_WORK_ON_CPU, LEAST_CLIENTS_ON_CPU, MOST_AT_ONCE_ON_CPU, BYTES_ON_CPU = 1_500_000, 10, 64, 4 * 2**30
MOST_COMPILED_WORK_ON_CPU, MOST_COMPILED_AT_ONCE_ON_CPU = 10_000_000, 10
# On a GPU a step of more work computes for longer than its kernels take to start. An H100 gains from stacks up to 5.6e9, but an
# older GPU computes at a quarter of its pace, and grouped convolutions take up to 1.3 times the time of single ones.
MOST_WORK_ON_GPU, LEAST_CLIENTS_ON_GPU, MOST_AT_ONCE_ON_GPU, BYTES_ON_GPU = 2_000_000_000, 2, 256, 8 * 2**30
UNCAST = "torch casts no mapped convolution to bfloat16; use precision 32-true or bf16-true"
COPIES_OF_THE_MODEL = 8  # parameters, gradient, upload, states of optimiser and rule, and temporary tensors


def choose_runner(
    wanted: Literal["auto", "serial", "stacked"],
    clients_at_once: int | None,
    flat_module: FlatModule,
    job: ClientJob,
    data: FederatedDataModule,
    work: int | None = None,
    num_clients: int = 0,
) -> Runner:
    """Return the requested runner; `auto` stacks clients whose steps are small, if the module allows it and draws no numbers.

    Args:
        wanted: value of the trainer's flag `runner`.
        clients_at_once: most clients in a stack; None: as many as should fit into `BYTES_ON_CPU` or `BYTES_ON_GPU`, up
            to `MOST_AT_ONCE_ON_CPU` or `MOST_AT_ONCE_ON_GPU`.
        flat_module: holds the module, with its optimiser.
        job: a client's job in the first round.
        data: the clients' samples.
        work: multiply-accumulates of the forward pass of a step's samples; None if they are unknown.
        num_clients: clients that this process trains in a round.

    Raises:
        UserError: `stacked` was requested but is impossible; the sentence lists all obstacles.
    """
    on_cpu = flat_module.fabric.device.type == "cpu"
    most_work, least_clients = (
        (MOST_WORK_ON_CPU, LEAST_CLIENTS_ON_CPU) if on_cpu else (MOST_WORK_ON_GPU, LEAST_CLIENTS_ON_GPU)
    )
    if on_cpu and flat_module.compiled is not None and has_equal_clients(data):  # otherwise few steps are compiled
        most_work = MOST_COMPILED_WORK_ON_CPU
    most_at_once, most_bytes = (MOST_AT_ONCE_ON_CPU, BYTES_ON_CPU) if on_cpu else (MOST_AT_ONCE_ON_GPU, BYTES_ON_GPU)
    pays = work is not None and work <= most_work and num_clients >= least_clients
    method, module = type(job.rule).__name__, type(flat_module.module).__name__
    compares, impossible = Gradients.REPRESENTATIONS in job.rule.reads, _impossible(job, flat_module)
    if impossible and wanted == "stacked":
        raise UserError(f"runner 'stacked' {impossible[0][0]}: use runner 'auto' or 'serial'.")
    if wanted == "auto" and not pays and not on_cpu and num_clients >= least_clients:
        size = "of unknown size" if work is None else f"of {work / 1e6:,.0f} million multiply-accumulates"
        rank_zero_info(
            f"Clients train one after the other, because with steps {size} only some GPUs gain from stacks; "
            "trainer.runner stacked trains several at once."
        )
    if compares and _is_compiled(flat_module.module):
        rank_zero_info(
            f"Clients train without torch.compile, which would hide the layer whose inputs {method} compares."
        )
    if wanted == "serial" or flat_module.is_manual or (wanted == "auto" and not pays):
        return serial
    if impossible:
        rank_zero_info(f"Clients train one after the other, because {impossible[0][1]}.")
        return serial
    obstacles, client_bytes, draws = _try(flat_module, job, data)
    if obstacles:
        listed = "; ".join(obstacles)
        if wanted == "stacked":
            raise UserError(
                f"runner 'stacked' cannot train {module}: {listed}. Fix this, or use runner 'auto' or 'serial'."
            )
        if not on_cpu:
            rank_zero_info(f"Clients train one after the other, because {module} cannot be stacked: {listed}.")
        return serial
    if wanted == "auto" and draws:  # the draws would depend on which clients make up a stack
        if not on_cpu:
            rank_zero_info(
                f"Clients train one after the other, because {module} draws random numbers, which would depend on the stack; "
                "trainer.runner stacked trains several at once anyway."
            )
        return serial
    compiles = flat_module.compiled is not None
    if clients_at_once is None:
        most_at_once = MOST_COMPILED_AT_ONCE_ON_CPU if compiles and on_cpu else most_at_once
        clients_at_once = max(1, min(most_at_once, most_bytes // client_bytes))
    if compiles:  # all stacks of a whole cohort then have this size, for which alone steps are compiled
        clients_at_once = even_size(num_clients, clients_at_once)
    if wanted == "auto":
        rank_zero_info(
            f"Up to {min(clients_at_once, num_clients)} clients train at once, which is faster for such small steps; "
            "trainer.runner serial trains one after the other."
        )
    if _is_compiled(flat_module.module):
        rank_zero_info(
            f"Clients that train at once compute without torch.compile, which has compiled {module}; trainer.runner serial "
            "uses it."
        )
    return Stacked(clients_at_once)


def _impossible(job: ClientJob, flat_module: FlatModule) -> list[tuple[str, str]]:
    """Return what stacks cannot do of what a job asks for, as a refusal, and as a reason to train one after the other."""
    method, module = type(job.rule).__name__, type(flat_module.module).__name__
    losses = f"{method} reads losses of whole models"
    table = [
        (
            model_keeper(job.personal) is not None,
            "cannot keep a model for each client, as this method does",
            "each keeps a model of its own",
        ),
        (job.rule.num_losses, f"measures no losses before the training, but {losses}", losses),
        (
            Gradients.REPRESENTATIONS in job.rule.reads,
            f"cannot read representations by other models, as {method} does",
            "each compares its representations with other models'",
        ),
        (
            flat_module.is_manual,
            f"cannot train {module}, which makes its steps itself (automatic_optimization is False)",
            "",
        ),
    ]
    return [(refusal, reason) for is_asked, refusal, reason in table if is_asked]


def _is_compiled(module: LightningModule) -> bool:
    """True if `torch.compile` has compiled a part of a module, or its training step."""
    return hasattr(module.training_step, "_torchdynamo_orig_callable") or any(map(is_compiled, module.modules()))


def describe_runner(runner: Runner) -> dict[str, Any]:
    """Return the runner's name and its most clients in a stack, for a checkpoint."""
    if isinstance(runner, Stacked):
        stacks = {"wanted": "stacked", "clients_at_once": runner.clients_at_once}
        return describe_runner(serial) if runner.has_ended else stacks
    return {"wanted": getattr(runner, "__name__", "serial"), "clients_at_once": None}


def agreed_runner(described: Sequence[dict[str, Any]], may_end: bool = False) -> Runner:
    """Return the runner for all processes, given `describe_runner` of each: serial if any is, else the smallest stack.

    Stacks that `may_end` do so once the module turns out not to allow them.
    """
    if any(one["wanted"] == "serial" for one in described):
        return serial
    return Stacked(min(one["clients_at_once"] for one in described), may_end)


def _try(flat_module: FlatModule, job: ClientJob, data: FederatedDataModule) -> tuple[list[str], int, bool]:
    """Try one step of a stack of two.

    Returns:
        The obstacles to stacking, the bytes that each client needs, and whether the module draws random numbers.
    """
    obstacles = _known_obstacles(flat_module)
    client = data.largest_client
    work = job.schedule.work(data.client(client), job.run.torch_seeds(CLIENT, client), data.train.resident)
    if not work.batches_per_epoch:
        return obstacles, 1, False
    state, work = job.run.first_state(job.rule, job.received["model"]), replace(work, num_steps=1)
    twins = [Member(client, work, state) for _ in range(2)]
    metrics = [m for m in flat_module.module.modules() if isinstance(m, Metric)]
    updates, attributes = [metric.update_count for metric in metrics], RestorableAttributes(flat_module.module)
    unsaved = _unsaved(flat_module)
    saved_bytes = 0

    def count(saved: Tensor) -> Tensor:
        nonlocal saved_bytes
        saved_bytes += saved.nbytes
        return saved

    try:
        with torch.autograd.graph.saved_tensors_hooks(count, lambda saved: saved):
            one_step = replace(job, schedule=replace(job.schedule, epochs=None, steps=1))
            results = train_stack(
                flat_module, one_step, twins, notifies_callbacks=False, differs=not has_equal_clients(data)
            )
        if any(x.dim() != 1 for x in results[0].message.values()):
            obstacles.append(f"{type(job.rule).__name__} does not keep clients apart along the leading axis")
    except torch.OutOfMemoryError:
        obstacles.append("two clients at once need more memory than the accelerator has")
        flat_module.optimizer.end_client()
    except Exception as error:  # a user's module may raise anything
        is_the_optimizers = any(
            {"optim", "optimizers"} & {*Path(frame.filename).parts} for frame in extract_tb(error.__traceback__)
        )
        if isinstance(error, UserError):
            obstacles.append(str(error).rstrip("."))
        elif flat_module.optimizer.is_elementwise or not is_the_optimizers:  # otherwise it is already in the list
            remedy = "keep numbers as tensors, and use torch.where instead of if"
            if "BFloat16" in str(error) and flat_module.fabric.strategy.precision.precision == "bf16-mixed":
                remedy = UNCAST
            elif f"{type(flat_module.module).__name__!r} object has no attribute" in str(error):
                remedy = "stacks are tried before on_train_start; make the attribute in __init__ or setup, too"
            elif "LSE is not correctly aligned" in str(error):  # on a GPU, by sequences of 12
                remedy = (
                    "torch does not map its fused attention here; compute it under `torch.nn.attention.sdpa_kernel("
                    "SDPBackend.MATH)`, which it maps"
                )
            obstacles.append(f"a step of two clients at once failed ({first_sentence(error)}): {remedy}")
        flat_module.optimizer.end_client()
    finally:
        flat_module.progress = None
    if changed := attributes.restore():
        obstacles.append(shared_attributes(changed))
    if changed := _restore_unsaved(unsaved):
        names = " and ".join(map(repr, changed))
        obstacles.append(
            f"training_step changes {names}, registered with persistent=False, which clients of a stack would share"
        )
    if any(parameter.grad is not None for parameter in flat_module.module.parameters()):
        obstacles.append("it does not read its parameters from its attributes")
        flat_module.module.zero_grad()
    if updates != [metric.update_count for metric in metrics]:
        obstacles.append(
            "training_step updates a torchmetrics object, which cannot distinguish clients (use self.log(name, value) instead)"
        )
        for metric in metrics:
            metric.reset()
    client_bytes = saved_bytes // 2 + COPIES_OF_THE_MODEL * flat_module.params.nbytes
    if data.train.resident:
        client_bytes += _bytes_of_samples(work.selection, job.schedule.batch_size)
    return obstacles, client_bytes, flat_module.generators.have_drawn(work.seeds[1])


def _bytes_of_samples(selection: Selection, batch_size: int) -> int:
    """Return the bytes of a client's samples while it trains: those of a pass, and those that were converted before."""
    leaves = (leaf for batch in selection.batches(batch_size) for leaf in tree_leaves(batch))
    return 2 * sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))


def _known_obstacles(flat_module: FlatModule) -> list[str]:
    """Return the obstacles that show without a trial: the optimiser, and hooks within a client's step."""
    obstacles = [
        f"{' and '.join(listeners)} needs each client's {hook} (use on_client_upload instead)"
        for hook in StepListeners._fields
        if (listeners := flat_module.hooks.overridden_by(hook))
    ]
    if not flat_module.optimizer.is_elementwise:
        optimizer = flat_module.optimizer.description
        obstacles.insert(
            0, f"its optimiser {optimizer} does not update each number separately (SGD, Adam and RMSprop do)"
        )
    if flat_module.optimizer.has_step_hooks:
        obstacles.append("hooks of its optimiser need each client's step")
    parameters = [*flat_module.parameters, *flat_module.personal.leaves.values()]
    if any(parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in parameters):
        obstacles.append("hooks of its parameters need each client's gradient")
    # torch.vmap stops the gradient of the padding in the first client of a stack only.
    embeddings = (part for part in flat_module.module.modules() if isinstance(part, (nn.Embedding, nn.EmbeddingBag)))
    if any(part.padding_idx is not None and part.weight.requires_grad for part in embeddings):
        obstacles.append("torch trains the row of an embedding's padding_idx in stacks")
    convolves = any(isinstance(part, _ConvNd) for part in flat_module.module.modules())
    if convolves and isinstance(flat_module.fabric.strategy.precision, MixedPrecision):
        obstacles.append(UNCAST)
    return obstacles


def _unsaved(flat_module: FlatModule) -> list[tuple[dict[str, Any], str, Tensor, Tensor]]:
    """Return home, name, tensor and a copy of each buffer that is not saved, which a stack does not hold for each client."""
    names = unsaved_buffers(flat_module.module)
    homes = [holder for name, holders in holders_of(flat_module.module).items() if name in names for holder in holders]
    return [(home, leaf, home[leaf], home[leaf].clone()) for home, leaf in homes]


def _restore_unsaved(unsaved: list[tuple[dict[str, Any], str, Tensor, Tensor]]) -> list[str]:
    """Restore these buffers, and return the names of those that have changed."""
    changed = [
        (home, leaf, buffer, before)
        for home, leaf, buffer, before in unsaved
        if home[leaf] is not buffer or not torch.allclose(buffer, before, rtol=0, atol=0, equal_nan=True)
    ]
    for home, leaf, buffer, before in changed:
        home[leaf] = buffer.copy_(before)
    return sorted({leaf for _, leaf, _, _ in changed})

"""Evaluate each client's model on its own held-out samples, before and after fine-tuning on its training samples.

A client predicts with the server's model and its own personal parameters. The evaluation restores the model, logs,
random generators, attributes of the module and learning rates, and calls no callback.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_fl.checks.evaluation_mode import keeping_attributes
from lightning_fl.clients.client_job import ClientJob
from lightning_fl.clients.local_schedule import LocalSchedule
from lightning_fl.clients.local_training import train_locally
from lightning_fl.clients.own_models import client_model, has_own_model
from lightning_fl.data import ClientIndices, FederatedDataModule
from lightning_fl.data.samples.loaders import SampleLoader
from lightning_fl.errors import require
from lightning_fl.evaluation.evaluation import as_loaders, num_batches
from lightning_fl.evaluation.loops import measure
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.flat_module.module_logs import LogCollector
from lightning_fl.processes import gather_by_client, share_of
from lightning_fl.rules import LocalOptimizer
from lightning_fl.slots import Message, Personal, RoundContext, model_keeper
from lightning_fl.state.run_state import EVALUATION, Run


@dataclass(frozen=True)
class ClientResult:
    """Evaluation of one client.

    Attributes:
        client: index of the client.
        num_samples: held-out samples n_k that were measured; 0 if the client has none.
        is_newcomer: True if clients own parts of the model, and this one has not taken part yet.
        metrics: logged averages by name; {} without samples.
        tuned: the same after fine-tuning; {} without fine-tuning.
    """

    client: int
    num_samples: int
    is_newcomer: bool
    metrics: dict[str, float] = field(default_factory=dict)
    tuned: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ClientEvaluator:
    """Evaluation of the model that the flat module holds, with the clients' initial personal parameters.

    Attributes:
        flat_module: holds the model.
        data: the federated data, as the clients hold them.
        run: seed, number of rounds done, and the clients' states.
        context: facts about the run.
        schedule: length and batches of a client's local training; fine-tuning uses everything but the length.
        personal: parts that say what clients keep.
        shared: entries that the server's steps send down with the model; {} outside a run.
    """

    flat_module: FlatModule
    data: FederatedDataModule
    run: Run
    context: RoundContext
    schedule: LocalSchedule
    personal: tuple[Personal, ...]
    shared: Message = field(default_factory=dict)

    @property
    def round(self) -> int:
        """Index of the last round; 0 before the first."""
        return max(0, self.run.round - 1)

    def panel(self, size: int | None, is_fixed: bool) -> list[int]:
        """Return the clients to evaluate, in ascending order: all, or `size` drawn by the seed, and by the round unless fixed."""
        everyone = self.data.num_clients
        if size is None or size >= everyone:
            return list(range(everyone))
        random = self.run.random(EVALUATION, in_round=0 if is_fixed else self.round)
        return sorted(int(client) for client in random.choice(everyone, size, replace=False))

    def evaluate(
        self,
        stage: str,
        clients: Sequence[int],
        limit: int | float | None = None,
        finetune_epochs: int = 0,
        finetune_lr: float | None = None,
    ) -> list[ClientResult]:
        """Evaluate clients, which the processes share.

        Args:
            stage: `validation` or `test`: the step to run, and the held-out samples of each client.
            clients: indices of the clients.
            limit: most batches of a client, if it is a whole number; a fraction is ignored.
            finetune_epochs: passes of each client over its training samples before a second measurement; 0 for none.
            finetune_lr: learning rate of these passes; None for that of the next round.

        Returns:
            A result of each client, the same in every process.

        Raises:
            UserError: fine-tuning would follow a scheduler that is made for the length of a round's local training.
        """
        data, flat_module = self.data, self.flat_module
        rows = data.client_val_indices if stage == "validation" else data.client_test_indices
        fabric, sizes = flat_module.fabric, ClientIndices.of(rows).sizes
        require(
            not finetune_epochs or finetune_lr is not None or not flat_module.optimizer.schedules.moves_within_round,
            f"fine-tuning cannot follow the scheduler that {type(flat_module.module).__name__} steps within a round, because it "
            "is made for the length of a round: give finetune_lr.",
        )
        require(
            not finetune_epochs or finetune_lr is None or not flat_module.optimizer.schedules.moved_by_module,
            f"finetune_lr is {finetune_lr}, but {type(flat_module.module).__name__} steps its schedulers itself, which would set "
            "other learning rates: leave finetune_lr out.",
        )
        schedule = replace(self.schedule, epochs=finetune_epochs, steps=None, most_steps=None, reports_last_loss=False)
        mine = {}
        with leaving_no_trace(flat_module):
            job = self._job(schedule)
            for client in share_of(clients, sizes, fabric.global_rank, fabric.world_size):
                measured = rows[client][: limit * data.eval_batch_size if isinstance(limit, int) else None]
                mine[client] = self._evaluate_client(job, stage, client, measured, finetune_lr)
        return list(gather_by_client(fabric, clients, mine).values())

    def _job(self, schedule: LocalSchedule) -> ClientJob:
        """Return the fine-tuning of each client, which begins with the present model."""
        flat_module = self.flat_module
        received = {"model": flat_module.params.clone(), "buffers": flat_module.read_buffers().clone()}
        return ClientJob(LocalOptimizer(), self.context, received, schedule, self.run, flat_module.read_counters())

    def _evaluate_client(
        self, job: ClientJob, stage: str, client: int, rows: np.ndarray, finetune_lr: float | None
    ) -> ClientResult:
        flat_module, data, state = self.flat_module, self.data, self.run.clients.get(client, {})
        owned = flat_module.personal.read().keys()
        has_own = has_own_model(state) if model_keeper(self.personal) else not owned or bool(owned & state.keys())
        if not len(rows):
            return ClientResult(client, 0, not has_own)
        samples = data.evaluated if stage == "validation" else data.test
        assert samples is not None
        order, seeds = self.run.torch_seeds(EVALUATION, client, in_round=self.round)

        def measured() -> dict[str, float]:
            flat_module.generators.seed(seeds)
            loaders = as_loaders(SampleLoader(samples, rows, data.eval_batch_size))
            return measure(flat_module, stage, loaders, num_batches(loaders, None), alone=True, marks_undefined=True)

        flat_module.load(job.received["model"], job.received["buffers"], job.counters)
        with client_model(flat_module, self.personal, state, data, client, self.shared):
            metrics, tuned = measured(), {}
            if job.schedule.epochs:
                start = {"model": flat_module.params.clone(), "buffers": flat_module.read_buffers().clone()}
                job = replace(job, start=start, initial_counters=flat_module.read_counters())
                with flat_module.optimizer.schedules.constant(finetune_lr):
                    work = job.schedule.work(data.client(client), (order, seeds), data.train.resident)
                    train_locally(flat_module, job, work, {})
                flat_module.progress = None
                flat_module.logs.forget()
                tuned = measured()
        return ClientResult(client, len(rows), not has_own, metrics, tuned)


@contextmanager
def leaving_no_trace(flat_module: FlatModule) -> Iterator[None]:
    """Restore model, logs, random generators and attributes of the module afterwards, and call no callback inside."""
    module, logs = flat_module.module, flat_module.logs
    present = flat_module.params.clone(), flat_module.read_buffers().clone(), flat_module.read_counters()
    with isolate_rng(), keeping_attributes(list(module.modules())), flat_module.hooks.without_callbacks():
        flat_module.logs = LogCollector(lambda: flat_module.progress is not None, module)
        flat_module.logs.gather, flat_module.logs.gather_tensors = logs.gather, logs.gather_tensors
        module.log = flat_module.logs.log  # type: ignore[method-assign]
        try:
            yield
        finally:
            flat_module.logs, flat_module.progress = logs, None
            flat_module.load(*present)

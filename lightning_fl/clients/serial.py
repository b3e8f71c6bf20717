"""One client after the other on the worker's module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_fl.clients.flat_module import Worker
from lightning_fl.clients.local_training import LocalPlan, train_locally
from lightning_fl.data import FederatedDataModule
from lightning_fl.slots import Message, Result, Rule, Setting
from lightning_fl.state.run_state import CLIENT, Run
from lightning_fl.vectors.personal import PERSONAL


def serial(
    worker: Worker,
    rule: Rule,
    setting: Setting,
    received: Message,
    cohort: Sequence[int],
    data: FederatedDataModule,
    plan: LocalPlan,
    run: Run,
) -> Iterator[Result]:
    """Train each client of the cohort and yield its result; one result is alive at a time.

    `on_client_download` is called before each; a method with two turns calls a runner, and so the hook, in each of them.

    Args:
        worker: the module on its flat storage.
        rule: what a client does with its gradients.
        setting: of the run.
        received: what came down to every client.
        cohort: indices of the clients.
        data: gives each client's samples.
        plan: how long a client trains.
        run: gives client states and random seeds; not changed.
    """
    for client in cohort:
        worker.hooks.call("on_client_download", client)
        state = run.client_state(client, rule, received["model"])
        worker.personal.copy_(state.pop(PERSONAL, run.personal))
        order, own = run.torch_seeds(CLIENT, client)
        selection = data.client(client)
        in_pass = plan.pass_batches(len(selection), worker.skips_single_samples)
        local = train_locally(
            worker,
            rule,
            setting,
            received,
            run.counters,
            state,
            selection,
            plan,
            (order, own),
            data.train.resident,
            plan.steps_done(in_pass, run, client),
        )
        message = rule.finish(local)
        if worker.buffer_layout.names:
            message["buffers"] = worker.read_buffers() - received["buffers"]
        owned = {PERSONAL: worker.personal.clone()} if worker.personal_layout.names else {}
        last_loss = worker.logs.last_loss(worker.batches_in_pass) if plan.tells_last_loss else None
        yield Result(
            client=client,
            message=message,
            weight=float(data.client_sizes[client]),
            state=local.state | owned,
            counters=worker.read_counters(),
            logs=worker.logs.take(),
            num_steps=local.num_steps,
            owned=owned,
            last_loss=last_loss,
        )
    worker.steps_in_training = 0

"""One client after the other on the flat module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_fl.clients.flat_module import FlatModule
from lightning_fl.clients.local_training import LocalSchedule, train_locally
from lightning_fl.data import FederatedDataModule
from lightning_fl.slots import Message, Result, Rule, Setting
from lightning_fl.state.run_state import CLIENT, Run
from lightning_fl.vectors.personal import PERSONAL


def serial(
    flat_module: FlatModule,
    rule: Rule,
    setting: Setting,
    received: Message,
    cohort: Sequence[int],
    data: FederatedDataModule,
    schedule: LocalSchedule,
    run: Run,
) -> Iterator[Result]:
    """Train each client of the cohort and yield its result; one result is alive at a time.

    `on_client_download` is called before each; a method with two turns calls a runner, and so the hook, in each of them.

    Args:
        flat_module: the module on its flat storage.
        rule: what a client does with its gradients.
        setting: of the run.
        received: what came down to every client.
        cohort: indices of the clients.
        data: gives each client's samples.
        schedule: how long a client trains.
        run: gives client states and random seeds; not changed.
    """
    for client in cohort:
        flat_module.hooks.call("on_client_download", client)
        state = run.client_state(client, rule, received["model"])
        flat_module.personal.copy_(state.pop(PERSONAL, run.personal))
        order, own = run.torch_seeds(CLIENT, client)
        selection = data.client(client)
        in_pass = schedule.pass_batches(len(selection), flat_module.skips_single_samples)
        local = train_locally(
            flat_module,
            rule,
            setting,
            received,
            run.counters,
            state,
            selection,
            schedule,
            (order, own),
            data.train.resident,
            schedule.steps_done(in_pass, run, client),
        )
        message = rule.finish(local)
        if flat_module.buffer_layout.names:
            message["buffers"] = flat_module.read_buffers() - received["buffers"]
        owned = {PERSONAL: flat_module.personal.clone()} if flat_module.personal_layout.names else {}
        last_loss = flat_module.logs.last_loss(flat_module.batches_in_pass) if schedule.reports_last_loss else None
        yield Result(
            client=client,
            message=message,
            weight=float(data.client_sizes[client]),
            state=local.state | owned,
            counters=flat_module.read_counters(),
            logs=flat_module.logs.take(),
            num_steps=local.num_steps,
            owned=owned,
            last_loss=last_loss,
        )
    flat_module.steps_in_training = 0

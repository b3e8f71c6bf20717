"""Serial runner: trains one client after the other on the flat module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from lightning_fl.clients.client_job import ClientJob
from lightning_fl.clients.device_group import DeviceGroup
from lightning_fl.clients.local_training import finish, train_locally
from lightning_fl.clients.own_models import OwnModelTraining, take_own_model
from lightning_fl.clients.shown_models import tell_download, trained_model
from lightning_fl.data import FederatedDataModule
from lightning_fl.errors import noting
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.flat_module.module_logs import Sums, merged, on_host
from lightning_fl.slots import LocalTraining, Result, model_keeper
from lightning_fl.state.run_state import CLIENT

Train = Callable[..., LocalTraining]
"""Function that trains one client, such as `train_locally`."""


def serial(
    flat_module: FlatModule,
    job: ClientJob,
    clients: Sequence[int],
    data: FederatedDataModule,
    train: Train = train_locally,
) -> Iterator[Result]:
    """Train each client and yield its result, so that memory holds one result at a time.

    Calls the hook `on_client_download` before each client; an exchange with two turns runs the clients, and so the hook, twice.

    Args:
        flat_module: module on flat storage.
        job: job of each client.
        clients: indices of the clients.
        data: samples of the clients.
        train: trains one client.
    """
    for client in clients:
        with flat_module.shared_by_clients.restoring():
            result = _train(flat_module, job, client, data, train)
        yield result
        del result  # before the next client trains
    flat_module.progress = None


def _train(flat_module: FlatModule, job: ClientJob, client: int, data: FederatedDataModule, train: Train) -> Result:
    """Train a client, and keep only its result."""
    run, schedule, logs, part = job.run, job.schedule, flat_module.logs, model_keeper(job.personal)
    state = run.client_state(client, job.rule, job.received["model"])
    own_model = take_own_model(state)
    owned = {name: state.pop(name, entry) for name, entry in run.personal.items()}
    tell_download(flat_module, job, client, owned)
    flat_module.personal.load(owned)
    seeds, resident = run.torch_seeds(CLIENT, client), data.train.resident
    seeds = seeds if job.group is None else job.group.seeds(seeds)
    work = schedule.work(data.client(client), seeds, resident, (run, client))
    own_training = None if part is None else OwnModelTraining(flat_module, job, part, own_model, work)
    beside = own_training.beside if own_training is not None and own_training.steps_beside else None
    noted = noting(lambda: f"Client {client} was training in round {run.round}.")
    with noted, flat_module.shared_by_clients.watching():
        starting = job if own_training is None else own_training.starting(job)
        local = train(flat_module, starting, work, state, beside)
    trained = trained_model(flat_module)
    message = finish(flat_module, job, local)
    last_loss = logs.last_loss(work.batches_per_epoch * schedule.repeat) if schedule.reports_last_loss else None
    client_logs = logs.take()
    if job.group is not None:
        client_logs, last_loss = _of_all(job.group, client_logs, last_loss)
    owned = flat_module.personal.read()
    result = Result(
        client=client,
        message=message,
        weight=float(data.client_sizes[client]),
        state=local.state | owned,
        counters=flat_module.read_counters(),
        last_loss=None if last_loss is None else last_loss[0],
        logs=client_logs,
        num_steps=local.num_steps,
        owned=owned,
        trained=trained,
    )
    if own_training is not None:
        with noting(lambda: f"Client {client} was training its own model in round {run.round}."):
            result.state |= own_training.finish(local)
    local.drop_vectors()
    return result


def _of_all(
    group: DeviceGroup, logs: Sums, last_loss: tuple[float, float] | None
) -> tuple[Sums, tuple[float, float] | None]:
    """Return a client's logs and last loss, merged over the processes of its group."""
    parts = group.gather((on_host([logs])[0], last_loss))
    losses = [loss for _, loss in parts if loss is not None]
    samples = sum(count for _, count in losses)
    mean = (sum(loss * count for loss, count in losses) / samples, samples) if samples else None
    return merged([sums for sums, _ in parts]), mean

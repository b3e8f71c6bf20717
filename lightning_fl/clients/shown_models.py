"""Models that the module holds in hooks about a client: the one that it has received, and the one that it has trained.

They are the same with every runner. Nothing is copied for hooks that nothing overrides.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lightning_fl.clients.client_job import ClientJob
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.slots import TrainedModel

DOWNLOAD, UPLOAD = "on_client_download", "on_client_upload"


def tell_download(flat_module: FlatModule, job: ClientJob, client: int, owned: Mapping[str, Tensor]) -> None:
    """Call `on_client_download` while the module holds the received model and the client's personal values."""
    if flat_module.hooks.reads_module(DOWNLOAD):
        flat_module.load(job.received["model"], job.received["buffers"], job.counters)
        flat_module.personal.load(owned)
    flat_module.hooks.call(DOWNLOAD, client)


def trained_model(flat_module: FlatModule) -> TrainedModel | None:
    """Return a copy of the model that the module has trained; None if no hook reads it."""
    if not flat_module.hooks.reads_module(UPLOAD):
        return None
    return TrainedModel(
        flat_module.params.clone(),
        flat_module.read_buffers().clone(),
        flat_module.read_counters(),
        flat_module.personal.read(),
    )


def show(flat_module: FlatModule, trained: TrainedModel | None) -> None:
    """Load the model that a client has trained, if a hook reads it."""
    if trained is not None:
        flat_module.load(trained.params, trained.buffers, trained.counters)
        flat_module.personal.load(trained.owned)

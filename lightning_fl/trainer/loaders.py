"""The user's loaders, requested with the checks and warnings of `lightning.Trainer`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.data import has_len_all_ranks
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.warnings import PossibleUserWarning

from lightning_fl.data import FederatedDataModule
from lightning_fl.data.samples.own_loaders import OwnLoaders
from lightning_fl.errors import require
from lightning_fl.evaluation.evaluation import as_loaders, is_sequential, num_batches
from lightning_fl.internals import DataLoaderSource, check_iterable, processed_loader, read_in_order, requested_loader


def request_loaders(
    trainer: Any, source: DataLoaderSource, stage: RunningStage, limit: int | float | None = None
) -> CombinedLoader:
    """Request the loaders of a stage, unless the limit of their batches is 0 or the data have none.

    Lightning warns of few workers and of shuffled validation loaders, adds `worker_init_fn` if workers are seeded, and with
    `overfit_batches` reads the samples in order.

    Args:
        trainer: trainer in a session.
        source: data module, or loaders.
        stage: stage that reads them.
        limit: Lightning's limit of their batches; None for all.

    Raises:
        TypeError: a loader is not iterable.
    """
    fitting = trainer.state.fn == TrainerFn.FITTING
    requested = None if limit == 0 or not source.is_defined() else requested_loader(source)
    loaders = as_loaders(requested, "max_size_cycle" if stage == RunningStage.TRAINING else "sequential")
    if requested is None:
        return loaders
    if fitting and trainer.overfit_batches > 0:
        read_in_order(loaders, stage)
    for loader in loaders.flattened:
        check_iterable(loader, source, trainer.state.fn)
        if trainer.world_size == 1:  # several processes would add up their lengths, but each trains its own clients
            has_len_all_ranks(loader, trainer.strategy)  # which warns of lengths that are 0, or of iterable data sets
    loaders.flattened = [processed_loader(trainer, trainer.state.fn, stage, loader) for loader in loaders.flattened]
    return loaders


def require_loader(source: DataLoaderSource) -> None:
    """Raise `UserError` if an evaluation has no loader."""
    require(
        source.is_defined(),
        f"{owner_of_loaders(source)} has no {source.name}: write one"
        f"{', or set val_fraction' if source.name == 'val_dataloader' else ''}.",
    )


def owner_of_loaders(source: DataLoaderSource) -> str:
    """Return the name of the data module that has loaders, or lacks them; of one that is divided, not of `Federated`."""
    return type(getattr(source.instance, "datamodule", source.instance)).__name__


@dataclass
class _ClientSource(DataLoaderSource):
    """Source of the loader of one client, which has its own."""

    client: int

    def dataloader(self) -> Any:
        """Return the loader."""
        assert isinstance(self.instance, FederatedDataModule)
        assert isinstance(self.instance.train, OwnLoaders)
        return self.instance.train.loader_of(self.client)


class ClientLoaders:
    """Clients' own loaders, each requested when it is first needed, and optionally again every n rounds."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._requested: dict[int, tuple[CombinedLoader, int]] = {}

    @property
    def requested(self) -> list[CombinedLoader]:
        """Those that have been requested."""
        return [loaders for loaders, _ in self._requested.values()]

    def of(self, client: int) -> CombinedLoader:
        """Return the loaders of a client, with Lightning's limits.

        Raises:
            UserError: they are read one after the other, which Lightning does not do in training, or the limit cannot be kept.
        """
        trainer, every = self._trainer, self._trainer.reload_dataloaders_every_n_epochs
        if client in self._requested:
            loaders, since = self._requested[client]
            if not every or trainer.current_epoch - since < every:
                return loaders
        with isolate_rng():  # so that a client's random numbers do not depend on when its loader was made
            loaders = request_loaders(
                trainer, _ClientSource(trainer.data, "train_dataloader", client), RunningStage.TRAINING
            )
        require(
            not is_sequential(loaders),
            "Lightning's `FitLoop` does not support a CombinedLoader of mode 'sequential': use max_size_cycle, "
            "max_size or min_size.",
        )
        loaders.limits = num_batches(loaders, trainer.limits["limit_train_batches"])
        self._requested[client] = loaders, trainer.current_epoch
        count = batches_of(loaders)
        if trainer.loggers and count < trainer.log_every_n_steps and not trainer.fast_dev_run:
            rank_zero_warn(  # Lightning's own
                f"The number of training batches ({count}) is smaller than the logging interval Trainer(log_every_n_steps="
                f"{trainer.log_every_n_steps}). Set a lower value for log_every_n_steps if you want to see logs for the training "
                "epoch.",
                category=PossibleUserWarning,
            )
        return loaders


def batches_of(loaders: CombinedLoader) -> int | float:
    """Return the number of batches of one pass over training loaders with limits; infinity if it is unknown."""
    limits: Any = loaders.limits
    combined = min if loaders._mode == "min_size" else max
    return combined(limits, default=0)

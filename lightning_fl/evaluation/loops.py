"""Lightning's loops of validation, test and prediction in a federation, whose processes share the batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_fl.checks import overrides
from lightning_fl.checks.evaluation_mode import measuring
from lightning_fl.checks.swapped_attributes import swapped
from lightning_fl.data.descriptions import describe_batch
from lightning_fl.data.samples.loaders import SampleLoader
from lightning_fl.errors import noting
from lightning_fl.evaluation.shared_results import SharedResults
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.flat_module.metric_values import unsynchronised
from lightning_fl.internals import LoggerConnector, StockEvaluationLoop, StockPredictionLoop, call

STAGES = {"validation": RunningStage.VALIDATING, "test": RunningStage.TESTING}


class EvaluationLoop(StockEvaluationLoop):
    """Lightning's loop of a validation or test; the processes take turns with the batches, unless one measures alone.

    Attributes:
        alone: True if this process runs all batches, without the others.
        averages: averages of the last run over samples of the values that the module logged, by name.
        loaders: index of the loader whose steps logged a name, if there are several loaders.
    """

    trainer: Any
    _results: SharedResults

    def __init__(self, trainer: Any, stage: str, inference_mode: bool) -> None:
        # As a loop of a fit it takes the loaders that it is given.
        super().__init__(trainer, TrainerFn.FITTING, STAGES[stage], verbose=False, inference_mode=inference_mode)
        self._results = SharedResults()
        self.alone = False
        self.averages: dict[str, float] = {}
        self.loaders: dict[str, int] = {}
        self._when_averaged: Callable[[dict[str, float]], None] | None = None

    def evaluate(
        self,
        loaders: CombinedLoader,
        limits: Sequence[int | float],
        replacing: Mapping[str, float] | None = None,
        hidden: set[str] | None = None,
        when_averaged: Callable[[dict[str, float]], None] | None = None,
    ) -> dict[str, float]:
        """Run the step of the stage over all loaders in evaluation mode, with all hooks.

        Args:
            loaders: loaders of the data.
            limits: batches to run of each loader.
            replacing: values of the method that replace logged values of the same name.
            hidden: names of logged values to leave out.
            when_averaged: called with the averages before the last hook, in which callbacks read them.

        Returns:
            The averages over samples of the values that the module logged, without `replacing`.
        """
        self._combined_loader, self._max_batches = loaders, list(limits)
        self._results.replacing, self._results.hidden = replacing or {}, hidden or set()
        self._when_averaged, self.averages = when_averaged, {}
        with self._in_use():
            self.run()
        return self.averages

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Make this the trainer's active loop, to which the module's own `log` goes."""
        trainer, attributes = self.trainer, vars(self.trainer.lightning_module)
        before, stage, log = trainer.loop_in_use, trainer.state.stage, attributes.pop("log", None)
        trainer.loop_in_use = self
        if not trainer.sanity_checking:
            trainer.state.stage = self._stage
        try:
            with trainer.active_module.chains:
                yield
        finally:
            trainer.loop_in_use, trainer.state.stage = before, stage
            if log is not None:
                attributes["log"] = log
            if self._combined_loader is not None:
                self._combined_loader._iterator = None  # ends workers that a loader does not keep until the next pass

    def setup_data(self) -> None:
        """Keep the loaders that `evaluate` gets."""
        if self._combined_loader is None:
            super().setup_data()

    def _evaluation_step(self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        strategy = self.trainer.strategy
        if not self.alone and batch_idx % strategy.world_size != strategy.global_rank:
            return
        step = "test_step" if self.trainer.testing else "validation_step"
        with noting(lambda: f"{step} read batch {batch_idx}: {describe_batch(batch)}."):
            super()._evaluation_step(batch, batch_idx, dataloader_idx, dataloader_iter)

    def _on_evaluation_model_train(self) -> None:
        hook = "on_test_model_train" if self.trainer.testing else "on_validation_model_train"
        if overrides(hook, self.trainer.lightning_module):
            call._call_lightning_module_hook(self.trainer, hook)
        else:
            self._module_mode.restore(self.trainer.lightning_module)

    @property
    def _reads_own_loader(self) -> bool:
        """True if the package made the only loader; the user's data module may have had several."""
        loaders = [] if self._combined_loader is None else self._combined_loader.flattened
        return [type(loader) for loader in loaders] == [SampleLoader]

    def _verify_dataloader_idx_requirement(self) -> None:
        if not self._reads_own_loader:
            super()._verify_dataloader_idx_requirement()

    def _build_step_args_from_hook_kwargs(self, hook_kwargs: Any, step_hook_name: str) -> tuple[Any, ...]:
        arguments: tuple[Any, ...] = super()._build_step_args_from_hook_kwargs(hook_kwargs, step_hook_name)
        step = getattr(self.trainer.lightning_module, step_hook_name)
        takes_index = is_param_in_hook_signature(step, "dataloader_idx", explicit=True)
        return (*arguments, 0) if self._reads_own_loader and takes_index else arguments

    def _store_dataloader_outputs(self) -> None:
        self._share()
        super()._store_dataloader_outputs()

    def _on_evaluation_epoch_end(self) -> None:
        super()._on_evaluation_epoch_end()
        trainer, hook = self.trainer, f"on_{'test' if self.trainer.testing else 'validation'}_epoch_end"
        if any(overrides(hook, owner) for owner in (*trainer.callbacks, trainer.lightning_module)):
            self._share()  # what they have logged
        self.averages = self._results.averages()
        self.unlogged_names, self.loaders = self._results.unlogged_names, self._results.loaders
        if self._when_averaged is not None:
            self._when_averaged(self.averages)

    def _share(self) -> None:
        logs = self.trainer.active_module.logs
        gather = None if self.alone else logs.gather
        self._results.share(gather, logs.gather_tensors, self.trainer.lightning_module)


class PredictionLoop(StockPredictionLoop):
    """Lightning's loop of a prediction, which every process runs in full; it knows the samples of the package's own loaders."""

    def _get_batch_indices(self, dataloader: object) -> list[list[int]]:
        if not isinstance(dataloader, SampleLoader):
            return super()._get_batch_indices(dataloader)
        if dataloader.shuffles or dataloader.indices is not None:
            return []
        size, count = dataloader.batch_size, dataloader.num_samples
        return [list(range(start, min(start + size, count))) for start in range(0, count, size)]


def measure(
    flat_module: FlatModule,
    stage: str,
    loaders: CombinedLoader,
    limits: Sequence[int | float],
    alone: bool = False,
    probes: Sequence[Callback] = (),
    marks_undefined: bool = False,
) -> dict[str, float]:
    """Evaluate a module with all its hooks, without a trace, and return the averages that it logs.

    Only those callbacks that are probes are called, and loggers get nothing. The module's torchmetrics objects and
    other attributes are restored.

    Args:
        flat_module: holds the model.
        stage: `validation` or `test`.
        loaders: loaders of the data.
        limits: batches to run of each loader.
        alone: True if this process runs all batches, without the others.
        probes: callbacks that measure each batch, too.
        marks_undefined: as in `SharedResults`.

    Returns:
        Averages over samples, the same in every process unless `alone`.
    """
    module = flat_module.module
    trainer: Any = module.trainer
    loop = EvaluationLoop(trainer, stage, inference_mode=False)
    loop._results.marks_undefined, loop.alone = marks_undefined, alone
    with measuring(module), unsynchronised(module) if alone else nullcontext(), without_callbacks(trainer, probes):
        return loop.evaluate(loaders, limits)


@contextmanager
def without_callbacks(trainer: Any, probes: Sequence[Callback] = ()) -> Iterator[None]:
    """Call no callback but these, send loggers nothing, and keep the trainer's metrics."""
    stage = RunningStage.VALIDATING if trainer.sanity_checking else trainer.state.stage
    with (
        swapped(trainer, callbacks=list(probes), loggers=[], _logger_connector=LoggerConnector(trainer)),
        swapped(trainer.state, stage=stage),
    ):
        yield

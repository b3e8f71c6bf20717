"""Validation, test or prediction outside `fit`: a checkpoint's model or the current one, on all loaders of a stage."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_fl.errors import UserError, require
from lightning_fl.outputs import checkpoint_file
from lightning_fl.server.evaluation import as_loaders, evaluate, is_sequential, num_batches
from lightning_fl.server.validation import ModelValidation, owned_by_clients
from lightning_fl.state.saved_states import read_states
from lightning_fl.trainer import checkpointing
from lightning_fl.trainer.lightning_interface import TrainerInterface
from lightning_fl.trainer.run_metric import settle_metric


def run_evaluation(trainer: TrainerInterface, stage: str) -> tuple[list[dict[str, float]], list[list[Any]]]:
    """Evaluate the trainer's model once.

    Args:
        trainer: trainer in a session; loads the model from its `ckpt_path`, if there is one.
        stage: `validation`, `test` or `predict`.

    Returns:
        For each loader the averages of the values that module and method logged, and its outputs; nothing runs, as in
        Lightning, if there is no batch.

    Raises:
        UserError: the module has no step for the stage, or the checkpoint belongs to another model.
    """
    module, flat_module = trainer.lightning_module, trainer.active_module
    if stage != "predict" and not is_overridden(f"{stage}_step", module):
        raise UserError(f"{type(module).__name__} has no {stage}_step.")
    kept: Mapping[int, Any] = trainer.run.clients if "run" in vars(trainer) else {}
    if trainer.ckpt_path is not None:
        checkpoint = checkpoint_file.load(trainer.ckpt_path, trainer.weights_only)
        run_state = checkpoint.get("federation", {}).get("run", {})
        kept = read_states(run_state, Path(trainer.ckpt_path)).get("clients", {})
        checkpointing.evaluate_checkpoint(flat_module, checkpoint, trainer.ckpt_path)
    short = {"validation": "val"}.get(stage, stage)
    given = getattr(trainer.data, f"{short}_dataloader")()
    setattr(trainer, f"{short}_dataloaders", given)
    loaders = as_loaders(given)
    require(
        stage != "predict" or is_sequential(loaders),
        f"predict_dataloader() returns a CombinedLoader of mode {loaders._mode!r}, but predictions are made loader by loader: "
        "use CombinedLoader(loaders, mode='sequential').",
    )
    limit = trainer.limits[f"limit_{short}_batches"]
    counts = num_batches(loaders, limit)
    setattr(trainer, f"num_{short}_batches", counts)
    if not sum(counts):
        return [], [[] for _ in counts]
    states = owned_by_clients(flat_module, kept)
    validation = ModelValidation(flat_module, trainer.data, stage, loaders, limit, states)
    averages, outputs = evaluate_with_method(trainer, validation)
    for logger in trainer.loggers[1:]:
        logger.log_metrics(averages, step=trainer.global_step)
        logger.save()
    num_results = len(outputs) if is_sequential(loaders) else 1
    return [_without_other_loaders(averages, f"/dataloader_idx_{index}") for index in range(num_results)], outputs


def _without_other_loaders(averages: dict[str, float], suffix: str) -> dict[str, float]:
    """Return the values of the loader whose names have this suffix, and those of no particular loader."""
    return {name: x for name, x in averages.items() if name.endswith(suffix) or "/dataloader_idx_" not in name}


def evaluate_with_method(
    trainer: TrainerInterface, validation: ModelValidation
) -> tuple[dict[str, float], list[list[Any]]]:
    """Evaluate the model that the flat module holds, publish the averages, and return them and the outputs of each loader.

    In validation and test the method adds values of its own to the averages.
    """
    of_method = {} if validation.stage == "predict" else trainer.algorithm.validate(validation)

    def publish(averages: dict[str, float]) -> None:
        if trainer.fitting:
            settle_metric(trainer, averages, is_all=False)
        trainer.publish(averages | of_method)

    averages, outputs = evaluate(
        validation.flat_module,
        validation.stage,
        validation.loaders,
        num_batches(validation.loaders, validation.limit),
        trainer.inference_mode,
        publish,
    )
    return averages | of_method, outputs

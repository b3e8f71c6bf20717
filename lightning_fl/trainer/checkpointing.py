"""Build, find and load checkpoints, and resume a run from one.

`FederatedTrainer.save_checkpoint` writes what `build_checkpoint` returns by `checkpoint_file.save_atomically`.
"""

from __future__ import annotations

import os
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_fl.checks import is_a
from lightning_fl.checks.float32 import UNSET, Float32
from lightning_fl.clients.choose_runner import describe_runner
from lightning_fl.data import FederatedDataModule
from lightning_fl.engine import follow_pruning, follow_torch_pruning, follow_unfreezing
from lightning_fl.engine.engine import Engine
from lightning_fl.errors import UserError
from lightning_fl.flat_module.flat_module import FlatModule, copied_state
from lightning_fl.flat_module.hooks import SERVER_CALLBACKS
from lightning_fl.internals import call
from lightning_fl.outputs import checkpoint_file
from lightning_fl.outputs.frozen_weights import frozen_names
from lightning_fl.outputs.metric import ACCURACY
from lightning_fl.outputs.run_folder import LAST
from lightning_fl.state.run_state import as_saved
from lightning_fl.state.saved_frozen import SavedFrozen
from lightning_fl.state.saved_states import SavedStates, read_states
from lightning_fl.trainer.build_runner import build_runner
from lightning_fl.trainer.lightning_interface import TrainerInterface
from lightning_fl.trainer.resumed_settings import changes_since
from lightning_fl.trainer.run_metric import kept_metric
from lightning_fl.trainer.stops import Stop, remaining_stop


@dataclass
class RoundStart:
    """A run as it was before the current round, which a checkpoint saved within the round contains: a resumed run repeats it.

    Attributes:
        run: state of the run.
        callbacks: states of the callbacks, by key.
        federation: further entries of the checkpoint's `federation`.
        is_trained: True once the clients have trained, and the module has the server's new model.
    """

    run: dict[str, Any]
    callbacks: dict[str, Any]
    federation: dict[str, Any]
    is_trained: bool = False


def round_start(trainer: TrainerInterface, engine: Engine, stop: Stop | None) -> RoundStart:
    """Return the present state of a run, which the coming round does not change.

    Args:
        trainer: trainer during `fit`.
        engine: engine of the run.
        stop: what had stopped the run when the round began.
    """
    callbacks = _states_of_callbacks(trainer) if trainer.is_global_zero else {}
    federation = _further_state(trainer, engine) | {"stop": stop and asdict(stop)}
    callbacks, federation["learning_rates"] = deepcopy((callbacks, federation["learning_rates"]))
    return RoundStart(trainer.run.state_dict(), callbacks, federation)


def _states_of_callbacks(trainer: TrainerInterface, *kinds: type) -> dict[str, Any]:
    """Return the states of the callbacks of some kinds, or of all, by key."""
    callbacks = [c for c in trainer.hooks.callbacks if not kinds or is_a(c, *kinds)]
    return {callback.state_key: state for callback in callbacks if (state := callback.state_dict())}


def _further_state(trainer: TrainerInterface, engine: Engine) -> dict[str, Any]:
    """Return what a checkpoint's `federation` has beside the run, and a round changes."""
    schedules = engine.flat_module.optimizer.schedules
    return {
        "stop": trainer.stop and asdict(trainer.stop),
        "learning_rates": schedules.state_dict() | follow_unfreezing.as_saved(engine.flat_module),
        "batches": int(trainer.fit_loop.epoch_loop._batches_that_stepped),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
    } | follow_torch_pruning.as_saved(trainer.lightning_module, trainer.callbacks)


def build_checkpoint(
    trainer: TrainerInterface,
    engine: Engine | None = None,
    before: RoundStart | None = None,
    saved_states: SavedStates | None = None,
    num_rows: int = 0,
    saved_frozen: SavedFrozen | None = None,
) -> dict[str, Any]:
    """Return a Lightning checkpoint of the server's model, with the run under `federation` if an engine is given.

    Args:
        trainer: trainer during `fit`, or with a model at any time without an engine.
        engine: engine of the run; None to leave the run out.
        before: the run to save within a round; None: the present one.
        saved_states: files that get the clients' states; None: the checkpoint contains them.
        num_rows: number of rows of metrics.csv that the run has logged.
        saved_frozen: files that get the frozen weights; None: the checkpoint contains them.
    """
    module, datamodule = trainer.lightning_module, trainer.data
    no_run = {"round": 0, "num_steps": 0}
    run_state = before.run if before else (trainer.run.state_dict() if "run" in vars(trainer) else no_run)
    frozen = frozen_names(module)  # which nobody changes until the checkpoint is written
    # While several clients train, the server's model is saved; of an only client, as in Lightning, the model in training.
    hides_clients = before is not None and not before.is_trained and not trainer.trains_only_client
    checkpoint: dict[str, Any] = {
        "epoch": run_state["round"],
        "global_step": run_state["num_steps"] if before is None or hides_clients else trainer.global_step,
        "pytorch-lightning_version": lightning.__version__,
        "state_dict": trainer.active_module.state_dict(run_state, frozen)
        if hides_clients and trainer.flat_module is not None  # else `fit` has left the server's in the module
        else copied_state(module, frozen),
    }
    checkpoint |= follow_pruning.as_saved(module)
    for part in (module, datamodule):
        if part.hparams:
            if hasattr(part, "_hparams_name"):
                checkpoint[part.CHECKPOINT_HYPER_PARAMS_NAME] = part._hparams_name
            checkpoint[part.CHECKPOINT_HYPER_PARAMS_KEY] = checkpoint_file.plain(dict(part.hparams))
    if engine is not None:
        if before is None and trainer.fitting:
            engine.flat_module.optimizer.schedules.adopt()  # what callbacks have set since the last training
        # Callbacks that save or average the model know the present files and average; the others repeat the round.
        present = _states_of_callbacks(trainer, *(SERVER_CALLBACKS if before else ()))
        checkpoint["callbacks"] = before.callbacks | present if before else present
        checkpoint["optimizer_states"] = []
        checkpoint["lr_schedulers"] = []
        checkpoint["federation"] = {
            "format": checkpoint_file.FORMAT,
            "algorithm": trainer.algorithm.name,
            "settings": trainer.settings.values,
            "metric": kept_metric(trainer),
            "execution": execution(engine),
            "logged_rows": num_rows,
            "run": as_saved(run_state) if saved_states is None else saved_states.write(run_state),
        } | (before.federation if before else _further_state(trainer, engine))
        for callback in trainer.hooks.callbacks:
            callback.on_save_checkpoint(trainer, module, checkpoint)
        if datamodule_state := datamodule.state_dict():
            checkpoint[type(_given(datamodule)).__qualname__] = datamodule_state
    module.on_save_checkpoint(checkpoint)
    return checkpoint if saved_frozen is None else saved_frozen.moved_out(checkpoint, frozen)


def _given(datamodule: FederatedDataModule) -> LightningDataModule:
    """Return the user's data module, which the federation may wrap."""
    wrapped = getattr(datamodule, "datamodule", None)
    return wrapped if is_a(wrapped, LightningDataModule) else datamodule


def resolve(trainer: TrainerInterface, ckpt_path: str | os.PathLike[str] | None) -> str | None:
    """Return the path of the checkpoint that `ckpt_path` names: `last`, `best` or a path; None for None.

    Raises:
        UserError: there is no `last` outside `fit`, or `best` without a ModelCheckpoint that monitors a metric.
    """
    if ckpt_path is None:
        return None
    last = Path(trainer.default_root_dir) / LAST
    if ckpt_path == "last":
        if os.path.isfile(last):
            return str(last)
        if trainer.fitting:
            rank_zero_warn(f"ckpt_path='last': there is no {last} yet, so the run starts from the beginning.")
            return None
        raise UserError(
            f"ckpt_path='last': there is no checkpoint at {last}; give the run's folder as default_root_dir."
        )
    if ckpt_path == "best":
        callbacks = [c for c in trainer.checkpoint_callbacks if is_a(c, ModelCheckpoint)]
        best = next((c.best_model_path for c in callbacks if c.best_model_path), "")
        if not best and os.path.isfile(last):
            states = checkpoint_file.load(last, trainer.weights_only).get("callbacks", {})
            best = next((s["best_model_path"] for s in states.values() if s.get("best_model_path")), "")
            if not callbacks and not any("best_model_path" in state for state in states.values()):
                rank_zero_warn(
                    f"ckpt_path='best': this run has no ModelCheckpoint, so {last} is read, its last checkpoint, as in Lightning."
                )
                best = str(last)
        if not best:
            raise UserError(
                "ckpt_path='best' needs a run with a ModelCheckpoint callback that monitors a metric "
                f"(--trainer.callbacks+={ModelCheckpoint.__name__} --trainer.callbacks.monitor {ACCURACY}); "
                "use 'last' or a path otherwise."
            )
        return str(best)
    return str(ckpt_path)


def read_checkpoint(trainer: TrainerInterface) -> dict[str, Any] | None:
    """Read the checkpoint of a session that begins, and call the module's `on_load_checkpoint`, which may build its layers.

    Raises:
        UserError: the checkpoint is unreadable or, in a fit, has no run of this algorithm.
    """
    path = trainer.ckpt_path
    if path is None:
        return None
    checkpoint = checkpoint_file.load(path, trainer.weights_only)
    if trainer.fitting:
        checkpoint_file.federation_of(checkpoint, path, trainer.algorithm.name)
    trainer.lightning_module.on_load_checkpoint(checkpoint)
    return checkpoint


def evaluate_checkpoint(flat_module: FlatModule, checkpoint: dict[str, Any], path: str) -> None:
    """Load the model of the checkpoint from `path` into the module; prune the module first if the model is pruned.

    Raises:
        UserError: the checkpoint belongs to another model.
    """
    module = flat_module.module
    if plans := follow_pruning.missing_plans(module, checkpoint):
        follow_pruning.prune_bound(flat_module, plans)
    load_model(module, checkpoint, path)


def load_model(module: LightningModule, checkpoint: dict[str, Any], path: str) -> None:
    """Load a checkpoint's weights into the module.

    Raises:
        UserError: the weights belong to another model.
    """
    before = copied_state(module)
    try:
        module.load_state_dict(checkpoint["state_dict"], strict=module.strict_loading)
    except RuntimeError as error:
        module.load_state_dict(before)  # torch has already loaded the entries that fit
        reason = " ".join(line.strip() for line in str(error).splitlines()[1:3])
        raise UserError(
            f"the checkpoint {path} belongs to another model than {type(module).__name__}: {reason}"
        ) from None


def resume(trainer: TrainerInterface, engine: Engine, checkpoint: dict[str, Any]) -> int:
    """Resume the run of a checkpoint; return the number of rows that it had logged.

    Raises:
        UserError: the checkpoint belongs to another model, algorithm or federation.
    """
    path = str(trainer.ckpt_path)
    saved = checkpoint_file.federation_of(checkpoint, path, trainer.algorithm.name)
    changes = changes_since(trainer, checkpoint, path)
    saved["run"] = read_states(saved["run"], Path(path))
    follow_unfreezing.rebuild(engine.flat_module, saved["learning_rates"], engine)
    follow_pruning.rebuild(engine, checkpoint)
    weights = follow_torch_pruning.without_masks(checkpoint["state_dict"])
    load_model(trainer.lightning_module, checkpoint | {"state_dict": weights}, path)
    follow_torch_pruning.rebuild(trainer.lightning_module, trainer.callbacks, saved)
    trainer.active_module.load_server_model(trainer.run)  # the checkpoint's model may be a client's, or an average
    trainer.active_module.optimizer.schedules.load_state_dict(saved["learning_rates"], saved["run"]["round"])
    if (name := type(_given(trainer.data)).__qualname__) in checkpoint:
        trainer.data.load_state_dict(checkpoint[name])
    call._call_callbacks_on_load_checkpoint(trainer, checkpoint)
    patience = [(callback, callback.patience) for callback in trainer.early_stopping_callbacks]
    call._call_callbacks_load_state_dict(trainer, checkpoint)
    is_within_round = checkpoint["global_step"] > saved["run"]["num_steps"]
    if is_within_round:  # WeightAveraging loads the model in training, which the resumed run trains again
        trainer.active_module.load_server_model(trainer.run)
    for callback, given in patience:  # which a state of EarlyStopping replaces, but a resumed run may change
        callback.patience = given
    trainer.fit_loop.set_round(trainer.run.round)
    trainer.fit_loop.epoch_loop._batches_that_stepped = saved["batches"]
    if trainer.metric is None and (metric := saved["metric"]):
        trainer.metric, trainer.metric_mode = metric["name"], metric["mode"]
    if not trainer.metric_falls:
        engine.accuracy = trainer.metric
    trainer.publish(saved["metrics"])
    _keep_numerics(trainer, engine, saved)
    done, planned = trainer.run.round, saved["settings"]["trainer.max_rounds"]
    stopped = Stop(**saved["stop"]) if saved["stop"] else None
    if stopped is not None and trainer.max_rounds <= planned:
        trainer.stop = remaining_stop(trainer, stopped)
    if done >= trainer.max_rounds:
        rank_zero_info(f"Nothing is left to do: max_rounds is {trainer.max_rounds}, and {path} contains {done} rounds.")
    elif trainer.steps_left == 0:
        steps = trainer.run.num_successive_steps
        rank_zero_info(f"Nothing is left to do: max_steps is {trainer.max_steps}, and {path} contains {steps} steps.")
    elif trainer.stop is not None and trainer.stops_after(done):
        rank_zero_info(
            f"Nothing is left to do: {trainer.stop.in_words(done, planned)}, as {path} says; a larger max_rounds, or another "
            "setting of what stopped it, lets the run go on."
        )
    else:
        rank_zero_info(f"Resumed {path} after round {done} of {trainer.max_rounds}.")
        if is_within_round:
            rank_zero_warn(f"You're resuming from a checkpoint that ended within round {done + 1}, which starts again.")
        if stopped is not None:
            why = "that has changed" if trainer.stop is None else "min_rounds or min_steps is more"
            rank_zero_info(f"{stopped.in_words(done, planned)}; it goes on, because {why}.")
        if changes:
            rank_zero_info(f"Changed since the checkpoint: {', '.join(map(str, changes))}.")
        if note := trainer.algorithm.rule.note_on_resume(engine.context, planned):
            rank_zero_info(note)
    return int(saved["logged_rows"])


def _keep_numerics(trainer: TrainerInterface, engine: Engine, saved: dict[str, Any]) -> None:
    """Use the runner and the threads of the earlier rounds unless flags set others, so that the last bits stay the same.

    On another kind of device they differ in any case, and what is fast on one is slow on the other: the run has chosen anew.
    """
    device, earlier = trainer.fabric.device.type, saved["execution"]
    is_the_same_device = earlier["device"] == device
    # Another module or callback may need Lightning's own loop now, or no longer.
    is_the_same_loop = (earlier["runner"]["wanted"] == "lightning") == trainer.by_lightning
    if trainer.runner == "auto" and trainer.clients_at_once is None and is_the_same_device and is_the_same_loop:
        # Another callback may need each client's steps now, so that a stack is tried again.
        with suppress(UserError):
            engine.runner = build_runner(engine, **earlier["runner"], may_end=True)
        trainer.active_module.load_server_model(trainer.run)  # the trial may have changed the model
    if trainer.threads is None and device == "cpu" and is_the_same_device:
        torch.set_num_threads(earlier["threads"])
    compiled, evaluation = trainer.active_module.compiled, trainer.active_module.compiled_evaluation
    if compiled is not None and is_the_same_device:
        compiled.why_not = earlier.get("why_not_compiled") or ""
    if evaluation is not None and is_the_same_device:
        evaluation.why_not = earlier.get("why_evaluated_eagerly") or ""
    float32 = Float32(*earlier.get("float32", Float32.now()))
    if trainer.float32_precision is None and float32 != Float32.now():
        float32.set()  # until the session ends
    now = execution(engine)
    if now != earlier:
        rank_zero_info(
            f"The run goes on with {_in_words(now, not is_the_same_device)}; its earlier rounds had "
            f"{_in_words(earlier, not is_the_same_device)}."
        )


def execution(engine: Engine) -> dict[str, Any]:
    """Return the kind of device, the runner and the threads of a federation, which decide the last bits of its results.

    It includes the precision of float32 on an accelerator, or if it is not torch's default, and in a run that compiles steps
    why they are not compiled, "" if they are; for steps of evaluation only if they are not.
    """
    device = engine.flat_module.fabric.device.type
    settings = {"device": device, "runner": describe_runner(engine.runner), "threads": torch.get_num_threads()}
    if device != "cpu" or Float32.now() != UNSET:
        settings["float32"] = list(Float32.now())
    if engine.flat_module.compiled is not None:
        settings["why_not_compiled"] = engine.flat_module.compiled.why_not
    evaluation = engine.flat_module.compiled_evaluation
    if evaluation is not None and evaluation.why_not:
        settings["why_evaluated_eagerly"] = evaluation.why_not
    return settings


def _in_words(execution: dict[str, Any], names_device: bool) -> str:
    runner, threads = execution["runner"], execution["threads"]
    device = f" on {execution['device']}" if names_device else ""
    float32 = f", {Float32(*execution['float32'])}" if "float32" in execution else ""
    how = ", ".join(str(part) for part in runner.values() if part is not None)
    compiled = ", compiled" if execution.get("why_not_compiled") == "" else ""
    return f"runner {how}{compiled} and {threads} thread{'s' * (threads != 1)}{float32}{device}"

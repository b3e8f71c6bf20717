"""Compare the settings of a resumed run with those in its checkpoint: refuse some changes, and return the others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lightning_fl.errors import UserError
from lightning_fl.settings.settings import SAMPLES, Change, RunSettings
from lightning_fl.trainer.lightning_interface import TrainerInterface


def changes_since(trainer: TrainerInterface, checkpoint: Mapping[str, Any], path: str) -> list[Change]:
    """Return the settings that differ from the checkpoint's; a resumed run may change all of them.

    Args:
        trainer: trainer of the resumed run, before it loads the checkpoint.
        checkpoint: checkpoint with a federation.
        path: path of the checkpoint, for the error.

    Raises:
        UserError: a setting differs that the run must keep.
    """
    saved = checkpoint["federation"]
    changes = trainer.settings.changes_since(saved["settings"])
    if "PL_GLOBAL_SEED" in os.environ and trainer.run.seed != saved["run"]["seed"]:
        changes.append(Change("seed_everything", saved["run"]["seed"], trainer.run.seed))
    refused = [change for change in changes if change.key not in trainer.settings.changeable]
    named = [change for change in refused if change.key != SAMPLES]
    if named:
        raise UserError(
            f"the checkpoint {path} belongs to a run with other settings: {', '.join(map(str, named))}. This change would give "
            "clients other samples or states another meaning: use the old values, or start a new run in another folder."
        )
    if refused:
        raise UserError(
            f"the clients have other samples than in the checkpoint {path}, although no setting of the data differs: use the "
            "same data, or start a new run in another folder."
        )
    module = RunSettings()
    for name, value in trainer.lightning_module.hparams.items():
        module.add(f"model.{name}", value, True)
    old = RunSettings()
    for name, value in checkpoint.get(trainer.lightning_module.CHECKPOINT_HYPER_PARAMS_KEY, {}).items():
        if not name.startswith("_"):  # Lightning's own entries
            old.add(f"model.{name}", value, True)
    changes += module.changes_since(old.values)
    shown = [(change.old, change.new) for change in changes]
    # A hyper-parameter of the module often is one of its optimiser, too.
    optimizer = trainer.active_module.optimizer.schedules.changes_since(saved["learning_rates"])
    return changes + [change for change in optimizer if (change.old, change.new) not in shown]

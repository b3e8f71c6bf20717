"""A trainer's list of callbacks: the user's, the flags', and in a session the module's and the algorithm's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint, ModelSummary, ProgressBar, RichModelSummary, RichProgressBar, Timer

from lightning_fl.checks import is_a
from lightning_fl.errors import require
from lightning_fl.internals import is_of_tuner
from lightning_fl.outputs.last_checkpoint import LastCheckpoint
from lightning_fl.outputs.progress_bar import RoundProgressBar
from lightning_fl.outputs.run_folder import LAST


class CallbackList:
    """The callbacks of a trainer, in the order in which their hooks are called.

    Attributes:
        given: the user's callbacks, including those that were added after the trainer was made.
        present: the list, which the user may change; before a session without the callbacks of module and algorithm.
    """

    def __init__(self, given: Iterable[Callback], timer: Timer | None, root: str) -> None:
        """Make the callbacks that the flags may add.

        Args:
            given: the user's callbacks.
            timer: that of the flag `max_time`; None without it.
            root: the run's folder.
        """
        self.given = list(given)
        rich = any(is_a(callback, RichProgressBar) for callback in self.given)
        self._of_flags: dict[type[Callback], Callback] = {
            **({} if timer is None else {Timer: timer}),
            ModelSummary: RichModelSummary() if rich else ModelSummary(),
            ProgressBar: RoundProgressBar(),
            Checkpoint: LastCheckpoint(str(Path(root, LAST.parent))),
        }
        self._brought: list[Callback] = []
        self._left_out: list[Callback] = []
        self.present: list[Callback] = self.given

    def arrange(
        self,
        flags: Any,
        first: Sequence[Callback] = (),
        of_module: Sequence[Callback] = (),
        of_algorithm: Sequence[Callback] = (),
    ) -> None:
        """Arrange the list for a session, or before the first one.

        Args:
            flags: trainer with the flags `enable_…`.
            first: callbacks that come before the user's.
            of_module: the module's callbacks, which replace the user's of the same class or of a superclass.
            of_algorithm: the algorithm's callbacks.
        """
        brought = [*of_module, *of_algorithm]
        replaced = self.replaced(of_module)
        given = [one for one in self.given if type(one) not in replaced]
        every = [*given, *brought]
        enabled = {
            ModelSummary: flags.enable_model_summary,
            ProgressBar: flags.enable_progress_bar,
            Checkpoint: flags.enable_checkpointing,
        }
        added = [
            own
            for kind, own in self._of_flags.items()
            if enabled.get(kind, True) and not any(is_a(callback, kind) for callback in every)
        ]
        callbacks = [*first, *given, *added, *brought]
        if not flags.enable_progress_bar:
            callbacks = [one for one in callbacks if not is_a(one, ProgressBar)]
        self._brought = [*first, *brought]
        # Checkpoint callbacks come last, as in Lightning, so that they save the changes of the others.
        self.present = sorted(callbacks, key=lambda callback: is_a(callback, Checkpoint))
        self._left_out = [one for one in self.given if not _has(self.present, one)]

    def replaced(self, brought: Iterable[Callback]) -> set[type[Callback]]:
        """Return the classes of the user's callbacks that others replace, as in Lightning."""
        self._read_changes()
        classes = {type(one) for one in self.given} - {Callback}
        return {kind for kind in classes if any(isinstance(one, kind) for one in brought)}

    def _read_changes(self) -> None:
        """Take what the user has put into the list, or taken out of it, since it was arranged."""
        known = [*self.given, *self._of_flags.values(), *self._brought]
        kept = [one for one in self.given if _has(self.present, one) or _has(self._left_out, one)]
        self.given = kept + [one for one in self.present if not _has(known, one)]


def require_no_tuner(callbacks: Iterable[Callback]) -> None:
    """Raise `UserError` if Lightning's Tuner puts a callback into a trainer's list."""
    require(
        not any(map(is_of_tuner, callbacks)),
        "Lightning's Tuner tries learning rates and batch sizes in one training on all samples, which a federation does not "
        "have: give it a lightning.Trainer and your own loader or data module, as in "
        "Tuner(lightning.Trainer()).lr_find(model, datamodule=datamodule), and train in a federation with what it finds.",
    )


def _has(callbacks: Iterable[Callback], one: Callback) -> bool:
    return any(callback is one for callback in callbacks)

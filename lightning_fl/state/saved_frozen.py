"""Writer of the frozen weights to which `last.ckpt` refers (`lightning_fl.outputs.frozen_weights`)."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_fl.errors import UserError
from lightning_fl.outputs import checkpoint_file
from lightning_fl.outputs.files import replacing
from lightning_fl.outputs.frozen_weights import FOLDER, KEY, file_of, read, reference_to
from lightning_fl.outputs.run_folder import LAST


class SavedFrozen:
    """Files of frozen weights, for the checkpoints that one fit writes to one place.

    A file stays as long as `last.ckpt` or `previous.ckpt` refers to it.
    """

    def __init__(self, parent: Path, weights_only: bool = True) -> None:
        """Write nothing yet.

        Args:
            parent: folder of the checkpoints.
            weights_only: False if the user trusts objects of any class in the checkpoint that the fit resumes.
        """
        self._parent = parent
        self._weights_only = weights_only
        self._referred: list[str | None] = []

    def moved_out(self, checkpoint: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
        """Return a checkpoint that refers to its frozen weights, which are written unless a file has them already.

        Args:
            checkpoint: whole checkpoint of a run.
            names: entries of its `state_dict` that are frozen; it may lack some.

        Raises:
            FileError: the file cannot be written.
        """
        own = self._referred[-1] if self._referred else None
        earlier = own if self._referred else self._file_of_last()
        self._referred = [earlier, None]
        state = checkpoint["state_dict"]
        frozen = {name: entry for name, entry in state.items() if name in names and isinstance(entry, Tensor)}
        if not frozen:
            return checkpoint
        reference = reference_to(frozen, list(state))
        if reference["file"] != own or not (self._parent / reference["file"]).is_file():
            self._write(frozen, reference)
        self._referred = [earlier, reference["file"]]
        rest = {name: entry for name, entry in state.items() if name not in frozen}
        federation = {**checkpoint["federation"], "format": checkpoint_file.FORMAT, KEY: reference}
        return {**checkpoint, "state_dict": rest, "federation": federation}

    def release(self) -> None:
        """Delete the files that neither `last.ckpt` nor `previous.ckpt` needs, after a checkpoint has been written completely."""
        for path in (self._parent / FOLDER).glob("*.pt"):
            if f"{FOLDER}/{path.name}" not in self._referred:
                path.unlink(missing_ok=True)

    def _write(self, frozen: dict[str, Tensor], reference: dict[str, Any]) -> None:
        """Write the file, unless an earlier fit has written it to its end."""
        try:
            read(reference, self._parent / LAST.name)
        except UserError:
            with replacing(self._parent / reference["file"]) as file:
                torch.save(frozen, file)

    def _file_of_last(self) -> str | None:
        """Return the file to which the `last.ckpt` of an earlier fit refers, which the next checkpoint replaces."""
        if (self._parent / FOLDER).is_dir():
            with suppress(UserError):
                return file_of(checkpoint_file.load(self._parent / LAST.name, self._weights_only, whole=False))
        return None

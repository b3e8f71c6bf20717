"""Writer of the frozen weights to which `last.ckpt` refers (`lightning_fl.outputs.frozen_weights`)."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_fl.errors import UserError
from lightning_fl.outputs import checkpoint_file
from lightning_fl.outputs.files import Stamp, link_on_the_way, remove_files, replacing, stamp_of
from lightning_fl.outputs.frozen_weights import FOLDER, KEY, file_of, read, reference_to
from lightning_fl.outputs.run_folder import LAST, PREVIOUS

WRITTEN = re.compile(rf"{FOLDER}/[0-9a-f]{{16}}\.pt")
"""Files that `reference_to` names, relative to the folder of the checkpoints."""


class SavedFrozen:
    """Files of frozen weights, for the checkpoints that one fit writes to one place.

    A file stays as long as `last.ckpt` or `previous.ckpt` refers to it. Then it is deleted if this fit has written it, or if one
    of them has referred to it; nothing is deleted through a link.
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
        self._written: set[str] = set()
        self._stamp: Stamp = None
        self._says_it_stays = True

    def moved_out(self, checkpoint: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
        """Return a checkpoint that refers to its frozen weights, which are written unless a file has them already.

        Args:
            checkpoint: whole checkpoint of a run.
            names: entries of its `state_dict` that are frozen; it may lack some.

        Raises:
            FileError: the file cannot be written.
        """
        own = self._referred[-1] if self._referred else None
        earlier = own if self._referred else self._find_written()
        self._referred = [earlier, None]
        state = checkpoint["state_dict"]
        frozen = {name: entry for name, entry in state.items() if name in names and isinstance(entry, Tensor)}
        if not frozen:
            return checkpoint
        reference = reference_to(frozen, list(state))
        path = self._parent / reference["file"]
        if reference["file"] != own or stamp_of(path) is None or stamp_of(path) != self._stamp:
            self._write(frozen, reference)
            self._written.add(reference["file"])
            self._stamp = stamp_of(path)
        self._referred = [earlier, reference["file"]]
        rest = {name: entry for name, entry in state.items() if name not in frozen}
        federation = {**checkpoint["federation"], "format": checkpoint_file.FORMAT, KEY: reference}
        return {**checkpoint, "state_dict": rest, "federation": federation}

    def release(self) -> None:
        """Delete the files that neither `last.ckpt` nor `previous.ckpt` needs, after a checkpoint has been written completely."""
        unneeded = sorted(self._written.difference(self._referred))
        self._written.difference_update(unneeded)
        if link := link_on_the_way(self._parent / FOLDER):
            if unneeded and self._says_it_stays:
                self._says_it_stays = False
                rank_zero_warn(
                    f"{link} is a link, through which nothing is deleted: {', '.join(unneeded)} in {self._parent} "
                    f"stay{'s' * (len(unneeded) == 1)}, and so will later files, although neither last.ckpt nor previous.ckpt "
                    "needs them."
                )
        else:
            remove_files(self._parent / file for file in unneeded)

    def _write(self, frozen: dict[str, Tensor], reference: dict[str, Any]) -> None:
        """Write the file, unless an earlier fit has written it to its end."""
        try:
            read(reference, self._parent / LAST.name)
        except UserError:
            with replacing(self._parent / reference["file"]) as file:
                torch.save(frozen, file)

    def _find_written(self) -> str | None:
        """Note the files of an earlier fit; return that of its `last.ckpt`, which the next checkpoint replaces."""
        files = list[str | None]()
        for checkpoint in (LAST, PREVIOUS) if (self._parent / FOLDER).is_dir() else ():
            file = None
            with suppress(UserError):
                file = file_of(checkpoint_file.load(self._parent / checkpoint.name, self._weights_only, whole=False))
            files.append(file)
        self._written.update(file for file in files if file is not None and WRITTEN.fullmatch(file))
        return files[0] if files else None

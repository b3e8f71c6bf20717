"""Checkpoints: written aside and renamed, so that a kill never leaves a partial one, and refused if they do not fit.

A checkpoint is an ordinary Lightning checkpoint (`state_dict`, `hyper_parameters`, callback states …) with one more key,
`federation`, that holds the run. `load_from_checkpoint` of the module's class reads both kinds, but not a `last.ckpt` whose
frozen weights are in another file (`lightning_fl.outputs.frozen_weights`); `load` completes it.
"""

from __future__ import annotations

import mmap
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint
from torch.utils.serialization import config

from lightning_fl.errors import MissingFileError, UserError, require
from lightning_fl.outputs import frozen_weights
from lightning_fl.outputs.files import replacing
from lightning_fl.outputs.losses import say_lost
from lightning_fl.outputs.run_folder import PREVIOUS

FORMAT = 5
"""Format of a run; a version that writes another content gives it the next number."""


def save_atomically(checkpoint: dict[str, Any], path: str | os.PathLike[str], keep_previous: bool = False) -> None:
    """Write `checkpoint` so that `path` is always either the complete old file or the complete new one.

    Args:
        checkpoint: object for `torch.save`.
        path: file to write; missing folders are created.
        keep_previous: True to keep the old file as `previous.ckpt` in the same folder.

    Raises:
        FileError: the file cannot be written; the old one stays.
    """
    with replacing(path, keep_as=PREVIOUS.name if keep_previous else None) as file:
        torch.save(checkpoint, file)


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters that `torch.load(weights_only=True)` can read, and name the others in a warning."""
    plain_values = {name: value for name, value in values.items() if _is_plain(value)}
    if left_out := sorted(values.keys() - plain_values.keys()):
        say_lost(f"hyper-parameters that are not plain values are not saved in checkpoints: {', '.join(left_out)}.")
    return plain_values


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(part) for pair in value.items() for part in pair)
    if isinstance(value, (list, tuple, set)):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str, bytes, torch.Tensor, torch.dtype, torch.device)


@contextmanager
def mapped(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let `torch.load` map the file at `path` if possible, so that only the parts that are read take memory."""
    # The kernel reserves memory for a private mapping of a file; a shared mapping avoids this, but needs write access.
    shared = hasattr(mmap, "MAP_SHARED") and os.access(path, os.W_OK)
    flags = {"load.mmap_flags": mmap.MAP_SHARED} if shared else {}
    patched = config.patch({"load.mmap": True, **flags})  # type: ignore[attr-defined]
    with patched if _is_zip(path) else nullcontext():
        yield


def load(path: str | os.PathLike[str], weights_only: bool = True, whole: bool = True) -> dict[str, Any]:
    """Read a checkpoint; client states, which may be large, stay in the file until they are copied.

    Args:
        path: file of the checkpoint.
        weights_only: False to read objects of any class, whose code then runs.
        whole: False to leave out frozen weights that are in another file.

    Raises:
        UserError: the file does not exist, is damaged, is not a checkpoint, contains such objects, or a run of another format.
    """
    path = Path(path)
    if not os.path.isfile(path):
        raise MissingFileError(f"Checkpoint file not found: {path}{_alternatives(path)}; allowed: a file, last, best.")
    try:
        path.open("rb").close()
    except OSError as error:
        raise UserError(f"the checkpoint {path} cannot be read ({error.strerror}){_alternatives(path)}.") from error
    try:
        _require_whole(path)
        with mapped(path):
            checkpoint = torch.load(path, map_location="cpu", weights_only=weights_only)
    except UserError:
        raise
    except Exception as error:  # torch and pickle raise any type of error here
        if isinstance(error, UnpicklingError) and (classes := _other_classes(path)):
            raise UserError(
                f"the checkpoint {path} contains an object of class {classes[0]}: if you trust the file, whose objects can run "
                "any code, give weights_only=False to the trainer's method."
            ) from error
        message = str(error).strip()
        # torch reads any file but a zip file as a pickle, and its errors then explain nothing.
        reason = f" ({message.partition('. ')[0].splitlines()[0]})" if message and _is_zip(path) else ""
        raise UserError(
            f"the checkpoint {path} cannot be read: it is truncated, damaged or not a checkpoint{reason}{_alternatives(path)}."
        ) from error
    is_lightning = isinstance(checkpoint, dict) and "state_dict" in checkpoint
    require(is_lightning, f"the file {path} is not a Lightning checkpoint: it has no state_dict.")
    _require_format(checkpoint, path)
    run = checkpoint.get("federation", {}).get("run", {})
    client_states = {name: run.pop(name) for name in ("clients", "client_memory") if name in run}
    checkpoint = _copied(checkpoint)
    run.update(client_states)
    return frozen_weights.completed(checkpoint, path) if whole else checkpoint


def _require_whole(path: Path) -> None:
    """Compare each part of a zip file with its checksum, because torch does not, and a flipped bit would go into the model.

    Raises:
        UserError: a part is damaged.
    """
    if _is_zip(path):
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        require(
            damaged is None,
            f"the checkpoint {path} is damaged: its part {damaged} is not what was written{_alternatives(path)}.",
        )


def _require_format(checkpoint: dict[str, Any], path: Path) -> None:
    """Raise `UserError` if a checkpoint has a run that an earlier or a later version has written."""
    found = checkpoint.get("federation", {}).get("format", FORMAT)
    age, remedy = (
        ("an earlier", "use the version that wrote it") if found < FORMAT else ("a later", "update lightning-fl")
    )
    require(
        found == FORMAT,
        f"the checkpoint {path} was written by {age} version of lightning-fl (format {found}; this "
        f"one reads {FORMAT}): {remedy}.",
    )


def _is_zip(path: str | os.PathLike[str]) -> bool:
    """True if the file is a zip file, which `torch.save` writes, however damaged."""
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:
        return True


def _other_classes(path: Path) -> list[str]:
    """Return the classes and functions in a checkpoint that torch does not read with `weights_only=True`, by name."""
    with suppress(Exception):  # a damaged file raises any type of error here too
        return get_unsafe_globals_in_checkpoint(path) if _is_zip(path) else []
    return []


def _copied(node: Any) -> Any:
    """Return `node` with its tensors copied, in place in the containers that allow it."""
    if isinstance(node, torch.Tensor):
        return node.clone()
    if isinstance(node, tuple):
        return type(node)(*map(_copied, node)) if hasattr(node, "_fields") else type(node)(map(_copied, node))
    if isinstance(node, (dict, list)):
        for key, part in node.items() if isinstance(node, dict) else enumerate(node):
            node[key] = _copied(part)
    return node


def federation_of(checkpoint: dict[str, Any], path: str | os.PathLike[str], algorithm: str) -> dict[str, Any]:
    """Return the run in a checkpoint.

    Raises:
        UserError: the checkpoint is from an ordinary Trainer, or from another algorithm.
    """
    require(
        "federation" in checkpoint,
        f"the checkpoint {path} contains a model but no federation to resume: use it with validate, test or predict, "
        "or resume from checkpoints/last.ckpt of a run.",
    )
    federation: dict[str, Any] = checkpoint["federation"]
    require(
        federation["algorithm"] == algorithm,
        f"the checkpoint {path} was written by {federation['algorithm']}, but this run's algorithm is {algorithm}: "
        f"resume with --algorithm {federation['algorithm']} or start a new run in another folder.",
    )
    return federation


def _alternatives(path: Path) -> str:
    others = sorted(other.name for other in path.parent.glob("*.ckpt") if other != path)
    return f"; other checkpoints there: {', '.join(others)}" if others else ""

"""Checkpoints: written aside and renamed, so that a kill at any moment leaves a whole one; refused when they do not fit.

A checkpoint is an ordinary Lightning checkpoint (`state_dict`, `hyper_parameters`, callback states …) with one key more,
`federation`, that holds the run. `load_from_checkpoint` of the module's class reads either kind.
"""

from __future__ import annotations

import mmap
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.serialization import config

from lightning_fl.errors import UserError

FORMAT = 1


def save_atomically(checkpoint: dict[str, Any], path: str | os.PathLike[str], keep_previous: bool = False) -> None:
    """Write `checkpoint` to `path` so that `path` is at every moment either the old file or the new one, whole.

    Args:
        checkpoint: what `torch.save` takes.
        path: where; missing folders are made.
        keep_previous: keep the file that `path` was before as `previous.ckpt` beside it.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.writing")
    with open(aside, "wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    if keep_previous and path.exists():
        # A second name for the old file, so that `path` itself is never missing.
        linked = path.with_name(".previous.linking")
        linked.unlink(missing_ok=True)
        os.link(path, linked)
        os.replace(linked, path.with_name("previous.ckpt"))
    os.replace(aside, path)


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """Hyper-parameters without those that `torch.load(weights_only=True)` could not read, which are named in a warning."""
    kept = {name: value for name, value in values.items() if _is_plain(value)}
    if left_out := sorted(values.keys() - kept.keys()):
        rank_zero_warn(
            f"hyper-parameters that are no plain values are not saved in checkpoints: {', '.join(left_out)}."
        )
    return kept


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(part) for pair in value.items() for part in pair)
    if isinstance(value, (list, tuple, set)):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str, bytes, torch.Tensor, torch.dtype, torch.device)


@contextmanager
def mapped(path: str | os.PathLike[str]) -> Iterator[None]:
    """Inside, `torch.load` maps the file at `path` where it can, so that only what is looked at takes memory."""
    # The kernel would set memory aside for a private mapping of a file, but a shared one must be opened for writing.
    shared = hasattr(mmap, "MAP_SHARED") and os.access(path, os.W_OK)
    flags = {"load.mmap_flags": mmap.MAP_SHARED} if shared else {}
    patched = config.patch({"load.mmap": True, **flags})  # type: ignore[attr-defined]
    with patched if zipfile.is_zipfile(path) else nullcontext():
        yield


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a checkpoint with `weights_only=True`; what clients keep, which may be large, stays in the file, to be copied.

    Raises:
        UserError: there is none, or it is truncated or no checkpoint at all.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no checkpoint at {path}{_alternatives(path)}; allowed: a file, last, best.")
    try:
        with mapped(path):
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch and pickle raise anything on what is no checkpoint
        said = str(error).strip()
        # Of what is no zip file torch tries to make a pickle, and its errors say nothing.
        reason = f" ({said.partition('. ')[0].splitlines()[0]})" if said and zipfile.is_zipfile(path) else ""
        raise UserError(
            f"the checkpoint {path} cannot be read, it is truncated or no checkpoint{reason}{_alternatives(path)}."
        ) from error
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise UserError(f"the file {path} is no Lightning checkpoint: it has no state_dict.")
    run = checkpoint.get("federation", {}).get("run", {})
    left = {name: run.pop(name) for name in ("clients", "client_memory") if name in run}
    checkpoint = _copied(checkpoint)
    run.update(left)
    return checkpoint


def _copied(node: Any) -> Any:
    """`node` with its tensors copied, in place in the containers that allow it."""
    if isinstance(node, torch.Tensor):
        return node.clone()
    if isinstance(node, tuple):
        return type(node)(*map(_copied, node)) if hasattr(node, "_fields") else type(node)(map(_copied, node))
    if isinstance(node, (dict, list)):
        for key, part in node.items() if isinstance(node, dict) else enumerate(node):
            node[key] = _copied(part)
    return node


def federation_of(checkpoint: dict[str, Any], path: str | os.PathLike[str], algorithm: str) -> dict[str, Any]:
    """The run in a checkpoint.

    Raises:
        UserError: the checkpoint is of an ordinary Trainer, of a later format, or of another algorithm.
    """
    if "federation" not in checkpoint:
        raise UserError(
            f"the checkpoint {path} holds a model but no federation to resume: give it to validate, test or predict, "
            "or resume from checkpoints/last.ckpt of a run."
        )
    federation: dict[str, Any] = checkpoint["federation"]
    if federation["format"] > FORMAT:
        raise UserError(
            f"the checkpoint {path} has format {federation['format']}, this version of lightning-fl reads up to {FORMAT}: "
            "update lightning-fl."
        )
    if federation["algorithm"] != algorithm:
        raise UserError(
            f"the checkpoint {path} was written by {federation['algorithm']}, this run's algorithm is {algorithm}: "
            f"resume with --algorithm {federation['algorithm']} or start a new run in another folder."
        )
    return federation


def _alternatives(path: Path) -> str:
    folder = path.parent if path.parent.is_dir() else None
    others = sorted(p.name for p in folder.glob("*.ckpt") if p != path) if folder else []
    return f"; beside it: {', '.join(others)}" if others else ""

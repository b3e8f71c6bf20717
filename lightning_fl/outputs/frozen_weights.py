"""Frozen weights of `last.ckpt`: in a file beside it that a run writes once, because no client trains them.

`checkpoints/frozen/CHECKSUM.pt` has the parameters that need no gradient, which a checkpoint refers to by their checksums. A
run compares the parameters with these checksums for every checkpoint, because a module or callback may still change them, as a
teacher that follows by a moving average does. Changed parameters go to a new file. `lightning_fl.state.saved_frozen` writes the
files.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fl.errors import UserError
from lightning_fl.outputs.tensor_bytes import checksum

FOLDER = "frozen"
KEY = "frozen"
"""Key of the reference under `federation` in a checkpoint."""
LEAST_BYTES = 2**20
"""Bytes of frozen parameters from which they have a file of their own; fewer stay in the checkpoint."""


def frozen_names(module: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that need no gradient, if they have at least `LEAST_BYTES`; tied ones have several."""
    names = {name for name, _ in _frozen(module, remove_duplicate=False)}
    return frozenset(names) if frozen_bytes(module) else frozenset()


def frozen_bytes(module: nn.Module) -> int:
    """Return the bytes of the parameters that need no gradient; 0 if they stay in the checkpoint."""
    size = sum(parameter.nbytes for _, parameter in _frozen(module))
    return size if size >= LEAST_BYTES else 0


def _frozen(module: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in module.named_parameters(remove_duplicate=remove_duplicate):
        if not parameter.requires_grad and type(parameter) is nn.Parameter:
            yield name, parameter


def reference_to(frozen: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Any]:
    """Return the reference to frozen weights, of a checkpoint whose `state_dict` has these names in this order."""
    checksums = _checksums(frozen)
    digest = hashlib.sha256(repr(sorted(checksums.items())).encode()).hexdigest()
    return {"file": f"{FOLDER}/{digest[:16]}.pt", "names": list(names), "checksums": checksums}


def file_of(checkpoint: Mapping[str, Any]) -> str | None:
    """Return the path of the frozen weights of a checkpoint, relative to its folder; None if it has them itself."""
    reference = checkpoint.get("federation", {}).get(KEY)
    return None if reference is None else str(reference["file"])


def completed(checkpoint: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the checkpoint at a path with its frozen weights in its `state_dict`, in the module's order.

    Raises:
        UserError: their file is missing, damaged, or of another run.
    """
    federation = checkpoint.get("federation", {})
    if KEY not in federation:
        return checkpoint
    reference, own = federation[KEY], checkpoint["state_dict"]
    entries = own | read(reference, path)
    ordered = {name: entries[name] for name in reference["names"] if name in entries}
    rest = {key: value for key, value in federation.items() if key != KEY}
    return checkpoint | {"state_dict": ordered, "federation": rest}


def read(reference: Mapping[str, Any], checkpoint: Path) -> dict[str, Tensor]:
    """Return the frozen weights to which a checkpoint refers.

    Raises:
        UserError: their file is missing, damaged, or of another run.
    """
    path = checkpoint.parent / str(reference["file"])
    advice = "copy the folder of the checkpoints as a whole, use another checkpoint, or begin a new run."
    what = f"the file {path} with the frozen weights of the checkpoint {checkpoint}"
    if not path.is_file():
        raise UserError(f"{what} is missing: {advice}")
    try:
        frozen = torch.load(path, map_location="cpu", weights_only=True)
        found = _checksums(frozen)
    except Exception as error:  # torch and pickle raise any type of error here
        raise UserError(f"{what} cannot be read, because it is truncated, damaged or no such file: {advice}") from error
    if found != reference["checksums"]:
        raise UserError(f"{what} has other weights, because it is damaged or belongs to another run: {advice}")
    return frozen


def _checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the checksum of each tensor with its dtype and shape; tied ones are read once."""
    known: dict[tuple[Any, ...], int] = {}
    for tensor in tensors.values():
        if _place(tensor) not in known:
            known[_place(tensor)] = checksum(tensor)
    return {
        name: zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), known[_place(tensor)])
        for name, tensor in tensors.items()
    }


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()

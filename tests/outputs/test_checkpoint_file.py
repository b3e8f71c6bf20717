"""Test files of checkpoints: a damaged one is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_fl import UserError
from lightning_fl.outputs import checkpoint_file

CHECKPOINT: dict[str, Any] = {
    "state_dict": {"weight": torch.arange(12.0).view(3, 4), "bias": torch.ones(3, dtype=torch.float64)},
    "epoch": 7,
    "federation": {
        "format": checkpoint_file.FORMAT,
        "run": {"names": ["weight", "bias"], "round": 7, "mask": torch.arange(9) > 4},
    },
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "last.ckpt"
    checkpoint_file.save_atomically(CHECKPOINT, path)
    return path


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


@settings(max_examples=400)
@example(0.0, 0)
@example(1.0, 7)
@given(st.floats(0, 1), st.integers(0, 7))
@pytest.mark.matrix
def test_a_flipped_bit_is_noticed_or_changes_nothing(path: Path, where: float, bit: int) -> None:
    """Check all bits of a file: data, checksums, names, and the fields of a zip file that nobody reads, such as dates."""
    content = bytearray(path.read_bytes())
    content[min(int(where * len(content)), len(content) - 1)] ^= 1 << bit
    damaged = path.with_name("damaged.ckpt")
    damaged.write_bytes(content)
    refusal, loaded = "", CHECKPOINT
    try:
        loaded = checkpoint_file.load(damaged)
    except UserError as error:
        refusal = str(error)
    assert same(loaded, CHECKPOINT)
    assert not refusal or "other checkpoints there: last.ckpt" in refusal


def test_a_part_that_reads_as_a_folder_is_noticed(path: Path) -> None:
    """Check an attribute in the zip file's directory, which no checksum covers, and for which torch reads an empty part."""
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + 38] ^= 0x10
    damaged = path.with_name("damaged.ckpt")
    damaged.write_bytes(content)
    with pytest.raises(UserError, match=r"cannot be read: it is truncated, damaged or not a checkpoint"):
        checkpoint_file.load(damaged)

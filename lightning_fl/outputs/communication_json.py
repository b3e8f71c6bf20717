"""`communication.json`: bits that a run has sent so far, by direction and kind, next to its metrics.csv."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from lightning_fl.outputs.files import replacing
from lightning_fl.outputs.run_folder import COMMUNICATION

Bits = dict[str, dict[str, int]]
"""Bits by direction (`up`, `down`) and kind."""
KEYS = {"up": "uplink_bits", "down": "downlink_bits"}


def write_communication(root: str | os.PathLike[str], num_rounds: int, bits: Mapping[str, Mapping[str, int]]) -> None:
    """Write the file so that it is always either the complete old one or the complete new one.

    Args:
        root: folder of the run.
        num_rounds: number of rounds done.
        bits: bits of all clients in these rounds and the set-up before them, by direction and kind.
    """
    content = {"rounds": num_rounds, **{key: dict(bits[direction]) for direction, key in KEYS.items()}}
    with replacing(Path(root, COMMUNICATION), "w", sync=False) as file:
        file.write(json.dumps(content, indent=1) + "\n")


def read_communication(root: str | os.PathLike[str]) -> Bits | None:
    """Return the bits of a run by direction and kind; None if there is no file.

    Raises:
        ValueError: the file does not contain them.
    """
    path = Path(root, COMMUNICATION)
    if not path.is_file():
        return None
    content = json.loads(path.read_text())
    try:
        return {direction: {str(k): int(n) for k, n in content[key].items()} for direction, key in KEYS.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} lacks {error}") from error

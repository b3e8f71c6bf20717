"""`communication.json`, next to a run's metrics.csv: bits sent so far by direction and kind, and the metric the run is about."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_fl.checks import LARGEST
from lightning_fl.outputs.files import replacing
from lightning_fl.outputs.run_folder import COMMUNICATION

Bits = dict[str, dict[str, int]]
"""Bits by direction (`up`, `down`) and kind."""
KEYS = {"up": "uplink_bits", "down": "downlink_bits"}


def write_communication(
    root: str | os.PathLike[str],
    num_rounds: int,
    bits: Mapping[str, Mapping[str, int]],
    metric: Mapping[str, str] | None = None,
) -> None:
    """Write the file so that it is always either the complete old one or the complete new one.

    Args:
        root: folder of the run.
        num_rounds: number of rounds done.
        bits: bits of all clients in these rounds and the set-up before them, by direction and kind.
        metric: name and mode (`max` or `min`) of the metric that the run is about, for reports; None if it has none.
    """
    content: dict[str, Any] = {"rounds": num_rounds, **{key: dict(bits[way]) for way, key in KEYS.items()}}
    if metric is not None:
        content["metric"] = dict(metric)
    with replacing(Path(root, COMMUNICATION), "w", sync=False) as file:
        file.write(json.dumps(content, indent=1) + "\n")


def read_communication(root: str | os.PathLike[str]) -> Bits | None:
    """Return the bits of a run by direction and kind; None if there is no file.

    Raises:
        ValueError: the file does not contain them.
    """
    content = _content(root)
    if content is None:
        return None
    try:
        bits = {way: {str(kind): int(n) for kind, n in content[key].items()} for way, key in KEYS.items()}
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{Path(root, COMMUNICATION)} has no bits by direction and kind: {error}") from error
    if not all(0 <= n <= LARGEST for by_kind in bits.values() for n in by_kind.values()):
        raise ValueError(f"{Path(root, COMMUNICATION)}: bits are numbers from 0 on")
    return bits


def read_metric(root: str | os.PathLike[str]) -> dict[str, str] | None:
    """Return name and mode of the metric that a run is about; None if no file says it."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        metric = (_content(root) or {})["metric"]
        if metric["mode"] in ("max", "min"):
            return {key: str(metric[key]) for key in ("name", "mode")}
    return None


def _content(root: str | os.PathLike[str]) -> Any:
    """Return the content of the file; None if there is none.

    Raises:
        ValueError: it is not JSON.
    """
    path = Path(root, COMMUNICATION)
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deep") from error

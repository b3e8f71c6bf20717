"""Record what random runs leave behind, and tell whether another version leaves the same, bit for bit.

    python benchmarks/same_runs.py record before.json --runs 200   # with one version
    python benchmarks/same_runs.py compare before.json             # with another, on the same machine

`record` draws configurations as `torture.py` does and keeps, of each, how it ended: the sentence that refuses it, or the rows of
metrics.csv without times, the bits of communication.json, and checksums of the model and of all tensors of the run in last.ckpt.
Every fifth run is stopped after two rounds and resumed; with `--processes`, every twentieth is trained by two processes.
`compare` trains the same configurations and prints what differs; it exits with 1 if anything does.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from trials.commands import Command, rows, run_anew
from trials.configurations import draw, write_images

IMAGES = "IMAGES"
"""Stands for the path of the images in kept flags."""
RESUMED_EVERY, PROCESSES_EVERY = 5, 20


def main() -> None:
    """Record or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--runs", type=int, default=200, help="number of completed runs to record")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", action="store_true", help="train some of them by two processes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with _folder() as folder:
        if options.action == "record":
            kept: list[dict[str, Any]] = []
            ended: Counter[str] = Counter()
            for run in _drawn(options.seed, options.processes):
                kept.append({**run, "left": _train(run, folder / "run")})
                ended[kept[-1]["left"]["ended"]] += 1
                if ended["completed"] == options.runs:
                    break
            options.file.write_text(json.dumps(kept, indent=0))
            print(", ".join(f"{number} {how}" for how, number in ended.items()))
            return
        recorded = json.loads(options.file.read_text())
        differing = 0
        for number, run in enumerate(recorded):
            differences = list(_differences(run["left"], _train(run, folder / "run")))
            if differences:
                differing += 1
                print(f"run {number}: {'; '.join(differences)}\n    {shlex.join(run['flags'])}", flush=True)
    print(f"{differing} of {len(recorded)} runs differ")
    sys.exit(differing > 0)


@contextmanager
def _folder() -> Iterator[Path]:
    """Make a folder that always has the same path, since the noise of private runs follows from all settings, paths too."""
    path = Path(tempfile.gettempdir(), "lightning_fl_same_runs")
    path.mkdir()  # another process that compares must end first
    try:
        yield path
    finally:
        shutil.rmtree(path)


def _drawn(seed: int, processes: bool) -> Iterator[dict[str, Any]]:
    """Yield flags, and whether the run is resumed and trained by two processes."""
    for number in count():
        flags = draw(np.random.default_rng((seed, number)), Path(IMAGES))
        yield {
            "flags": flags,
            "is_resumed": number % RESUMED_EVERY == 0,
            "by_two": processes and number % PROCESSES_EVERY == 1,
        }


def _train(run: dict[str, Any], root: Path) -> dict[str, Any]:
    """Train a run, and return what it leaves."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    write_images(root / "images.npz")
    folder = root / "run"
    flags = [flag.replace(IMAGES, str(root / "images.npz")) for flag in run["flags"]]
    command = ["fit", *flags, f"--trainer.default_root_dir={folder}"]
    if run["by_two"]:
        process = run_anew([*command, "--trainer.devices=2"], root / "output")
        ended = "completed" if process.wait() == 0 else "refused"
    elif run["is_resumed"]:
        ended = Command.start([*command, "--trainer.max_rounds=2"], root / "output").end()
        if ended == "completed":
            ended = Command.start([*command, "--ckpt_path=last"], root / "output").end()
    else:
        ended = Command.start(command, root / "output").end()
    if ended != "completed":
        said = (root / "output" / "stderr").read_text(errors="replace").splitlines()
        sentences = [line for line in said if line.startswith("lightning-fl")]
        # Some sentences of other packages name the elements of a set, in any order.
        words = sorted(word.strip(".,") for word in " ".join(sentences).replace(str(root), "").split())
        return {"ended": ended, "sentence": " ".join(words)}
    bits, weights, last = folder / "communication.json", folder / "model.ckpt", folder / "checkpoints" / "last.ckpt"
    return {
        "ended": ended,
        "rows": rows(folder / "metrics.csv"),
        "bits": json.loads(bits.read_text()) if bits.is_file() else None,
        "model": _checksum(torch.load(weights, weights_only=True)["state_dict"]) if weights.is_file() else None,
        "run": _checksum(torch.load(last, weights_only=True)["federation"]["run"]) if last.is_file() else None,
    }


def _checksum(content: Any) -> str:
    """Return a checksum of all tensors in a nested object, wherever they are in it."""
    sums = sorted(sha256(_as_bytes(tensor)).hexdigest() for tensor in _tensors(content))
    return sha256("".join(sums).encode()).hexdigest()[:16]


def _as_bytes(tensor: torch.Tensor) -> bytes:
    return (
        f"{tensor.dtype}{tuple(tensor.shape)}".encode()
        + tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    )


def _tensors(content: Any) -> Iterator[torch.Tensor]:
    if isinstance(content, torch.Tensor):
        yield content
    elif isinstance(content, dict):
        for value in content.values():
            yield from _tensors(value)
    elif isinstance(content, (list, tuple)):
        for value in content:
            yield from _tensors(value)


def _differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if name == "rows" and old and new and len(old) == len(new):
            columns = {
                column
                for a, b in zip(old, new, strict=True)
                for column in a.keys() | b.keys()
                if a.get(column) != b.get(column)
            }
            if columns:
                yield f"columns {', '.join(sorted(columns))}"
        elif old != new:
            yield f"{name} {old if len(str(old)) < 300 else '…'} -> {new if len(str(new)) < 300 else '…'}"


if __name__ == "__main__":
    main()

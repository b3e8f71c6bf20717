"""Searches of a study with programs that stand for fits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_fl import UserError
from lightning_fl.study.runner import train_all
from lightning_fl.study.searches import Searches, open_searches
from lightning_fl.study.study_file import read_study

FIT = """
import math, os, pathlib, sys, time
flags = dict(word[2:].split("=", 1) for word in sys.argv[2:] if word.startswith("--"))
folder = pathlib.Path(flags["trainer.default_root_dir"])
with (folder / "calls.txt").open("a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
rate, mu = float(flags["model.learning_rate"]), float(flags.get("algorithm.mu", 0))
if rate > 0.5:
    sys.exit("lightning-fl: error: it diverges.")
rows = "round,val/accuracy,comm/total_uplink_bytes,comm/total_downlink_bytes,time/round_seconds\\n"
for round in range(int(flags.get("trainer.max_rounds", 10))):
    # a larger rate is better until late, and 0.1 in the end
    value = round / 20 * (1 - abs(math.log10(rate) + 1) / 4 - mu / 10) + (rate if round < 6 else 0)
    rows += f"{round},{value},{100 * (round + 1)},0,0.25\\n"
    if 100 * (round + 1) >= float(flags.get("trainer.callbacks.max_uplink_bytes", "inf")):
        break
(folder / "metrics.csv").write_text(rows)
while (folder.parent / "wait").exists():
    time.sleep(0.01)
"""
"""Fit of ten rounds, each of 100 uplink bytes and a quarter of a second, whose accuracy depends on its flags."""
RATE = {"model.learning_rate": {"low": 0.001, "high": 0.4, "log": True}}
MU = {"algorithm.mu": {"low": 0.0, "high": 1.0}}
GRID = {"method": {"FedAvg": [], "FedProx": ["--algorithm=FedProx"]}}


def resolve(words: Sequence[str]) -> dict[str, Any]:
    """Return a configuration of these arguments, as the command line would: FedProx alone has a mu."""
    flags = dict(word.removeprefix("--").split("=", 1) for word in words)
    method = flags.get("algorithm", "FedAvg")
    if "algorithm.mu" in flags and method == "FedAvg":
        raise UserError("FedAvg has no parameter 'mu'; allowed: none.")
    rate = float(flags.get("model.learning_rate", 0.03))
    if rate > 1:
        raise UserError(f"learning_rate must lie in (0, 1], got {rate}.")
    mu = {"mu": float(flags.get("algorithm.mu", 0.5))} if method == "FedProx" else {}
    return {
        "trainer": {"max_rounds": int(flags.get("trainer.max_rounds", 10))},
        "model": {
            "class_path": "lightning_fl.modules.ImageClassifier",
            "init_args": {"learning_rate": rate, "momentum": None},
        },
        "algorithm": {"class_path": method, "init_args": mu},
        "data": {"class_path": "Digits", "init_args": {"val_fraction": float(flags.get("data.val_fraction", 0.1))}},
    }


def opened(folder: Path, **content: Any) -> Searches:
    """Return the searches of a study in a folder, as a process finds them."""
    search = {"trials": 6, "budget": 850, "flags": RATE, "own_flags": {"FedProx": MU}, **content.pop("search", {})}
    search = {key: value for key, value in search.items() if value is not None}
    path = folder / "study.yaml"
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(yaml.safe_dump({"seeds": [0, 1], "grid": GRID, "search": search, **content}, sort_keys=False))
    return open_searches(read_study(path), folder / "out", resolve)


def trained(searches: Searches, jobs: int = 1) -> Searches:
    """Train the trials of all searches."""
    train_all(searches, jobs, 1, 0, "", searches.num_rounds)
    return searches

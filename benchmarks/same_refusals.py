"""Record which features, methods and callbacks refuse each other, and tell whether another version refuses the same.

    python benchmarks/same_refusals.py record before.json    # with one version: some 4,500 fits of one round
    python benchmarks/same_refusals.py compare before.json   # with another

`--every 10`, given to both, fits every tenth cell alone.

A cell is a method with a feature, a method with a callback, a feature with a callback, or two features; each is fitted for one
round. Kept is the sentence that refuses it, the name of any other error, or "" if it trains. `compare` prints the cells that
differ, and exits with 1 if there are any.

The sentences that tests provoke are kept by a plug-in of pytest:

    PYTHONPATH=benchmarks REFUSALS=before python -m pytest -p trials.refusals    # writes the folder `before`
    PYTHONPATH=benchmarks REFUSALS=after python -m pytest -p trials.refusals
    diff <(cat before/* | sort -u) <(cat after/* | sort -u)
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import combinations, islice, product
from pathlib import Path
from typing import Any

import torch
from trials.configurations import write_images

from lightning_fl import FederatedTrainer
from lightning_fl.cli.class_names import classes_under
from lightning_fl.data import Arrays
from lightning_fl.errors import UserError
from lightning_fl.features.attacks import Adversary, SignFlip
from lightning_fl.features.clock import SimulatedClock
from lightning_fl.features.loss_guard import LossGuard
from lightning_fl.features.privacy import AdaptiveClip, ClientPrivacy, LocalPrivacy
from lightning_fl.features.secure_aggregation import SecureAggregation
from lightning_fl.modules import ImageClassifier

SLOW = SimulatedClock(computation_seconds=1.0, uplink_sigma=0.5)
FEATURES: dict[str, dict[str, Any]] = {
    "ClientPrivacy": {"privacy": ClientPrivacy(clip=1.0, noise_multiplier=1.0)},
    "ClientPrivacy, drop": {"privacy": ClientPrivacy(clip=1.0, noise_multiplier=1.0, side_channels="drop")},
    "ClientPrivacy, keep": {"privacy": ClientPrivacy(clip=1.0, noise_multiplier=1.0, buffers="keep")},
    "ClientPrivacy, tree": {
        "privacy": ClientPrivacy(clip=1.0, noise_multiplier=1.0, sampling="passes", mechanism="tree")
    },
    "AdaptiveClip": {"privacy": ClientPrivacy(clip=AdaptiveClip(), noise_multiplier=0.3)},
    "LocalPrivacy": {"privacy": LocalPrivacy(clip=1.0, noise_multiplier=1.0)},
    "SecureAggregation": {"secure_aggregation": SecureAggregation()},
    "Adversary": {"adversary": Adversary(SignFlip(), 0.5)},
    "LossGuard.clients": {"loss_guard": LossGuard(clients=100.0)},
    "LossGuard.server_steps": {"loss_guard": LossGuard(server_steps=100.0)},
    "LossGuard.rounds": {"loss_guard": LossGuard(rounds=100.0)},
    "clock": {"clock": SLOW},
    "deadline": {"deadline": 1e6, "clock": SLOW},
    "over_selection": {"over_selection": 1.3, "clients_per_round": 3, "clock": SLOW},
    "dropout": {"dropout_rate": 0.3},
    "stragglers": {"straggler_rate": 0.3},
    "client_states": {"client_states": "disk"},
    "serial": {"runner": "serial"},
    "stacked": {"runner": "stacked"},
    "lightning": {"runner": "lightning"},
    "max_steps": {"max_steps": 3},
    "local_steps": {"local_steps": 1, "local_epochs": None},
    "accumulate": {"accumulate_grad_batches": 2},
    "gradient_clip_val": {"gradient_clip_val": 0.5},
    "client_optimizer": {"client_optimizer": "sgd"},
    "bf16": {"precision": "bf16-true"},
    "test_every_n_rounds": {"test_every_n_rounds": 1},
    "limit_train_batches": {"limit_train_batches": 1},
    "no checkpoints": {"enable_checkpointing": False},
}
"""Flags of the trainer that bring a feature."""
METHODS: dict[str, dict[str, Any]] = {
    "FedKT": {"epochs": 1},
    "FedLDF": {"n": 2},
    "HDFL": {"n": 2},
    "PFedMe": {"strength": 1.0},
    "RandomLayers": {"n": 2},
    "PruneFL": {"initial_passes": 2},
}
"""Parameters of methods whose defaults train for long, or do not fit the data."""
CALLBACKS: dict[str, dict[str, Any]] = {
    "EarlyStopping": {"monitor": "val/loss"},
    "EnergyMeter": {"profile": "wifi"},
    "GradientAccumulationScheduler": {"scheduling": {0: 2}},
    "OnExceptionCheckpoint": {"dirpath": "."},
    "StochasticWeightAveraging": {"swa_lrs": 0.05},
    "TargetReached": {"target": 0.99},
    "ThroughputMonitor": {"batch_size_fn": len},
    "MagnitudePruning": {"every_n_epochs": 1},
}
"""Parameters of callbacks that have no default, or whose default does nothing in one round."""
NEED_MORE = ("BackboneFinetuning", "BaseFinetuning", "TQDMProgressBar", "RichProgressBar")
"""Callbacks that need a module of their own, or only draw."""


def main() -> None:
    """Record or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--every", type=int, default=1, help="fit a sample: one of so many cells")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    recorded = json.loads(options.file.read_text()) if options.action == "compare" else None
    file = options.file.absolute()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        write_images(Path("images.npz"))
        found = {cell: _refusal(*parts) for cell, parts in islice(_cells(), 0, None, options.every)}
    if recorded is None:
        file.write_text(json.dumps(found, indent=0))
        ends = Counter(
            "trained" if not said else "failed" if said.startswith("!") else "refused" for said in found.values()
        )
        print(", ".join(f"{number} {how}" for how, number in ends.items()))
        return
    differing = [cell for cell in sorted(recorded.keys() | found.keys()) if recorded.get(cell) != found.get(cell)]
    for cell in differing:
        print(f"{cell}: {recorded.get(cell)!r} -> {found.get(cell)!r}")
    print(f"{len(differing)} of {len(found)} cells differ")
    sys.exit(bool(differing))


def _cells() -> Iterator[tuple[str, tuple[Mapping[str, Any], str, str | None]]]:
    """Yield names of cells, and flags of the trainer, name of the method, name of the callback."""
    methods = [name for name in classes_under("algorithm") if name != "Algorithm"]
    callbacks = [name for name in classes_under("callbacks") if name not in NEED_MORE]
    for method, (feature, flags) in product(methods, FEATURES.items()):
        yield f"{method} x {feature}", (flags, method, None)
    for method, callback in product(methods, callbacks):
        yield f"{method} x {callback}", ({}, method, callback)
    for (feature, flags), callback in product(FEATURES.items(), callbacks):
        yield f"{feature} x {callback}", (flags, "FedAvg", callback)
    for (first, flags), (second, others) in combinations(FEATURES.items(), 2):
        if not flags.keys() & others.keys() - {"clients_per_round", "clock"}:
            yield f"{first} x {second}", (flags | others, "FedAvg", None)


def _refusal(flags: Mapping[str, Any], method: str, callback: str | None) -> str:
    """Fit for one round; return the sentence that refuses it, "!" and the name of another error, or "" if it trains."""
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "default_root_dir": "run",
    }
    callbacks = [] if callback is None else [classes_under("callbacks")[callback](**CALLBACKS.get(callback, {}))]
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            torch.manual_seed(0)
            trainer = FederatedTrainer(
                **({"max_rounds": 1, "clients_per_round": 4, "local_epochs": 2, "callbacks": callbacks} | quiet | flags)
            )
            held_out = 0.0 if "privacy" in flags else 0.2
            shares = {"server_fraction": 0.15, "client_fraction": 0.85, "val_fraction": held_out}
            data = Arrays("images.npz", num_clients=5, batch_size=8, **shares)
            algorithm = {"class_path": method, "init_args": METHODS.get(method, {})}
            trainer.fit(
                ImageClassifier("lenet5", num_classes=4, in_channels=1, image_size=16), data, algorithm, verbose=False
            )
    except UserError as error:
        return str(error).replace(os.getcwd(), "")
    except Exception as error:
        return f"!{type(error).__name__}: {error}"[:300]
    finally:
        for path in sorted(Path("run").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    return ""


if __name__ == "__main__":
    main()

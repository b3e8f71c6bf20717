"""Run Lightning's own tests with a FederatedTrainer of one client in the place of Lightning's trainer.

    python benchmarks/lightning_suite.py PATH [TEST…]

PATH is `tests/tests_pytorch` of Lightning's public repository, at the tag of the installed version or the nearest one. Needs
`pytest-timeout`, `pytest-rerunfailures` and `tensorboard` besides the package. The tests run twice, with the stock trainer and
with ours; what the stock trainer fails on this machine does not count. `lightning_suite.csv` beside this file keeps the reason
for each test that ours does not pass; the program prints counts by folder, tests that fail without a reason in it, and tests
that are listed but pass.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from inspect import signature
from pathlib import Path
from typing import Any

SETS = (
    "trainer/logging_",
    "callbacks",
    "models/test_hooks.py",
    "models/test_restore.py",
    "loggers",
    "core",
    "checkpointing",
    "trainer/optimization",
    "trainer/test_dataloaders.py",
)
LEFT_OUT = "not ddp and not spawn and not cuda and not gpu"
"""Expression of the tests to run: those for one process without a GPU."""
KEPT = Path(__file__).with_suffix(".csv")
RESULTS = "LIGHTNING_SUITE_RESULTS"
"""Environment variable with the file that gets the outcomes; the tests run with our trainer if it ends in `.federated`."""


def main() -> None:
    """Run the tests, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="tests/tests_pytorch of Lightning's repository")
    parser.add_argument("tests", nargs="*", default=SETS, help="folders and files below it; the suite's if not given")
    parser.add_argument(
        "--stock", type=Path, help="outcomes of the stock trainer: read if the file is there, else written"
    )
    parser.add_argument("--ours", type=Path, help="file to write our outcomes to")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stock = _outcomes(arguments.path, arguments.tests, arguments.stock or Path(folder, "stock.json"), "stock")
        ours = _outcomes(arguments.path, arguments.tests, arguments.ours or Path(folder, "ours.json"), "federated")
    print("\n".join(_report(stock, ours, _reasons())))


def _outcomes(path: Path, tests: list[str], file: Path, kind: str) -> dict[str, str]:
    """Return the first line of the error of each test, "" if it passed; run the tests unless the stock trainer's are there."""
    if kind == "stock" and file.is_file():
        return dict(json.loads(file.read_text()))
    results = file.with_suffix(f".{kind}")
    results.unlink(missing_ok=True)
    root = path.resolve().parents[1]
    paths = [str(root), str(root / "tests"), str(Path(__file__).resolve().parent)]
    environment = os.environ | {RESULTS: str(results.resolve()), "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "pytest", "-p", "lightning_suite", "-p", "no:cacheprovider", "-q", "--tb=no"]
    command += ["--timeout=40", "-W", "ignore", "-k", LEFT_OUT, *[str(path / test) for test in tests]]
    subprocess.run(command, cwd=root, env=environment, check=False, stdout=subprocess.DEVNULL)
    outcomes = dict(map(json.loads, results.read_text().splitlines()))
    file.write_text(json.dumps(outcomes, indent=0))
    return outcomes


def _reasons() -> dict[str, str]:
    """Return the kept reason of each test that ours does not pass."""
    if not KEPT.is_file():
        return {}
    with KEPT.open(newline="", encoding="utf-8") as file:
        return {row["test"]: row["reason"] for row in csv.DictReader(file)}


def _report(stock: Mapping[str, str], ours: Mapping[str, str], reasons: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of the table and the tests whose outcome is not the kept one."""
    counted = [name for name, error in stock.items() if not error]
    passed = {name for name in counted if not ours.get(name, "was not run")}
    yield f"{'tests':32}{'stock':>8}{'federated':>12}"
    folders = Counter(map(_folder, counted))
    for folder, number in sorted(folders.items()):
        yield f"{folder:32}{number:8}{sum(_folder(name) == folder for name in passed):12}"
    yield f"{'all':32}{len(counted):8}{len(passed):12}"
    failed = [name for name in counted if name not in passed]
    for reason, number in Counter(reasons.get(name, "no reason") for name in failed).most_common():
        yield f"{number:5} fail: {reason}"
    for name in failed:
        if name not in reasons:
            yield f"fails without a reason: {name}: {ours.get(name, 'was not run')}"
    for name in reasons:
        if name in passed:
            yield f"listed, but passes: {name}"


def _folder(name: str) -> str:
    """Return the entry of `SETS` that a test belongs to."""
    return next((one for one in SETS if f"/{one}" in name.partition("::")[0]), "others")


# -- as a plug-in of pytest --------------------------------------------------------------------------------------------


def pytest_runtest_logreport(report: Any) -> None:
    """Write the outcome of each test."""
    file = os.environ.get(RESULTS)
    if file is None or (report.when != "call" and not report.failed):
        return
    error = "" if report.passed else (str(report.longreprtext).strip().splitlines() or ["failed"])[-1][:200]
    if report.skipped:
        error = "skipped"
    with Path(file).open("a") as results:
        results.write(json.dumps([report.nodeid, error]) + "\n")


def _replace_trainer() -> None:
    """Make `lightning.pytorch.Trainer` a FederatedTrainer that takes stock flags and arguments."""
    import lightning.pytorch as pl

    from lightning_fl import FederatedTrainer
    from lightning_fl.data import Federated
    from lightning_fl.outputs.run_folder import LAST, WRITTEN

    defaults = {name: each.default for name, each in signature(pl.Trainer.__init__).parameters.items()}
    names = {"max_epochs": "max_rounds", "min_epochs": "min_rounds", "check_val_every_n_epoch": "val_every_n_rounds"}
    own_columns = ("clients/", "comm/", "model/", "time/", "round", "train/loss")

    class Loaders(pl.LightningDataModule):
        """Loaders given to a call, or the module's own."""

        def __init__(self, model: Any, **loaders: Any) -> None:
            super().__init__()
            self.model = model
            for stage, given in loaders.items():
                own = getattr(model, f"{stage}_dataloader")
                setattr(self, f"{stage}_dataloader", own if given is None else lambda given=given: given)

    class Trainer(FederatedTrainer):
        """One client with all samples, one epoch a round."""

        def __init__(self, **flags: Any) -> None:
            flags = {names.get(name, name): x for name, x in flags.items() if x is not None and x != defaults.get(name)}
            if not flags.get("barebones"):
                flags.pop("barebones", None)
            flags.setdefault("max_rounds", 1000)
            if flags["max_rounds"] == -1:
                flags["max_rounds"] = 1000
            own = {"clients_per_round": 1, "local_epochs": 1, "accelerator": "cpu", "runner": "lightning"}
            super().__init__(**(own | flags))

        def fit(self, model: Any, train_dataloaders: Any = None, val_dataloaders: Any = None, datamodule: Any = None,
                ckpt_path: Any = None, **others: Any) -> None:  # fmt: skip
            if isinstance(train_dataloaders, pl.LightningDataModule):
                datamodule, train_dataloaders = train_dataloaders, None
            data = model if datamodule is None else datamodule
            if train_dataloaders is not None or val_dataloaders is not None:
                data = Loaders(model, train=train_dataloaders, val=val_dataloaders)
            try:
                super().fit(model, Federated(data, num_clients=1), ckpt_path=ckpt_path, verbose=False, **others)
            except KeyboardInterrupt as error:  # which would end the suite
                raise RuntimeError("fit raises KeyboardInterrupt") from error
            finally:
                self._remove_own_files()

        def _remove_own_files(self) -> None:
            """Remove the files of the run, which tests do not expect beside those of loggers and of a ModelCheckpoint."""
            saving = [c for c in self.checkpoint_callbacks if isinstance(c, pl.callbacks.ModelCheckpoint)]
            folder = Path(self.default_root_dir)
            kept = {os.path.abspath(c.last_model_path) for c in saving}
            if self.enable_checkpointing and not saving:
                kept |= {str(folder / LAST)}
            for name in WRITTEN:
                if str(folder / name) not in kept:
                    (folder / name).unlink(missing_ok=True)
            with suppress(OSError):
                (folder / LAST).parent.rmdir()

        def _run_on(self, method: str, stage: str, model: Any, dataloaders: Any, datamodule: Any, others: Any) -> Any:
            if isinstance(dataloaders, pl.LightningDataModule):
                datamodule, dataloaders = dataloaders, None
            model = self.lightning_module if model is None else model
            data = model if datamodule is None else datamodule
            if dataloaders is not None:
                data = Loaders(model, **{stage: dataloaders})
            return getattr(super(), method)(model, Federated(data, num_clients=1), **others)

        def validate(self, model: Any = None, dataloaders: Any = None, datamodule: Any = None, **others: Any) -> Any:
            return self._run_on("validate", "val", model, dataloaders, datamodule, others)

        def test(self, model: Any = None, dataloaders: Any = None, datamodule: Any = None, **others: Any) -> Any:
            return self._run_on("test", "test", model, dataloaders, datamodule, others)

        def predict(self, model: Any = None, dataloaders: Any = None, datamodule: Any = None, **others: Any) -> Any:
            return self._run_on("predict", "predict", model, dataloaders, datamodule, others)

    class Shown(dict[str, Any]):
        """Metrics without the columns of a federation; what a callback writes reaches the trainer, as in Lightning."""

        def __init__(self, metrics: dict[str, Any], own: list[str]) -> None:
            super().__init__({key: x for key, x in metrics.items() if key not in own})
            self.metrics = metrics

        def __setitem__(self, key: str, value: Any) -> None:
            super().__setitem__(key, value)
            self.metrics[key] = value

        def update(self, *given: Any, **named: Any) -> None:
            super().update(*given, **named)
            self.metrics.update(*given, **named)

    def without_own_columns(name: str) -> Any:
        def shown(self: Any) -> Any:
            values = getattr(FederatedTrainer, name).fget(self)
            own = [key for key in values if key.startswith(own_columns)]
            if name == "logged_metrics":  # in which a value on step and on epoch has its own name beside Lightning's
                own += [key for key in values if "{}_epoch{}{}".format(*key.partition("/dataloader_idx")) in values]
            return Shown(values, own)

        return property(shown)

    for name in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
        setattr(Trainer, name, without_own_columns(name))
    Trainer.__qualname__ = "Trainer"  # so that it can be pickled
    globals()["Trainer"] = pl.Trainer = Trainer  # type: ignore[misc]


if os.environ.get(RESULTS, "").endswith(".federated"):
    _replace_trainer()
if __name__ == "__main__":
    main()

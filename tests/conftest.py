"""Tiers and shared fixtures of all tests.

pytest's first process, which only hands out the tests, imports this file as well: torch and Lightning are imported where they are
used.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import pytest
from command_line import Command, Outcome, forget_types, run_command
from hypothesis import HealthCheck, settings
from quiet import QUIET

if TYPE_CHECKING:
    import lightning as L  # noqa: N812

    from lightning_fl import FederatedTrainer

# Tests run in parallel and start programs of their own, so each uses one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No example fails because the machine is busy; without this each, and drawing it, has a limit of time.
settings.register_profile("any machine", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

TIERS = ("process", "matrix", "slow", "thirdparty")
"""Marks of tests that `pytest` alone leaves out."""
CASES_OF_A_TRAINING_TEST = 1
"""Cases of a test that trains that run by default, unless the mark `sampled` says another number."""
TRAINING = {"make_trainer", "make_stock_trainer", "lightning_fl", "types_of_a_new_process"}
"""Fixtures of tests that train, or that make the parser of the command line."""
NOT_QUICK = ("tests/report", "tests/study", "tests/callbacks")
"""Folders of tests that write whole reports, read whole studies, or train with Lightning's own trainer."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import the folders that have no quick test if only quick tests are wanted."""
    is_left_out = collection_path in [config.rootpath / folder for folder in NOT_QUICK]
    return True if is_left_out and config.option.markexpr == "quick" else None


@pytest.hookimpl(tryfirst=True)  # before the tests of other tiers are deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the quick tests, and the cases beyond the samples; refuse a test of two tiers."""
    cases = defaultdict(list)
    for item in items:
        tiers = [tier for tier in TIERS if item.get_closest_marker(tier)]
        if "process" in tiers and len(tiers) > 1:
            raise pytest.UsageError(f"{item.nodeid} is marked as {' and '.join(tiers)}: keep one")
        if not tiers:
            cases[item.nodeid.partition("[")[0]].append(item)
    for found in cases.values():
        further = set(beyond_sample(found, sample_size(found[0])))
        for item in found:
            if item in further:
                item.add_marker("matrix")
            elif not trains(item) and not item.get_closest_marker("long"):
                item.add_marker("quick")


def trains(item: pytest.Item) -> bool:
    """Return whether a test trains, as its mark, its fixtures or its folder say."""
    marked = item.get_closest_marker("trains") or TRAINING.intersection(getattr(item, "fixturenames", ()))
    return bool(marked) or item.nodeid.startswith(NOT_QUICK)


def sample_size(item: pytest.Item) -> float:
    """Return how many cases of a test run by default."""
    if mark := item.get_closest_marker("sampled"):
        return mark.args[0]
    return CASES_OF_A_TRAINING_TEST if trains(item) else inf


def beyond_sample(cases: list[pytest.Item], size: float) -> list[pytest.Item]:
    """Return the cases of a test that are left after choosing `size`, each with as many new values of parameters as possible.

    A hash decides between equals: it takes other cases in each test, and changes few if cases are added.
    """
    if size >= len(cases):
        return []
    left, seen = sorted(cases, key=lambda item: crc32(item.nodeid.encode())), set[tuple[str, str]]()
    values = {item: {(name, repr(value)) for name, value in item.callspec.params.items()} for item in cases}
    for _ in range(int(size)):
        chosen = max(left, key=lambda item: len(values[item] - seen))  # the first of the best
        left.remove(chosen)
        seen |= values[chosen]
    return left


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spare the garbage collector the modules and the tests: they live as long as the process, and are a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """Let the collector have them again: some libraries report what it leaves behind at the end."""
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Use one thread, whatever OMP_NUM_THREADS is."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _entry_points_are_read_once() -> Iterator[None]:
    """Read the packages' metadata once: each Fabric and each trainer looks there for callbacks, a sixth of a short fit's time."""
    from lightning.fabric.utilities import registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "entry_points", cache(registry.entry_points))
        yield


@pytest.fixture(autouse=True, scope="session")
def _logged_values_stay_on_their_device() -> Iterator[None]:
    """Do not look for tensors to move in a logged value that is on its device: Lightning does, for a tenth of a short fit."""
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric

    move = _ResultMetric.to

    def to(self: _ResultMetric, device: Any) -> _ResultMetric:
        return self if self.is_tensor and self.value.device == device else move(self, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_ResultMetric, "to", to)
        yield


@pytest.fixture(autouse=True, scope="session")
def _files_may_be_lost_with_the_power() -> Iterator[None]:
    """Do not wait for the disk: that takes a quarter of a short run that writes checkpoints."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True)
def _as_in_a_new_process() -> Iterator[None]:
    """Seed every test alike, and undo what tests leave: an open run of W&B, torch's precision, the level of Lightning's logger.

    Benchmarks set the precision for the whole process, and are quiet. All is in one fixture, because each costs every test time.
    """
    import torch

    from lightning_fl.checks.float32 import Float32

    os.environ["PL_GLOBAL_SEED"] = "0"
    os.environ.pop("COLUMNS", None)  # the width of the terminal from which the tests run
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():  # else torch.manual_seed would keep the seed and the calls for later, every time
        torch.cuda.manual_seed_all(0)
    precision, logger = Float32.now(), logging.getLogger("lightning.pytorch")
    level = logger.level
    yield
    precision.set()
    logger.setLevel(level)
    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:  # the next test would go on with it
        wandb.finish()


@pytest.fixture
def says_lost(caplog: pytest.LogCaptureFixture) -> Callable[[str], AbstractContextManager[None]]:
    """Return a context manager that checks that its block logs, whatever the filters of warnings, that something is lost."""

    @contextmanager
    def check(pattern: str) -> Iterator[None]:
        caplog.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
        said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert any(re.search(pattern, sentence) for sentence in said), said

    return check


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., FederatedTrainer]:
    """Return a factory of quiet trainers on the CPU that write nothing, unless given `**keeps_files` or other flags."""
    from lightning_fl import FederatedTrainer

    def make(**flags: Any) -> FederatedTrainer:
        return FederatedTrainer(
            **{
                **QUIET,
                "num_sanity_val_steps": 0,
                "default_root_dir": tmp_path,
                "max_rounds": 2,
                "clients_per_round": 3,
                **flags,
            }
        )

    return make


@pytest.fixture
def make_stock_trainer(tmp_path: Path) -> Callable[..., L.Trainer]:
    """Return a factory of Lightning's own trainers, as quiet as those of `make_trainer`."""
    import lightning as L  # noqa: N812

    def make(**flags: Any) -> L.Trainer:
        return L.Trainer(**{**QUIET, "num_sanity_val_steps": 0, "default_root_dir": tmp_path, "max_epochs": 2, **flags})

    return make


@pytest.fixture
def types_of_a_new_process() -> None:
    """Empty typing's caches for a test that makes the parser of the command line."""
    forget_types()


@pytest.fixture
def lightning_fl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], types_of_a_new_process: None
) -> Command:
    """Return a function that runs a command line in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> Outcome:
        return run_command(monkeypatch, capsys, *words)

    return run


@pytest.fixture
def keeps_files() -> dict[str, Any]:
    """Return the flags of a trainer that writes metrics.csv and checkpoints."""
    return {"logger": True, "enable_checkpointing": True}

"""Failures of a command: the errors that the user can fix, as sentences that one of several processes prints.

Most errors happen in every process: rank 0 prints them, and the others stay silent once they see that it did. If rank 0 does
not print an error within `PATIENCE_S`, another rank prints it with its rank. The ranks communicate through the store of their
process group, which each can use on its own: a collective would wait for processes without an error. Before there is a group,
the others wait as well, longer under torchrun, which ends them when rank 0 exits.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from errno import ENAMETOOLONG
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from typing import NoReturn

from lightning_fl.errors import FileError, UserError, shortened

PATIENCE_S = 3.0
TORCHRUN_PATIENCE_S = 60.0
STAY_S = 1.0


def file_error_of(error: BaseException) -> FileError | None:
    """Return the error of a run's file among `error` and its causes; None without."""
    return next((cause for cause in causes_of(error) if isinstance(cause, FileError)), None)


def sentence_of(error: BaseException) -> str | None:
    """Return on one line the user's mistake, or the missing package, among `error` and its causes; None without."""
    causes = list(causes_of(error))
    mistakes = [cause for cause in causes if _is_users(cause)]
    if mistakes:
        return " ".join(_words(mistakes[0]).split())
    texts = [str(cause) for cause in causes if isinstance(cause, ImportError)]
    commands = [command for text in texts for command in re.findall(r"pip install (?:-U )?['\w][^`\s]*", text)]
    named = re.search(r"class_path '(?:\w+\.)*(\w+)'|`([A-Z]\w+)`", "\n".join(map(str, causes)))
    owner = (named[1] or named[2]) if named else "a class of the configuration"
    if commands:
        return f"{owner} needs a package that is not installed: {_declared(commands[-1])}."
    missing = [
        cause.name.partition(".")[0] for cause in causes if isinstance(cause, ModuleNotFoundError) and cause.name
    ]
    return next(
        (f"{owner} needs the package {name}, which is not installed." for name in missing if not _is_found(name)), None
    )


def _is_found(package: str) -> bool:
    """True if a package is installed."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def _declared(command: str) -> str:
    """Return the command with our extra that has the package, or with the version that we need; otherwise unchanged."""
    wanted = re.sub(r"[\s\"'<>=!~].*", "", command.split("install ")[-1].removeprefix("-U ").lstrip("'\""))
    try:
        requirements = requires("lightning-fl") or []
    except PackageNotFoundError:  # it is not installed, but runs from its source
        return command
    for declared, _, marker in (requirement.partition(";") for requirement in requirements):
        if re.match(rf"{re.escape(wanted)}(?![\w.-])", declared, re.IGNORECASE):
            extra = re.search(r"extra == ['\"]([\w-]+)['\"]", marker)
            needed = f"lightning-fl[{extra[1]}]" if extra else declared.strip()
            return f"pip install '{needed}'"
    return command


def _is_users(error: BaseException) -> bool:
    """True for a mistake of the user; Lightning's are recognised without importing Lightning."""
    is_lightnings = type(error).__name__ == "MisconfigurationException"
    is_name = isinstance(error, OSError) and error.errno == ENAMETOOLONG
    return (
        isinstance(error, UserError) or is_lightnings or is_name or "Early stopping conditioned on metric" in str(error)
    )


def _words(error: BaseException) -> str:
    if isinstance(error, OSError) and not isinstance(error, UserError):
        return f"the path {error.filename} cannot be used: {error.strerror}."
    return str(error)


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, the error that caused it, and so on."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def say_once(start: str, sentence: str) -> None:
    """Print a line on standard error, unless another process of the run has printed the same sentence or is about to.

    Args:
        start: start of the line.
        sentence: error sentence, printed after the rank if that is not 0.
    """
    rank, store = int(os.environ.get("RANK", "0")), None
    distributed = sys.modules.get("torch.distributed")  # an error before a run does not import torch
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        rank, store = distributed.get_rank(), distributed.distributed_c10d._get_default_store()
    ends_all = store is None and "TORCHELASTIC_RUN_ID" in os.environ  # torchrun ends this process when rank 0 exits
    is_first, end = True, time.monotonic() + (TORCHRUN_PATIENCE_S if ends_all else PATIENCE_S)
    with suppress(RuntimeError):  # rank 0, whose process may hold the store, has exited without an error
        while rank > 0 and time.monotonic() < end and not (store is not None and store.check([sentence])):
            time.sleep(0.02)
        is_first = store is None or store.add(sentence, 1) == 1
    if is_first:
        print(start + (f"on rank {rank}: " if rank > 0 else "") + sentence, file=sys.stderr, flush=True)
    if store is not None and rank == 0:
        time.sleep(STAY_S)  # keep the store until the other ranks with the same error have used it


def fail(sentence: str) -> NoReturn:
    """Print one sentence on standard error, from one of the processes, and exit with code 2."""
    say_once("lightning-fl: error: ", shortened(sentence))
    sys.exit(2)

"""Run work in separate processes, as torchrun starts them, without waiting for its imports.

Processes are forked from one that has only imported the package: a process that has computed a gradient
cannot be forked, and a new interpreter takes many seconds to import torch and Lightning.
"""

import atexit
import multiprocessing
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

CONTEXT = multiprocessing.get_context("forkserver")
# `lightning_fl.cli` alone imports nothing before its command is known.
CONTEXT.set_forkserver_preload(
    ["lightning_fl.algorithms", "lightning_fl.cli.federated_cli", "pytest", "sklearn.datasets"]
)
LIMIT_S = 300


def run_command(words: Sequence[str], num_processes: int = 1, exit_codes: Sequence[int] | None = None) -> None:
    """Run `lightning-fl words`."""
    run(_command, list(words), num_processes=num_processes, exit_codes=exit_codes)


def run(
    work: Callable[..., None], *arguments: Any, num_processes: int = 1, exit_codes: Sequence[int] | None = None
) -> None:
    """Run a function in the given number of processes with one thread each; fail with their output if one fails.

    Args:
        work: module-level function.
        arguments: arguments of `work`.
        num_processes: number of processes; with two or more, each gets torchrun's environment variables.
        exit_codes: expected exit codes, by default all 0.
    """
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        printed = [Path(folder) / str(rank) for rank in range(num_processes)]
        processes = [
            CONTEXT.Process(target=_begin, args=(work, arguments, rank, num_processes, port, path))
            for rank, path in enumerate(printed)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(LIMIT_S)
        for process in processes:
            process.kill()
            process.join()
        codes = [process.exitcode for process in processes]
        assert codes == list(exit_codes or [0] * num_processes), "\n".join(path.read_text()[-3000:] for path in printed)


def _begin(
    work: Callable[..., None], arguments: tuple[Any, ...], rank: int, num_processes: int, port: int, printed: Path
) -> None:
    for name in [name for name in os.environ if name.startswith(("PL_", "LOCAL_", "MASTER_", "WORLD_"))]:
        del os.environ[name]
    if num_processes > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_processes),
            "LOCAL_WORLD_SIZE": str(num_processes),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "none",
        }
    file = os.open(printed, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(1)
    try:
        work(*arguments)
    finally:
        atexit._run_exitfuncs()  # a forked process does not run them by itself


def _command(words: list[str]) -> None:
    from lightning_fl.cli import main

    sys.argv = ["lightning-fl", *words]
    main(words)

"""Errors of several processes, printed once.

Most errors happen in every process: rank 0 prints them, and the others stay silent once they see that it did. If rank 0 does
not print an error within `PATIENCE_S`, another rank prints it with its rank. The ranks communicate through the store of
torch.distributed, which each can use on its own: a collective would wait for processes without an error.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch.distributed as distributed

PATIENCE_S = 3.0
STAY_S = 1.0


def say_once(start: str, sentence: str) -> None:
    """Print a line on standard error, unless another process of the run has printed the same sentence or is about to.

    Args:
        start: start of the line.
        sentence: error sentence, printed after the rank if that is not 0.
    """
    rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if distributed.is_available() and distributed.is_initialized():
        rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
    # torchrun's store outlives the processes, which torchrun may restart.
    key = f"said in attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}: {sentence}"
    is_first = True
    try:
        store = _store() if num_ranks > 1 else None
        if store is not None:
            if rank > 0:
                _wait(partial(store.check, [key]), PATIENCE_S)
            is_first = store.add(key, 1) == 1
    except RuntimeError:  # rank 0, whose process may hold the store, has exited without waiting
        store = None
    if is_first:
        print(start + (f"on rank {rank}: " if rank > 0 else "") + sentence, file=sys.stderr, flush=True)
    if store is not None and rank == 0:
        # Keep the store until the other ranks with the same error have used it.
        _wait(lambda: store.add(key, 0) == num_ranks, STAY_S)


def _store() -> distributed.Store | None:
    """Return the store of the process group, or torchrun's if there is no group yet; None without either."""
    if distributed.is_initialized():
        return distributed.distributed_c10d._get_default_store()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return distributed.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=PATIENCE_S))
    return None


def _wait(until: Callable[[], bool], limit_s: float) -> None:
    """Wait until `until()` is true, for at most `limit_s` seconds."""
    end = time.monotonic() + limit_s
    while not until() and time.monotonic() < end:
        time.sleep(0.02)

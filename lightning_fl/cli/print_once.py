"""What the processes of a run all have to say is said by one of them.

A mistake is mostly every process's: rank 0 says it, and the others are silent once they have seen that it did. What rank 0
does not say within a moment, another says with its rank. They find each other in the store that torch.distributed keeps for
them, which answers to each alone: a collective would wait for processes that are well.
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
    """Print a line on standard error, unless another process of the run has said the same or is about to.

    Args:
        start: of the line.
        sentence: what is said, after the rank if that is not 0.
    """
    rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if distributed.is_available() and distributed.is_initialized():
        rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
    # The store of torchrun outlives the processes, which it may start once more.
    key = f"said in attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}: {sentence}"
    is_first = True
    try:
        store = _store() if num_ranks > 1 else None
        if store is not None:
            if rank > 0:
                _wait(partial(store.check, [key]), PATIENCE_S)
            is_first = store.add(key, 1) == 1
    except RuntimeError:  # rank 0, whose process may hold the store, has gone without having waited
        store = None
    if is_first:
        print(start + (f"on rank {rank}: " if rank > 0 else "") + sentence, file=sys.stderr, flush=True)
    if store is not None and rank == 0:
        # The others that come with the same have to find the store.
        _wait(lambda: store.add(key, 0) == num_ranks, STAY_S)


def _store() -> distributed.Store | None:
    """The store of the process group, or torchrun's before there is one; None without either."""
    if distributed.is_initialized():
        return distributed.distributed_c10d._get_default_store()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return distributed.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=PATIENCE_S))
    return None


def _wait(until: Callable[[], bool], limit_s: float) -> None:
    """Ask again and again, for a moment."""
    end = time.monotonic() + limit_s
    while not until() and time.monotonic() < end:
        time.sleep(0.02)

"""Errors of several processes, printed once.

Most errors happen in every process: rank 0 prints them, and the others stay silent once they see that it did. If rank 0 does
not print an error within `PATIENCE_S`, another rank prints it with its rank. The ranks communicate through the store of their
process group, which each can use on its own: a collective would wait for processes without an error. Before there is a group,
the others wait as well, longer under torchrun, which ends them when rank 0 exits.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from typing import NoReturn

from lightning_fl.errors import shortened

PATIENCE_S = 3.0
TORCHRUN_PATIENCE_S = 60.0
STAY_S = 1.0


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

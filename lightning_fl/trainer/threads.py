"""Choice of the number of threads that torch computes with in each process.

Threads share the work of one operation, so they help only with large operations. With small ones they cost time, most of all
on a busy machine. The choice changes the last bits of results, so it follows a fixed rule, not a measured time, and a
checkpoint contains it.
"""

from __future__ import annotations

import os

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_fl.outputs.cores import usable_cores
from lightning_fl.processes import gather_objects
from lightning_fl.trainer.lightning_interface import TrainerInterface

WORK_OF_TWO = 8_000_000
"""Multiply-accumulates of a step's forward pass from which two threads are faster than one (docs/explanation/speed.md)."""

WORK_OF_A_THREAD = 20_000_000
"""Multiply-accumulates for each thread if there are more than two."""

# Lightning sets the variable for further processes; only the value from before is the user's.
IS_GIVEN = "OMP_NUM_THREADS" in os.environ


def choose_threads(wanted: int | None, work: int | None, num_processes: int, num_cores: int) -> int:
    """Return the number of threads for each process.

    Args:
        wanted: value of the trainer's flag `threads`; None to choose.
        work: multiply-accumulates of the forward pass of a step's samples; None if they are unknown.
        num_processes: processes on this machine.
        num_cores: cores that these processes may use.

    Returns:
        `wanted`; or torch's present number if OMP_NUM_THREADS is set or the work is unknown; or one below `WORK_OF_TWO`, and
        from there on two or more, one for each `WORK_OF_A_THREAD`, but not more than the process's share of the present number.
    """
    present = torch.get_num_threads()
    if wanted is not None:
        return wanted
    if IS_GIVEN or work is None:
        return present
    share = max(1, min(present, num_cores // num_processes))
    return 1 if work < WORK_OF_TWO else min(share, max(2, work // WORK_OF_A_THREAD))


def is_busy(num_threads: int) -> bool:
    """True if other programs leave the machine fewer free cores than this number of threads."""
    return hasattr(os, "getloadavg") and os.getloadavg()[0] + num_threads > (os.cpu_count() or 1) + 0.5


def set_threads(trainer: TrainerInterface, work: int | None) -> None:
    """Let torch compute with the number of threads that suits a step's multiply-accumulates, and say so; only on a CPU."""
    if trainer.fabric.device.type != "cpu":
        return
    present = torch.get_num_threads()
    num_processes = trainer.world_size // trainer.num_nodes
    num_cores = len(set[int]().union(*gather_objects(trainer.fabric, usable_cores())))  # each may have its own
    chosen = trainer.fabric.broadcast(choose_threads(trainer.threads, work, num_processes, num_cores))
    torch.set_num_threads(chosen)
    if trainer.threads is None and chosen > 1 and is_busy(chosen * num_processes):
        rank_zero_info(
            f"Computing with {chosen} threads while other programs keep the machine busy: trainer.threads 1 may be much faster."
        )
    elif trainer.threads is None and chosen != present:
        rank_zero_info(
            f"Computing with {chosen} of {present} threads, because a step is small ({work or 0:,} multiply-accumulates); "
            "trainer.threads sets another number."
        )

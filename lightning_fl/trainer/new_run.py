"""State of a run that begins, and the folder of its client states."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import finalize

from lightning_fl.algorithms import Algorithm
from lightning_fl.engine.network import Network
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.outputs.run_folder import require_writable
from lightning_fl.processes import gather_objects
from lightning_fl.state.run_state import Run
from lightning_fl.trainer.lightning_interface import TrainerInterface


def initial_run(flat_module: FlatModule, algorithm: Algorithm, network: Network) -> Run:
    """Return the run of a fit that begins, with the first states of the server's steps."""
    run, steps = new_run(flat_module), zip(algorithm.step_names(), algorithm.steps, strict=True)
    run.server = {key: step.init(flat_module.params) for key, step in steps}
    run.macs_at_start = network.macs
    return run


def new_run(flat_module: FlatModule) -> Run:
    """Return a run that begins with the model that the flat module holds."""
    return Run(
        seed=seed_of_run(),
        layout=flat_module.layout,
        buffer_layout=flat_module.buffer_layout,
        params=flat_module.params.clone(),
        buffers=flat_module.buffers.clone(),
        counters=flat_module.read_counters(),
        personal_layout=flat_module.personal.layout,
        personal_buffer_layout=flat_module.personal.buffers.layout,
        personal=flat_module.personal.read(),
    )


def seed_of_run() -> int:
    """Return the seed of a run."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def keep_client_states(trainer: TrainerInterface) -> Callable[[], Any] | None:
    """Make the folder of client states on each machine, if the trainer stores them on disk; it is deleted with the run.

    Returns:
        Function that deletes it earlier; None in a process that has made no folder.
    """
    if trainer.client_states == "memory":
        return None
    run = trainer.run
    parent = trainer.default_root_dir if trainer.client_states == "disk" else trainer.client_states
    made, delete = None, None
    if trainer.local_rank == 0:
        require_writable(parent, flag="client_states" if trainer.client_states != "disk" else "default_root_dir")
        made = tempfile.mkdtemp(prefix="client-states-", dir=parent)
        delete = finalize(run, shutil.rmtree, made, ignore_errors=True)
    folder = gather_objects(trainer.fabric, made)[trainer.global_rank - trainer.local_rank]
    run.keep_clients_on_disk(Path(folder), writes=trainer.local_rank == 0)
    return delete
